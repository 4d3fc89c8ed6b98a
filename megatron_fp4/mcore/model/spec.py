"""Specifies the modules of which Megatron builds a GPT or LLaMA layer.

Megatron's model builder calls `layer_spec`. Embedding, head, router and the GEMMs inside attention
are not linears of this package and stay in high precision.
"""

from functools import partial

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_mtp_block_spec_for_backend,
    get_mlp_module_spec_for_backend,
)
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType, LayerType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules, TEActivationFunctionBuilder
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import ExpertsBuilder
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlockSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import L2Norm, LayerNormBuilder
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from megatron.training.models.gpt import GPTModelConfig

from megatron_fp4.mcore.launch.refusals import model as refusals
from megatron_fp4.mcore.launch.refusals.table import refuse
from megatron_fp4.mcore.model.attention import SdpaAttention
from megatron_fp4.mcore.model.layers import Fp4ColumnParallelLinear, Fp4RowParallelLinear
from megatron_fp4.mcore.model.norm import Norm
from megatron_fp4.mcore.model.replacement import fusable
from megatron_fp4.mcore.model.self_attention import RotatingSelfAttention


class Fp4SpecProvider(BackendSpecProvider):
    """Chooses the classes of a layer's modules: linears, norms, attention and experts.

    Linears are this package's if a recipe is given, and Megatron's without one. With
    --transformer-impl transformer_engine, norms and attention are Transformer Engine's, else this
    package's. With --fp4-format or --fp8-format the linears are Transformer Engine's too. A norm is
    never fused with a linear.
    """

    def __init__(self, config: TransformerConfig) -> None:
        self.config = config
        self.te: BackendSpecProvider | None = None
        if config.transformer_impl == "transformer_engine":
            from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

            self.te = TESpecProvider()

    @property
    def quantizes(self) -> bool:
        """Whether the launch has a recipe of this package (not upstream's --fp4-format)."""
        return self.config.fp4 is None and self.config.fp4_recipe is not None

    @property
    def upstreams(self) -> BackendSpecProvider | None:
        """Transformer Engine's provider if upstream's FP4 or FP8 is asked for, else None."""
        return None if self.config.fp4 is None and self.config.fp8 is None else self.te

    def column_parallel_linear(self) -> type:
        if self.upstreams is not None:
            return self.upstreams.column_parallel_linear()
        return Fp4ColumnParallelLinear if self.quantizes else ColumnParallelLinear

    def row_parallel_linear(self) -> type:
        if self.upstreams is not None:
            return self.upstreams.row_parallel_linear()
        return Fp4RowParallelLinear if self.quantizes else RowParallelLinear

    def fuse_layernorm_and_linear(self) -> bool:
        return False

    def column_parallel_layer_norm_linear(self) -> type | None:
        return None

    def layer_norm(
        self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False
    ) -> LayerNormBuilder:
        """The class of a norm. `Norm` reads from the configuration whether it is an RMSNorm."""
        if self.te is not None:
            return self.te.layer_norm(rms_norm=rms_norm, for_qk=for_qk, has_residual=has_residual)
        return Norm

    def core_attention(self) -> type:
        return SdpaAttention if self.te is None else self.te.core_attention()

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> ExpertsBuilder:
        refuse(refusals.experts(moe_use_grouped_gemm))
        return partial(
            SequentialMLP,
            submodules=MLPSubmodules(
                linear_fc1=self.column_parallel_linear(),
                linear_fc2=self.row_parallel_linear(),
                activation_func=self.activation_func(),
            ),
        )

    def activation_func(self) -> TEActivationFunctionBuilder | None:
        return None if self.te is None else self.te.activation_func()


def layer_spec(model: GPTModelConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """The specifications of the layers of this pipeline stage, and of the final norm.

    Set as GPTModelConfig.transformer_layer_spec. vp_stage: the virtual pipeline stage, if there is
    one. Raises ConfigError for architectures that are not supported.
    """
    config = model.transformer
    layers = _decoder_layers(config)
    if config.pipeline_model_parallel_layout is not None:
        here = config.pipeline_model_parallel_layout.get_layer_id_list(
            layer_type=LayerType.decoder, vp_stage=vp_stage
        )
    else:
        first = get_transformer_layer_offset(config, vp_stage=vp_stage)
        here = range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage))
    return TransformerBlockSubmodules(
        layer_specs=[layers[i] for i in here], layer_norm=Fp4SpecProvider(config).layer_norm()
    )


def mtp_block_spec(
    model: GPTModelConfig, transformer_layer_spec: object, vp_stage: int | None = None
) -> MultiTokenPredictionBlockSubmodules | None:
    """The specification of this stage's multi-token-prediction layers; None without them.

    Each contains a layer like the last one of the decoder.
    """
    config = model.transformer
    if config.mtp_num_layers is None:
        return None
    return get_gpt_mtp_block_spec_for_backend(
        config, _decoder_layers(config)[-1], Fp4SpecProvider(config), vp_stage=vp_stage
    )


def _decoder_layers(config: TransformerConfig) -> list[ModuleSpec]:
    """The specification of each layer of the whole model."""
    refuse(refusals.architecture(config))
    return [_decoder_layer(config, is_moe) for is_moe in _moe_pattern(config)]


def _moe_pattern(config: TransformerConfig) -> list[bool]:
    """Whether each layer of the model has experts.

    An integer `moe_layer_freq` N gives experts to every N-th layer, beginning with the first.
    """
    if config.num_moe_experts is None:
        return [False] * config.num_layers
    if isinstance(config.moe_layer_freq, int):
        return [i % config.moe_layer_freq == 0 for i in range(config.num_layers)]
    refuse(refusals.layers_of_experts(config))
    return [bool(is_moe) for is_moe in config.moe_layer_freq]


def _decoder_layer(config: TransformerConfig, is_moe: bool) -> ModuleSpec:
    provider = Fp4SpecProvider(config)
    norm = provider.layer_norm()
    qk_norm: object = IdentityOp
    if config.qk_l2_norm:
        qk_norm = L2Norm
    elif config.qk_layernorm:
        qk_norm = provider.layer_norm(for_qk=True)
    # Norms are saved under the keys that Transformer Engine's fused layers use, so that upstream's
    # layers can load these checkpoints, and the reverse. Upstream does not rename the norm before
    # experts.
    saved_as = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
    if not is_moe:
        saved_as["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=ModuleSpec(
                module=RotatingSelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=provider.column_parallel_linear(),
                    core_attention=provider.core_attention(),
                    linear_proj=provider.row_parallel_linear(),
                    q_layernorm=qk_norm,
                    k_layernorm=qk_norm,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=norm,
            mlp=fusable(
                get_mlp_module_spec_for_backend(
                    backend=provider,
                    num_experts=config.num_moe_experts if is_moe else None,
                    moe_grouped_gemm=config.moe_grouped_gemm,
                    use_te_activation_func=config.use_te_activation_func,
                )
            ),
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=saved_as,
        ),
    )
