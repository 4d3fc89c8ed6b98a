"""The errors that docs/numerics.md allows products on FP8 tensor cores, against a model of these.

The model is not NVIDIA's. It is the one by which numerics.md explains its bounds (Accumulation): an
instruction adds 32 products to a sum, and truncates each of these 33 numbers 13 bits below the
first bit of the largest. Four instructions make a sum, which is added in float32.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_fp4.arithmetic.quantize import quantize_matrix
from megatron_fp4.arithmetic.quantizer import Quantizer, get_quantizer
from megatron_fp4.multipliers.trial import bound
from testing.oracles import relative_error

ROWS = Quantizer(element="e4m3", scale="fp32", block=(1, 0), rule="absmax")


def on_tensor_cores(a: Tensor, b: Tensor, bits: int = 13) -> Tensor:
    """A B^T, float64 [M, N], of A [M, K] and B [N, K], as the model computes it."""
    total = torch.zeros(len(a), len(b), dtype=torch.float32)
    for first in range(0, a.shape[1], 128):
        part = torch.zeros(len(a), len(b), 1, dtype=torch.float64)
        for k in range(first, min(first + 128, a.shape[1]), 32):
            added = torch.cat([a[:, None, k : k + 32] * b[None, :, k : k + 32], part], 2)
            _, exponent = torch.frexp(added.abs().amax(2, keepdim=True))
            unit = 2.0 ** (exponent - 1 - bits).double()
            part = ((added / unit).trunc() * unit).sum(2, keepdim=True)
        total += part[:, :, 0].float()
    return total.double()


def error(quantizer: Quantizer, spread: float, bits: int = 13) -> float:
    """The model's relative error for normal random numbers in blocks of 16 of different sizes."""
    generator = torch.Generator().manual_seed(1)

    def operand() -> Tensor:
        x = torch.randn(48, 64, 16, generator=generator)
        x *= (spread * torch.randn(48, 64, 1, generator=generator)).exp()
        made = quantize_matrix(x.view(48, 1024).bfloat16(), quantizer, axis=1)
        return made.with_row_factors(torch.float64)[0]  # a scale of the row multiplies the sums

    a, b = operand(), operand()
    return relative_error(on_tensor_cores(a, b, bits), a @ b.t())


@pytest.mark.parametrize("spread", [0.0, 1.0, 2.0])
def test_products_of_fp8_elements(spread: float) -> None:
    assert error(ROWS, spread) < bound(torch.float32, ROWS)


def test_products_of_fp8_elements_exceed_the_bound_of_codes() -> None:
    assert error(ROWS, 1.0) > bound(torch.float32, get_quantizer("mxfp4"))


@pytest.mark.parametrize("name", ["mxfp4", "mxfp4-ceil"])
@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_products_of_codes_lose_less(name: str, spread: float) -> None:
    assert error(get_quantizer(name), spread) < bound(torch.float32, get_quantizer(name))


def test_two_bits_less_are_noticed() -> None:
    assert error(ROWS, 1.0, bits=11) > bound(torch.float32, ROWS)
