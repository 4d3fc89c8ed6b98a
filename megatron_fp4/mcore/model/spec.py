"""Which modules a GPT or LLaMA layer is built of.

`layer_spec` is what Megatron's model builder calls. Embedding, head, scores and router are
upstream's own and stay in high precision.
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
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
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


class Fp4SpecProvider(BackendSpecProvider):
    """The building blocks of a layer: this package's linears, and around them the best there is.

    With `--transformer-impl transformer_engine` norm and attention are Transformer Engine's, else
    this package's; its linears too where upstream's --fp4-format or --fp8-format asks for them. The
    norm is never fused into a linear.
    """

    def __init__(self, config: TransformerConfig) -> None:
        self.config = config
        self.te: BackendSpecProvider | None = None
        if config.transformer_impl == "transformer_engine":
            from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

            self.te = TESpecProvider()

    @property
    def quantizes(self) -> bool:
        """Whether a recipe of this package was asked for, and not upstream's --fp4-format."""
        return self.config.fp4 is None and self.config.fp4_recipe is not None

    @property
    def upstreams(self) -> BackendSpecProvider | None:
        """Who has linears that take upstream's FP4 and FP8, where those were asked for."""
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
        """`Norm` asks the configuration which norm it is, as Transformer Engine's does."""
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
    """The layers of this pipeline stage and the final norm: GPTModelConfig.transformer_layer_spec.

    Raises ConfigError for architectures that it does not build.
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
    """The multi-token-prediction layers of this stage, each around a layer like the last one."""
    config = model.transformer
    if config.mtp_num_layers is None:
        return None
    return get_gpt_mtp_block_spec_for_backend(
        config, _decoder_layers(config)[-1], Fp4SpecProvider(config), vp_stage=vp_stage
    )


def _decoder_layers(config: TransformerConfig) -> list[ModuleSpec]:
    """One spec for each layer of the whole model."""
    refuse(refusals.architecture(config))
    return [_decoder_layer(config, is_moe) for is_moe in _moe_pattern(config)]


def _moe_pattern(config: TransformerConfig) -> list[bool]:
    """Which layers hold experts; `moe_layer_freq` N means every N-th, from the first on."""
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
    # The keys under which Transformer Engine's fused layers save their norms: checkpoints load
    # into upstream's layers and back. Upstream leaves the norm before experts by its own name.
    saved_as = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
    if not is_moe:
        saved_as["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=ModuleSpec(
                module=SelfAttention,
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
            mlp=get_mlp_module_spec_for_backend(
                backend=provider,
                num_experts=config.num_moe_experts if is_moe else None,
                moe_grouped_gemm=config.moe_grouped_gemm,
                use_te_activation_func=config.use_te_activation_func,
            ),
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=saved_as,
        ),
    )
