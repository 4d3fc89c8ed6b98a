"""MXFP4 products on FP4 tensor cores (compute capability 10.x and 12.x), by a Triton kernel.

The kernel reads codes and block scales, and can add to a float32 main_grad. Tests check the
instructions that it compiles to; no Blackwell GPU has run it yet.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_fp4.arithmetic.quantizer import QuantizedTensor
from megatron_fp4.multipliers.base import Product, codes_of, dtype_problem, finish
from megatron_fp4.operands import Form, Made
from megatron_fp4.target import Target, kernels_problem


class Blackwell:
    """Triton's block-scaled GEMM."""

    name = "blackwell"

    def refuses(self, product: Product, target: Target) -> str | None:
        if target.kind != "cuda" or target.capability[0] not in (10, 12):
            return "FP4 tensor cores need a GPU of compute capability 10.x or 12.x"
        if (problem := dtype_problem(product) or kernels_problem(target)) is not None:
            return problem
        if product.quantizers is None:
            return "an operand is in high precision"
        if not all(quantizer.mxfp4 for quantizer in product.quantizers):
            return "an operand is not MXFP4 in blocks of 32"
        return None if all(product.shape) else "there are no tokens"

    def carrier(self, letter: str) -> torch.dtype | None:
        return None

    def decode(
        self, made: Sequence[Made], letters: Sequence[str], dtype: torch.dtype
    ) -> list[Form]:
        return [*map(codes_of, made)]

    def form_bytes(self, dtype: torch.dtype) -> int:
        return 0

    def multiply(
        self,
        a: Form,
        b: Form,
        correction: float,
        out_dtype: torch.dtype,
        into: Tensor | None = None,
    ) -> Tensor:
        from megatron_fp4.kernels.native import product  # imports Triton

        assert isinstance(a, QuantizedTensor) and isinstance(b, QuantizedTensor)
        operands = (a.codes, a.scales), (b.codes, b.scales)
        if into is not None and into.dtype == torch.float32 and into.is_contiguous():
            return product(*operands, into, alpha=correction, accumulates=True)
        dtype = out_dtype if into is None and out_dtype == torch.bfloat16 else torch.float32
        out = a.codes.new_empty(len(a.codes), len(b.codes), dtype=dtype)
        return finish(product(*operands, out, alpha=correction), out_dtype, into)
