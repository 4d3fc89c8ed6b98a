"""FP8 tensor cores (compute capability 9.0): MXFP4 operands carried in FP8, exactly.

E2M1 times a power of two is exact in FP8 while the exponent lies in the element's window: -8 to 6
in E4M3, -15 to 13 in E5M2. Block scales become part of the elements, relative to a power of two for
each row, which multiplies the product. X and W are carried in E4M3, gradients in E5M2; elements
below the window are rounded, and counted. Sums are accurate, in float32 (docs/numerics.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TypeGuard

import torch
from torch import Tensor

from megatron_fp4.backends import fused
from megatron_fp4.backends.base import Decoded, Operand, capability, finish
from megatron_fp4.backends.bf16 import Bf16
from megatron_fp4.formats import FP8_ELEMENTS
from megatron_fp4.quantizer import QuantizedTensor, Quantizer
from megatron_fp4.recipe import GemmRecipe

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
ALIGNMENT = 16  # of all three axes of an FP8 product


class Hopper(Bf16):
    """Quantizes as the other backends do; the GEMM is cuBLAS's for FP8."""

    name = "hopper"

    def unavailable(self, gemm: GemmRecipe, device: torch.device, dtype: torch.dtype) -> str | None:
        if capability(device) != (9, 0):
            return "FP8 products with a scale a row need a GPU of compute capability 9.0"
        if (reason := super().unavailable(gemm, device, dtype) or fused.problem()) is not None:
            return reason
        if not _rows_can_be_scaled():
            return "torch comes with a cuBLAS before 12.9: install a build for CUDA 12.9 or newer"
        if gemm.a is None or gemm.b is None:
            return "an operand is in high precision"
        if gemm.b.element == "e5m2":  # gradients are carried in that
            return "two E5M2 operands have no product on FP8 tensor cores"
        for quantizer in (gemm.a, gemm.b):
            if not _carried(quantizer):
                return f"{quantizer.scale} scales of {quantizer.element} are not powers of two"
        return None

    def carrier(self, gradient: bool) -> torch.dtype:
        return torch.float8_e5m2 if gradient else torch.float8_e4m3fn

    def decode(
        self, operands: Sequence[Operand], dtype: torch.dtype, gradient: bool = False
    ) -> list[Operand]:
        folded = {i: operand for i, operand in enumerate(operands) if _folds(operand)}
        elements = [self.carrier(gradient and i == 0) for i in folded]
        made = iter(fused.kernels().carrier.carried([*folded.values()], elements) if folded else ())
        return [
            Decoded(*next(made)) if i in folded else self._decoded(operand, dtype)
            for i, operand in enumerate(operands)
        ]

    def _decoded(self, operand: Operand, dtype: torch.dtype) -> Operand:
        if not _tiles(operand) or not operand.quantizer.outer:
            return super()._decoded(operand, dtype)
        outer = operand.block_scales().view(-1, 1)
        if operand.quantizer.element == "e2m1":
            values = fused.kernels().carrier.elements(operand.codes.contiguous())
        else:
            values = operand.codes.view(FP8_ELEMENTS[operand.quantizer.element])
        return Decoded(values, outer)

    def decoded_bytes(self, dtype: torch.dtype) -> int:
        return 1

    def multiply(
        self,
        a: Operand,
        b: Operand,
        correction: float,
        out_dtype: torch.dtype,
        into: Tensor | None = None,
    ) -> Tensor:
        if not (_is_fp8(a) and _is_fp8(b)):
            return super().multiply(a, b, correction, out_dtype, into)
        out, adds = into, _can_be_added_to(into)
        if out is None or not adds:
            wide = into is not None or out_dtype != torch.bfloat16
            dtype = torch.float32 if wide else torch.bfloat16
            out = a.values.new_empty(a.values.shape[0], b.values.shape[0], dtype=dtype)
        product = fused.kernels().cublaslt.product
        product(a.values, b.values, _rows(a), _rows(b), out, alpha=correction, accumulates=adds)
        return out if adds else finish(out, out_dtype, into)


@cache
def _rows_can_be_scaled() -> bool:
    from megatron_fp4.kernels.cublaslt import version

    return version() >= (12, 9)


def _carried(quantizer: Quantizer) -> bool:
    """Whether elements with their block scales are exact in FP8 over a window of exponents."""
    return quantizer.scale == "fp32" or quantizer.mxfp4


def _folds(operand: Operand) -> TypeGuard[QuantizedTensor]:
    """Whether block scales become part of its elements."""
    return _tiles(operand) and not operand.quantizer.outer


def _tiles(operand: Operand) -> TypeGuard[QuantizedTensor]:
    """Whether FP8 products take such a quantized operand."""
    if not isinstance(operand, QuantizedTensor):
        return False
    rows, k = operand.codes.shape
    return rows > 0 and k > 0 and rows % ALIGNMENT == k % ALIGNMENT == 0


def _is_fp8(operand: Operand) -> TypeGuard[Decoded]:
    return isinstance(operand, Decoded) and operand.values.dtype in FP8


def _can_be_added_to(out: Tensor | None) -> bool:
    """By cuBLAS itself."""
    if out is None or out.dtype != torch.float32:
        return False
    return out.is_contiguous() and out.data_ptr() % ALIGNMENT == 0


def _rows(operand: Decoded) -> Tensor:
    """A scale for each row."""
    assert operand.outer is not None
    outer, rows = operand.outer, operand.values.shape[0]
    return outer if outer.shape[0] == rows else outer.expand(rows, 1).contiguous()
