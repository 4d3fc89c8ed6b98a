"""BF16 elements against ml_dtypes and exact fractions."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch

from megatron_fp4.arithmetic.bf16 import Bf16Elements, rounded

EVERY = torch.arange(65536, dtype=torch.int32)
LARGEST = float(torch.finfo(torch.bfloat16).max)


def test_nearest_is_ml_dtypes() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5000, generator=generator) * torch.randn(5000, generator=generator).exp()
    ties = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 2**-130 * 1.5, -(1 + 2**-8), 0.0, -0.0])
    x = torch.cat([x, ties])
    wanted = x.numpy().astype(ml_dtypes.bfloat16).astype(np.float32)
    assert np.array_equal(rounded(x).float().numpy(), wanted)
    assert torch.equal(rounded(x).float().signbit(), x.signbit())


@pytest.mark.parametrize("number", [1.001, -3.3e-5, 7.7e33, 1e-40, 2.0, -1.9999])
def test_each_number_becomes_one_of_its_neighbours_as_often_as_it_should(number: float) -> None:
    """Over all 65,536 random integers, exactly."""
    x = torch.full((65536,), number)
    found = rounded(x, EVERY).double().abs()
    exact = Fraction(float(x[0].abs()))
    below = x[:1].abs().view(torch.int32) >> 16 << 16
    low, high = (Fraction(float(bits.view(torch.float32))) for bits in (below, below + 65536))
    assert set(found.tolist()) <= {float(low), float(high)}
    up = int((found == float(high)).sum())
    assert up == (exact - low) / (high - low) * 65536
    assert (rounded(x, EVERY).float().signbit() == (number < 0)).all()


def test_what_is_not_finite_stays_and_nothing_becomes_so() -> None:
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, torch.finfo(torch.float32).max])
    for bits in (None, torch.full((4,), 65535, dtype=torch.int32)):
        found = rounded(x, bits).float()
        assert found[:2].tolist() == [torch.inf, -torch.inf] and found[2].isnan()
        assert float(found[3]) == LARGEST
    # A NaN whose bits are only in the half that is cut off would become Inf.
    hidden = torch.tensor([0x7F800001], dtype=torch.int32).view(torch.float32)
    assert rounded(hidden, torch.zeros(1, dtype=torch.int32)).isnan().all()


def test_decoded_values_are_encoded_without_a_change() -> None:
    form, x = Bf16Elements(), torch.randn(999, generator=torch.Generator().manual_seed(1))
    codes, scales = form.encode(x, EVERY[:999])
    assert codes.dtype == form.dtype and len(scales) == form.blocks(999) == 0
    once = form.decode(codes, scales)
    assert once.dtype == torch.float32 and not torch.equal(once, x)
    assert torch.equal(form.decode(*form.encode(once, EVERY[-999:])), once)
