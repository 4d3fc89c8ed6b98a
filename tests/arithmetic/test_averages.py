"""Rounding towards a moving average (Q-EMA), against exact rational arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from megatron_fp4 import ConfigError, Quantizer, get_recipe, quantize
from megatron_fp4.arithmetic import formats
from megatron_fp4.arithmetic.quantize import quantize_matrix
from megatron_fp4.recipe import GemmRecipe, Recipe
from testing.oracles import GRID, fp4_code, mx_block, normal

CEIL = Quantizer(rule="ceil", rounding="ema")


def by_hand(v: Fraction, average: Fraction, negative: bool) -> int:
    """The code of v, as the contract's sentences have it."""
    sign, magnitude = 8 * negative, abs(v)
    if magnitude in GRID or magnitude > 6:
        return sign | fp4_code(float(magnitude))
    above = next(i for i, point in enumerate(GRID) if point > magnitude)
    below, over = GRID[above - 1], GRID[above]
    toward = -average if negative else average
    to_below, to_over = abs(toward - below), abs(toward - over)
    if to_below == to_over:
        return sign | fp4_code(float(magnitude))
    return sign | (above if to_over < to_below else above - 1)


def codes_by_hand(x: Tensor, average: Tensor, rule: str, mistake: str = "") -> Tensor:
    """The codes of x by the contract, or with one of MISTAKES."""
    codes = []
    for row, beside in zip(x.tolist(), average.tolist(), strict=True):
        for i in range(0, len(row), 32):
            pairs = list(zip(row[i : i + 32], beside[i : i + 32], strict=True))
            byte, _ = mx_block(
                [e if mistake == "scale of the average" else v for v, e in pairs], rule
            )
            scale = Fraction(2) ** (byte - 127)
            codes += [_code(Fraction(v), Fraction(e), v, e, scale, mistake) for v, e in pairs]
    return torch.tensor(codes, dtype=torch.uint8).view(x.shape)


def _code(w: Fraction, average: Fraction, v: float, e: float, scale: Fraction, mistake: str) -> int:
    """The code of w, whose float is v, beside an average, whose float is e."""
    negative = math.copysign(1, e if mistake == "sign of the average" else v) < 0
    if mistake == "code of the average":
        return 8 * negative | fp4_code(min(float(abs(average) / scale), 6.0))
    beside = average if mistake == "average that is not scaled" else average / scale
    return by_hand(w / scale, beside, negative)


