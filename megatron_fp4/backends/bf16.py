"""Quantize, dequantize, and multiply in BF16: for GPUs without FP8 or FP4 tensor cores, and CPUs.

Block-scaled E2M1 and FP8 elements are exact in BF16, and whole-axis scales are applied to the
float32 product, so the only roundings beside the quantizer's are those of accumulation and of the
output.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_fp4.backends import fused
from megatron_fp4.backends.base import (
    ROCM,
    Decoded,
    Operand,
    Preparation,
    capability,
    finish,
)
from megatron_fp4.backends.reference import Reference, factors, scale_product
from megatron_fp4.estimators import DGE
from megatron_fp4.outliers import OutlierClamp, Residual
from megatron_fp4.quantizer import QuantizedTensor
from megatron_fp4.recipe import GemmRecipe


class Bf16(Reference):
    """The reference's operands, multiplied by the vendor library's BF16 GEMM."""

    name = "bf16"

    def unavailable(self, gemm: GemmRecipe, device: torch.device, dtype: torch.dtype) -> str | None:
        if dtype != torch.bfloat16:
            return f"the model computes in {str(dtype).removeprefix('torch.')}; use --bf16"
        if device.type == "cuda" and torch.version.hip is not None:
            return ROCM
        if device.type == "cuda" and capability(device) < (8, 0):
            return "BF16 tensor cores need compute capability 8.0"
        return None

    def split(self, x: Tensor, outliers: OutlierClamp) -> tuple[Tensor, Residual]:
        made = fused.split(x, outliers)
        return super().split(x, outliers) if made is None else made

    def prepare(self, x: Tensor | QuantizedTensor, *preparations: Preparation) -> list[Operand]:
        made = fused.prepare(x, *preparations)
        return [
            self._prepare(x, preparation) if operand is None else operand
            for operand, preparation in zip(made, preparations, strict=True)
        ]

    def _decoded(self, operand: Operand, dtype: torch.dtype) -> Operand:
        if isinstance(operand, QuantizedTensor):
            return Decoded(*factors(operand, torch.bfloat16))
        return operand

    def decoded_bytes(self, dtype: torch.dtype) -> int:
        return 2

    def multiply(
        self,
        a: Operand,
        b: Operand,
        correction: float,
        out_dtype: torch.dtype,
        into: Tensor | None = None,
    ) -> Tensor:
        # High-precision operands wider than BF16 (an unquantized Hadamard output, a folded dY)
        # would lose bits here.
        if any(isinstance(x, Tensor) and x.dtype != torch.bfloat16 for x in (a, b)):
            return super().multiply(a, b, correction, out_dtype, into)
        (a_values, a_outer) = factors(a, torch.bfloat16)
        (b_values, b_outer) = factors(b, torch.bfloat16)
        plain = a_outer is None and b_outer is None
        if plain and into is not None and a_values.is_cuda and into.dtype == torch.float32:
            return torch.addmm(
                into, a_values, b_values.t(), alpha=correction, out_dtype=into.dtype, out=into
            )
        if plain and into is None and correction == 1.0:
            return _product(a_values, b_values, out_dtype)
        product = _product(a_values, b_values, torch.float32)
        product = scale_product(product, a_outer, b_outer, correction)
        return finish(product, out_dtype, into)

    def estimate(self, dw: Tensor, estimator: DGE, w: QuantizedTensor, weight: Tensor) -> Tensor:
        if fused.estimates(dw, estimator, w, weight):
            return dw
        return super().estimate(dw, estimator, w, weight)


def _product(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """a b^T of BF16 matrices, accumulated in float32."""
    if out_dtype == torch.bfloat16:
        return a @ b.t()
    if a.is_cuda:
        return torch.mm(a, b.t(), out_dtype=out_dtype)
    return (a.float() @ b.float().t()).to(out_dtype)  # CPU GEMMs have no wider output
