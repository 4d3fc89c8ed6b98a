"""Rule nearest of E8M0 scales, against conversions to E8M0 that others wrote."""

from __future__ import annotations

from typing import Literal

import ml_dtypes
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_fp4 import ConfigError, Quantizer, quantize
from megatron_fp4.arithmetic import formats
from testing.oracles import normal

Element = Literal["e2m1", "e1m2"]
LARGEST: dict[Element, float] = {"e2m1": 6.0, "e1m2": 1.75}


def maxima(limit: float) -> NDArray[np.float32]:
    """Magnitudes in every binade of float32: random ones, the middles between two powers of two
    times `limit`, and their neighbours."""
    source = np.random.default_rng(1)
    middles = limit * 0.75 * np.exp2(np.arange(-150.0, 129))
    spread = np.exp2(source.uniform(-149, 128, 4000))
    with np.errstate(over="ignore"):
        found = np.concatenate((middles, spread)).astype(np.float32)
    beside = [np.nextafter(found, np.float32(end)) for end in (0, np.inf)]
    found = np.concatenate((found, *beside))
    # The conversions round smaller quotients up, and larger ones to NaN. test_scaling.py has them.
    quotients = found.astype(np.float64) / limit
    return found[np.isfinite(found) & (quotients >= 2.0**-126) & (quotients < 1.5 * 2.0**127)]


def blocks_with(found: NDArray[np.float32]) -> Tensor:
    x = torch.zeros(len(found), 32)
    x[:, 5] = torch.from_numpy(-found)
    return x


def converted(quotients: NDArray[np.float64]) -> NDArray[np.uint8]:
    """The bytes of positive numbers rounded to E8M0 by ml_dtypes."""
    return quotients.astype(ml_dtypes.float8_e8m0fnu).view(np.uint8)


@pytest.mark.parametrize("element", LARGEST)
def test_scales_are_those_of_a_conversion_to_e8m0(element: Element) -> None:
    """By ml_dtypes, from float64. No other rule has these scales."""
    found = maxima(LARGEST[element])
    x, expected = blocks_with(found), converted(found.astype(np.float64) / LARGEST[element])
    assert len(np.unique(expected)) > 250
    scales = quantize(x, Quantizer(element=element, rule="nearest")).scales[:, 0].numpy()
    np.testing.assert_array_equal(scales, expected)
    for rule in ("floor", "ceil", "mse"):
        other = quantize(x, Quantizer(element=element, rule=rule)).scales[:, 0].numpy()  # type: ignore[arg-type]
        assert (other != expected).mean() > 0.1


def test_scales_are_those_that_torch_converts_to_e8m0() -> None:
    """Gaussian blocks: torch takes M/6 in float32."""
    x = normal((4096, 32), 3) * normal((4096, 1), 4).mul(20).exp2()
    expected = (x.abs().amax(1) / 6).to(torch.float8_e8m0fnu).view(torch.uint8)
    assert torch.equal(quantize(x, Quantizer(rule="nearest")).scales[:, 0], expected)


def test_a_middle_takes_the_larger_scale() -> None:
    """4.5 is 3/4 of 6, between the scales 1/2 and 1. Nearest is meant of the numbers, and not of
    their logarithms, whose middle is at 6 / sqrt(2)."""
    x = torch.zeros(4, 32)
    x[:, 0] = torch.tensor([4.5, float(np.nextafter(np.float32(4.5), 0)), 4.4, 6 / 2**0.5])
    assert quantize(x, Quantizer(rule="nearest")).scales[:, 0].tolist() == [127, 126, 126, 126]


def test_floor_is_what_rounding_the_reciprocal_gives() -> None:
    """Of E2M1: 2^-s with s of floor is the power of two nearest to 6/M, of two the smaller for M a
    power of two."""
    found = maxima(6.0)
    found = found[found > 2.0**-124]
    reciprocals = 6 / found.astype(np.float64)
    found, reciprocals = found[np.frexp(found)[0] != 0.5], reciprocals[np.frexp(found)[0] != 0.5]
    scales = quantize(blocks_with(found), Quantizer()).scales[:, 0].numpy()
    np.testing.assert_array_equal(254 - scales, converted(reciprocals))
    nearest = quantize(blocks_with(found), Quantizer(rule="nearest")).scales[:, 0].numpy()
    assert (nearest != scales).any()  # the control


def test_what_is_beyond_the_largest_element_is_clipped() -> None:
    x = torch.zeros(1, 32)
    x[0, :4] = torch.tensor([-8.96, 6.5, 2.6, -0.0])  # the scale is 1: 8.96 < 9
    q = quantize(x, Quantizer(rule="nearest"))
    assert q.scales.item() == 127
    assert formats.unpack(q.codes)[0, :4].tolist() == [15, 7, 5, 8]
    stochastic = quantize(x, Quantizer(rule="nearest", rounding="stochastic"), seed=1)
    assert formats.unpack(stochastic.codes)[0, :2].tolist() == [15, 7]


def test_the_ends_of_the_range() -> None:
    """Zeros, subnormal numbers and what is not finite; and float64, whose scales are clamped."""
    x = torch.zeros(6, 32)
    x[:, 3] = torch.tensor([0.0, 2.0**-149, 2.0**-126, torch.inf, -torch.nan, 3e38])
    assert quantize(x, Quantizer(rule="nearest")).scales[:, 0].tolist() == [0, 0, 0, 255, 255, 252]
    wide = torch.zeros(2, 32, dtype=torch.float64)
    wide[:, 0] = torch.tensor([2.0**600, 2.0**-600], dtype=torch.float64)
    assert quantize(wide, Quantizer(rule="nearest")).scales[:, 0].tolist() == [254, 0]


def test_formats_without_the_rule_refuse_it() -> None:
    with pytest.raises(ConfigError, match="scale fp32 takes rule absmax, not 'nearest'"):
        Quantizer(scale="fp32", rule="nearest")
    with pytest.raises(
        ConfigError, match="scale e8m0 takes rule floor or ceil or nearest or mse, not 'up'"
    ):
        Quantizer(rule="up")
