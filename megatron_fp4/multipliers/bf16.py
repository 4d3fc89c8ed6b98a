"""Operands decoded to BF16 and multiplied by torch's GEMM.

For GPUs without FP8 or FP4 tensor cores, for CPUs, and for products that FP8 and FP4 tensor cores
cannot run. Block-scaled 4-bit elements and FP8 elements are exact in BF16, and scales of a whole
row or tensor multiply the float32 product. So only the accumulation and the output are rounded.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_fp4.multipliers.base import (
    INEXACT,
    Product,
    decoded_in,
    dtype_problem,
    finish_scaled,
    is_inexact,
)
from megatron_fp4.operands import Decoded, Form, Made
from megatron_fp4.target import ROCM, Target


class Bf16:
    """BF16 GEMMs with float32 accumulation."""

    name = "bf16"

    def refuses(self, product: Product, target: Target) -> str | None:
        if (problem := dtype_problem(product)) is not None:
            return problem
        if target.kind == "rocm":
            return ROCM
        if target.kind == "cuda" and target.capability < (8, 0):
            return "BF16 tensor cores need compute capability 8.0"
        if is_inexact(product):
            return INEXACT
        if torch.float32 in (product.a, product.b):
            return "an operand is in float32"
        return None

    def carrier(self, letter: str) -> torch.dtype | None:
        return None

    def decode(
        self, made: Sequence[Made], letters: Sequence[str], dtype: torch.dtype
    ) -> list[Form]:
        return [decoded_in(each, torch.bfloat16) for each in made]

    def form_bytes(self, dtype: torch.dtype) -> int:
        return 2

    def multiply(
        self,
        a: Form,
        b: Form,
        correction: float,
        out_dtype: torch.dtype,
        into: Tensor | None = None,
    ) -> Tensor:
        assert isinstance(a, Decoded) and isinstance(b, Decoded)
        plain = a.row_factors is None and b.row_factors is None
        if plain and into is not None and a.values.is_cuda and into.dtype == torch.float32:
            return torch.addmm(
                into, a.values, b.values.t(), alpha=correction, out_dtype=into.dtype, out=into
            )
        if plain and into is None and correction == 1.0:
            return _product(a.values, b.values, out_dtype)
        product = _product(a.values, b.values, torch.float32)
        return finish_scaled(product, a.row_factors, b.row_factors, correction, out_dtype, into)


def _product(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """A B^T of BF16 matrices, accumulated in float32."""
    if out_dtype == torch.bfloat16:
        return a @ b.t()
    if a.is_cuda:
        return torch.mm(a, b.t(), out_dtype=out_dtype)
    return (a.float() @ b.float().t()).to(out_dtype)  # CPU GEMMs have no wider output
