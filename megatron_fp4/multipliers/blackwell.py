"""MXFP4 GEMMs on FP4 tensor cores (compute capability 10.x and 12.x), by a Triton kernel.

The kernel reads codes and block scales, and can add to a float32 main_grad. Tests check the
instructions that it compiles to. No Blackwell GPU has run it yet, so its products are compared with
float64 first, once in a process and device. If they differ, or it raises, the multiplier is not
used, and the plan gives the reason.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from megatron_fp4.arithmetic.quantized_tensor import QuantizedTensor
from megatron_fp4.arithmetic.quantizer import get_quantizer
from megatron_fp4.multipliers.base import Product, ReadsCodes, finish, mxfp4_problem
from megatron_fp4.multipliers.trial import TRIED, trial
from megatron_fp4.operands import Form
from megatron_fp4.target import Target


class Blackwell(ReadsCodes):
    """Triton's block-scaled GEMM."""

    name = "blackwell"

    def refuses(self, product: Product, target: Target) -> str | None:
        if target.kind != "cuda" or target.capability[0] not in (10, 12):
            return "FP4 tensor cores need a GPU of compute capability 10.x or 12.x"
        if (problem := mxfp4_problem(product, target)) is not None:
            return problem
        if not all(product.shape):
            return "there are no tokens"
        return None if target.device is None else problem_on(target.device)

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


@cache
def problem_on(device: torch.device) -> str | None:
    """Why the kernel cannot be used on `device`, in one line; None if it can.

    Its products are compared with float64 (`trial`): in BF16, in float32 with a factor, and added
    to a float32 matrix.
    """
    from megatron_fp4.kernels.native import product

    def made(a: QuantizedTensor, b: QuantizedTensor, dtype: torch.dtype) -> Tensor:
        alpha = 1.0 if dtype == torch.bfloat16 else 0.5  # doubling it again is exact
        out = torch.empty(len(a.codes), len(b.codes), dtype=dtype, device=device)
        return product((a.codes, a.scales), (b.codes, b.scales), out, alpha=alpha) / alpha

    def added(a: QuantizedTensor, b: QuantizedTensor) -> Tensor:
        out = torch.ones(len(a.codes), len(b.codes), device=device)
        return product((a.codes, a.scales), (b.codes, b.scales), out, accumulates=True) - 1

    products = {
        "in bfloat16": lambda a, b: made(a, b, torch.bfloat16),
        "in float32": lambda a, b: made(a, b, torch.float32),
        "added to float32": added,
    }
    quantizer = get_quantizer("mxfp4-ceil")
    tried = (
        trial(f"Triton's GEMM {name}", each, quantizer, TRIED, device)
        for name, each in products.items()
    )
    return next((problem for problem in tried if problem is not None), None)