def pair(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """A matrix and what it was of late: ties, points of the grid, zeros, other signs."""
    x = normal((8, 64), 21, torch.bfloat16).to(dtype)
    average = normal((8, 64), 22, torch.bfloat16).float() * 0.3 + x.float()
    quarters = torch.Generator().manual_seed(23)
    x[2:4] = torch.randint(-24, 25, (2, 64), generator=quarters).to(dtype) / 4
    average[2:4] = torch.randint(-24, 25, (2, 64), generator=quarters) / 4
    x[4, ::3], x[4, 1::3] = 0.0, -0.0
    x[5, 5:] *= 1e-30
    average[6] = -average[6]
    return x, average


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rule", ["floor", "ceil"])
def test_codes_are_those_of_exact_arithmetic(rule: str, dtype: torch.dtype) -> None:
    x, average = pair(dtype)
    quantizer = Quantizer(rule=rule, rounding="ema")  # type: ignore[arg-type]
    wanted = codes_by_hand(x, average, rule)
    made = quantize(x, quantizer, average=average)
    assert torch.equal(formats.unpack(made.codes), wanted)
    turned = quantize(x.t(), quantizer, axis=0, average=average.t())
    assert torch.equal(turned.codes, made.codes)
    nearest = quantize(x, Quantizer(rule=rule))  # type: ignore[arg-type]
    assert torch.equal(made.scales, nearest.scales)
    # Negative controls: rounding x to nearest, rounding the average, its sign, its own scales.
    assert (nearest.codes != made.codes).float().mean() > 0.1
    of_average = quantize(average, Quantizer(rule=rule))  # type: ignore[arg-type]
    assert (of_average.codes != made.codes).float().mean() > 0.1
    assert not torch.equal(formats.unpack(of_average.codes) >> 3, wanted >> 3)
    assert not torch.equal(of_average.scales, made.scales)


MISTAKES = (
    "scale of the average",
    "sign of the average",
    "code of the average",
    "average that is not scaled",
)


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("rule", ["floor", "ceil"])
def test_a_known_mistake_makes_other_codes(rule: str, mistake: str) -> None:
    """Each of them differs from the contract where the comparison above would show it."""
    x, average = pair()
    made = quantize(x, Quantizer(rule=rule, rounding="ema"), average=average)  # type: ignore[arg-type]
    wrong = codes_by_hand(x, average, rule, mistake)
    assert (formats.unpack(made.codes) != wrong).float().mean() > 0.01


def test_an_average_of_what_is_there_rounds_to_nearest() -> None:
    x = normal((16, 128), 24)
    made = quantize(x, CEIL, average=x)
    assert torch.equal(made.codes, quantize(x, "mxfp4-ceil").codes)


def test_a_weight_that_oscillates_about_a_threshold_keeps_its_code() -> None:
    """What the method is for: the weight crosses 2.5 in every step, its average does not."""
    averages, codes = [], {"ema": set(), "nearest": set()}  # type: ignore[var-annotated]
    weight, average = torch.full((1, 32), 6.0), torch.full((1, 32), 2.45)
    for step in range(20):
        weight[0, 1:] = 2.5 + (0.06 if step % 2 else -0.06)
        average = 0.998 * average + 0.002 * weight
        averages.append(float(average[0, 1]))
        codes["ema"].add(quantize(weight, CEIL, average=average).dequantize()[0, 1].item())
        codes["nearest"].add(quantize(weight, "mxfp4-ceil").dequantize()[0, 1].item())
    assert max(averages) < 2.5 and codes == {"ema": {2.0}, "nearest": {2.0, 3.0}}


def test_neither_average_nor_weight_hides_an_overflow() -> None:
    x, average = normal((4, 64), 25), normal((4, 64), 26)
    x[0, 3], average[1, 40], average[2, 5] = math.nan, math.nan, -math.inf
    made = quantize(x, CEIL, average=average)
    bad = torch.tensor([[1, 0], [0, 1], [1, 0], [0, 0]], dtype=torch.bool)
    assert torch.equal(made.scales == 255, bad)
    assert torch.equal(made.dequantize().view(4, 2, 32).isnan().all(-1), bad)


def test_small_numbers_may_leave_zero_and_zeros_may_not() -> None:
    x, average = torch.zeros(1, 32), torch.full((1, 32), 0.4)
    x[0, 0], x[0, 1], x[0, 2], x[0, 3] = 6.0, 1e-30, -1e-30, -0.0
    codes = formats.unpack(quantize(x, CEIL, average=average).codes)[0].tolist()
    assert codes == [7, 1, 8, 8, *([0] * 28)]


def test_what_is_refused() -> None:
    x = normal((2, 32), 27)
    for average in (None, x[:1], x.t()):
        with pytest.raises(ConfigError, match="moving average of the tensor's shape"):
            quantize_matrix(x, CEIL, axis=1, average=average)
    for words in (
        {"scale": "e4m3", "rule": "nearest", "block": (1, 16)},
        {"scale": "fp32", "rule": "absmax", "block": (1, 0)},
        {"prescale": 0.75},
    ):
        with pytest.raises(ConfigError, match="rounding ema takes"):
            Quantizer(rounding="ema", **words)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="mine: rounding ema of W and weight_average belong"):
        Recipe("mine", fprop=GemmRecipe(get_recipe("tetrajet").fprop.a, CEIL))
