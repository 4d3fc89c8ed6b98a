"""MXFP4 GEMMs on FP4 tensor cores (compute capability 10.x), by torch's scaled_mm.

torch.nn.functional.scaled_mm runs products with BF16 output and no factor: fprop without a bias,
and dgrad without a prescale. No Blackwell GPU has run it yet, so its products are compared with
float64 first, once in a process and device. If they differ, or it raises, the multiplier is not
used, and the plan gives the reason.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from megatron_fp4.arithmetic.quantized_tensor import QuantizedTensor
from megatron_fp4.arithmetic.quantizer import get_quantizer
from megatron_fp4.multipliers.base import Product, ReadsCodes, mxfp4_problem
from megatron_fp4.multipliers.trial import TRIED, trial
from megatron_fp4.operands import Form
from megatron_fp4.target import Target

ALIGNMENT = 16  # N, the rows of B, must be a multiple of this


class Sm100(ReadsCodes):
    """torch.nn.functional.scaled_mm."""

    name = "sm100"

    def refuses(self, product: Product, target: Target) -> str | None:
        if target.kind != "cuda" or target.capability[0] != 10:
            return "torch's MXFP4 GEMMs need a GPU of compute capability 10.x"
        if (problem := mxfp4_problem(product, target)) is not None:
            return problem
        if product.adds or product.out_dtype != torch.bfloat16 or product.correction != 1.0:
            return "torch's MXFP4 GEMMs are BF16, without a factor, and add to nothing"
        if not all(product.shape) or product.shape[1] % ALIGNMENT:
            return f"the product's columns are no multiple of {ALIGNMENT}"
        return None if target.device is None else problem_on(target.device)

    def multiply(
        self,
        a: Form,
        b: Form,
        correction: float,
        out_dtype: torch.dtype,
        into: Tensor | None = None,
    ) -> Tensor:
        from megatron_fp4.kernels.scaled_mm import product

        assert isinstance(a, QuantizedTensor) and isinstance(b, QuantizedTensor)
        return product((a.codes, a.scales), (b.codes, b.scales))


@cache
def problem_on(device: torch.device) -> str | None:
    """Why torch's products cannot be used on `device`, in one line; None if they are correct."""
    from megatron_fp4.kernels.scaled_mm import product

    def scaled_mm_product(a: QuantizedTensor, b: QuantizedTensor) -> Tensor:
        return product((a.codes, a.scales), (b.codes, b.scales))

    return trial("torch's scaled_mm", scaled_mm_product, get_quantizer("mxfp4-ceil"), TRIED, device)
