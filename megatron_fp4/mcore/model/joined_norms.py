"""RMSNorms that the linears behind them compute, as they quantize their X.

Such a norm is then not in memory, and its gradient is summed with that of the residual connection
in one kernel (execution/norm.py).
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

from megatron_fp4.mcore.model.layers import Fp4ColumnParallelLinear
from megatron_fp4.mcore.model.mlp import GatedMLP
from megatron_fp4.mcore.model.norm import Norm
from megatron_fp4.mcore.model.self_attention import RotatingSelfAttention


def join(chunk: nn.Module) -> int:
    """Makes the linears of a model chunk compute the norms before them, where they can.

    Call it when recipes have been attached to the linears. Returns the number of such norms.

    A norm is computed by linear_qkv or by mlp.linear_fc1 if the layer and the module around the
    linear are Megatron's own, in which nothing else reads the norm's result.
    """
    pairs = [pair for layer in chunk.modules() if _is_plain(layer) for pair in _pairs(layer)]
    joined = [(norm, linear) for norm, linear in pairs if _can_join(norm, linear)]
    for norm, linear in joined:
        linear.fp4.take_norm(norm.rms_norm)
        norm.linear_follows = linear.follows
    return len(joined)


def _is_plain(layer: nn.Module) -> bool:
    """Whether a module is a layer whose forward pass is Megatron's, with residuals in the dtype of
    the model."""
    own = [name for name in vars(TransformerLayer) if name.lstrip("_").startswith("forward")]
    is_own = _has(layer, TransformerLayer, *own)
    return is_own and not layer.config.fp32_residual_connection  # type: ignore[union-attr]


def _pairs(layer: Any) -> list[tuple[Any, Any]]:
    """(norm, linear) for each linear of a layer that alone takes the result of a norm."""
    attention, mlp, found = layer.self_attention, layer.mlp, []
    own = "forward", "get_query_key_value_tensors"
    is_plain = any(_has(attention, base, *own) for base in (SelfAttention, RotatingSelfAttention))
    if is_plain and not layer.recompute_input_layernorm:
        found.append((layer.input_layernorm, attention.linear_qkv))
    if type(mlp) in (MLP, GatedMLP) and not layer.recompute_pre_mlp_layernorm:
        found.append((layer.pre_mlp_layernorm, mlp.linear_fc1))
    return found


def _has(module: nn.Module, base: type, *methods: str) -> bool:
    """Whether a module is a `base`, and these methods of it are those of `base`."""
    if not isinstance(module, base):
        return False
    return all(getattr(type(module), name) is getattr(base, name) for name in methods)


def _can_join(norm: Any, linear: Any) -> bool:
    if type(norm) is not Norm or not norm.is_rms:
        return False
    if not isinstance(linear, Fp4ColumnParallelLinear) or linear.fp4 is None:
        return False
    # A GPU has kernels for BF16 alone; Liger-Kernel's are faster than PyTorch's operators.
    is_fast = not linear.weight.is_cuda or linear.config.params_dtype is torch.bfloat16
    return bool(linear.may_join and is_fast)
