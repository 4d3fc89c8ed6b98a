"""NVFP4 GEMMs on FP4 tensor cores (compute capability 10.x and 12.x), by Transformer Engine.

It is used where Transformer Engine is installed. No Blackwell GPU has run these GEMMs yet, so
they are compared with float64 first, once in a process and device. If they differ, or raise, the
multiplier is not used, and the plan gives the reason.
"""

from __future__ import annotations

import importlib.util
from functools import cache

import torch
from torch import Tensor

from megatron_fp4.arithmetic.quantized_tensor import QuantizedTensor
from megatron_fp4.arithmetic.quantizer import NVFP4, Quantizer
from megatron_fp4.multipliers.base import Product, ReadsCodes, codes_problem, finish
from megatron_fp4.multipliers.trial import trial
from megatron_fp4.operands import Form
from megatron_fp4.target import Target

TILE = 16, 32  # M and N must be multiples of the first, K of the second
TRIED = ((256, 512, 1024), (208, 176, 416), (16, 16, 32))  # the M, N, K that are compared


class Nvfp4(ReadsCodes):
    """Transformer Engine's NVFP4 GEMM."""

    name = "nvfp4"

    def refuses(self, product: Product, target: Target) -> str | None:
        if target.kind != "cuda" or target.capability[0] not in (10, 12):
            return "NVFP4 GEMMs need a GPU of compute capability 10.x or 12.x"
        if (problem := codes_problem(product)) is not None:
            return problem
        assert product.quantizers is not None  # codes_problem refuses high precision
        if not all(map(_is_nvfp4, product.quantizers)):
            return "an operand is not NVFP4 in blocks of 16"
        m, n, k = product.shape
        if not all(product.shape) or m % TILE[0] or n % TILE[0] or k % TILE[1]:
            return f"a side of the product is no multiple of {TILE[0]}, or K none of {TILE[1]}"
        if product.out_dtype not in (torch.float32, torch.bfloat16):
            return "the output is neither BF16 nor float32"
        if product.adds and product.out_dtype == torch.bfloat16:
            return "sums in BF16 would be rounded twice"
        return None if target.device is None else problem_on(target.device)

    def multiply(
        self,
        a: Form,
        b: Form,
        correction: float,
        out_dtype: torch.dtype,
        into: Tensor | None = None,
    ) -> Tensor:
        from megatron_fp4.kernels.te_nvfp4 import product

        assert isinstance(a, QuantizedTensor) and isinstance(b, QuantizedTensor)
        if into is None or into.is_contiguous():
            return product(a, b, out_dtype, correction=correction, into=into)
        return finish(product(a, b, torch.float32, correction=correction), out_dtype, into)


def _is_nvfp4(quantizer: Quantizer) -> bool:
    return (quantizer.element, quantizer.scale, quantizer.block) == ("e2m1", "e4m3", (1, 16))


@cache
def problem_on(device: torch.device) -> str | None:
    """Why Transformer Engine's products cannot be used on `device`, in one line.

    None if they are correct, both with BF16 output and added to a float32 tensor.
    """
    if importlib.util.find_spec("transformer_engine") is None:
        return "Transformer Engine is not installed: pip install 'transformer-engine[pytorch]'"

    # Both import the GEMM inside, so that `trial` reports an installation that does not load.
    def rounded(a: QuantizedTensor, b: QuantizedTensor) -> Tensor:
        from megatron_fp4.kernels.te_nvfp4 import product

        return product(a, b, torch.bfloat16)

    def added(a: QuantizedTensor, b: QuantizedTensor) -> Tensor:
        from megatron_fp4.kernels.te_nvfp4 import product

        ones = torch.ones(len(a.codes), len(b.codes), device=device)
        return product(a, b, torch.float32, correction=2.0, into=ones).sub_(1.0).div_(2.0)

    for products in (rounded, added):
        reason = trial("Transformer Engine's GEMM", products, NVFP4, TRIED, device)
        if reason is not None:
            return reason
    return None
