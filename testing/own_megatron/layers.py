"""Layers of stock linears: Megatron's own, and those of an imagined fork.

Norm and attention are those of pretrain_gpt.py, so that its losses are to be repeated bit for bit.
Megatron's own norm for machines without Transformer Engine and apex refuses sequence parallelism.
"""

from functools import partial
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
)

from megatron_fp4.mcore.model.attention import SdpaAttention
from megatron_fp4.mcore.model.norm import Norm


def block(config: Any, vp_stage: int | None = None, **changed: Any) -> TransformerBlockSubmodules:
    """The layers of a pipeline stage. changed: other classes of linears or norms, by name."""
    classes = {
        "norm": Norm,
        "linear_qkv": ColumnParallelLinear,
        "linear_proj": RowParallelLinear,
        "linear_fc1": ColumnParallelLinear,
        "linear_fc2": RowParallelLinear,
        "mlp": MLP,
    } | changed
    layer = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=classes["norm"],
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=classes["linear_qkv"],
                    core_attention=SdpaAttention,
                    linear_proj=classes["linear_proj"],
                    q_layernorm=IdentityOp,
                    k_layernorm=IdentityOp,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=classes["norm"],
            mlp=partial(
                classes["mlp"].as_mlp_submodule,
                submodules=MLPSubmodules(
                    linear_fc1=classes["linear_fc1"], linear_fc2=classes["linear_fc2"]
                ),
            ),
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map={}
            if classes["norm"] is IdentityOp
            else {
                "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
                "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
            },
        ),
    )
    layers = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=Norm)
