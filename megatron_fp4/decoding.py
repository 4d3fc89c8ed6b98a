"""Decodes quantized tensors, by a kernel where there is one for their format."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_fp4.arithmetic.quantizer import QuantizedTensor
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


def _has_kernel(x: QuantizedTensor) -> bool:
    if not x.codes.is_cuda or triton_problem() is not None:
        return False
    from megatron_fp4.kernels import block_values  # imports Triton

    return block_values.decodes(x.quantizer)
