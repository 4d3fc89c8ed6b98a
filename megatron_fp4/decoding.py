"""Decodes quantized tensors, by a kernel where there is one for their format."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_fp4.arithmetic.hadamard import inverse
from megatron_fp4.arithmetic.quantized_tensor import QuantizedTensor
from megatron_fp4.arithmetic.quantizer import Quantizer
from megatron_fp4.operands import Decoded
from megatron_fp4.target import triton_problem


def decoded(x: QuantizedTensor, dtype: torch.dtype) -> Decoded:
    """What `QuantizedTensor.with_row_factors` returns, in `dtype`."""
    if dtype == torch.bfloat16 and _has_kernel(x):
        from megatron_fp4.kernels import block_values  # imports Triton

        return block_values.decoded(x)
    return Decoded(*x.with_row_factors(dtype))


def dequantized(x: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """What `QuantizedTensor.dequantize` returns, for a matrix."""
    if _has_kernel(x):
        from megatron_fp4.kernels import block_values  # imports Triton

        return block_values.dequantized(x, dtype)
    return x.dequantize(dtype)


def inverse_of(x: QuantizedTensor, dtype: torch.dtype, group: int, signs: Tensor | None) -> Tensor:
    """The inverse Hadamard transform of a matrix whose codes are `x`, in `dtype`, which is float32
    or float64: `arithmetic.hadamard.inverse` of what `dequantized` returns.

    x: blocked and transformed along its last axis. group, signs: those of the transform.
    """
    if _has_kernel(x) and has_inverse_kernel(x.quantizer, group, dtype):
        from megatron_fp4.kernels import block_values, tile_hadamard  # imports Triton

        return block_values.inverse(x, tile_hadamard.Transform(group, signs))
    return inverse(dequantized(x, dtype), group, signs)


def has_inverse_kernel(quantizer: Quantizer, group: int, dtype: torch.dtype) -> bool:
    """Whether a kernel computes `inverse_of` where kernels run."""
    from megatron_fp4.kernels import block_values  # imports Triton

    return dtype == torch.float32 and block_values.restores(quantizer, group)


def _has_kernel(x: QuantizedTensor) -> bool:
    if not x.codes.is_cuda or triton_problem() is not None:
        return False
    from megatron_fp4.kernels import block_values  # imports Triton

    return block_values.decodes(x.quantizer)
