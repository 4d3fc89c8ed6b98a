"""Rule mse-fp8: its scales are exact in FP8, and none of them gives a block a smaller error."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_fp4 import ConfigError, Quantizer, quantize
from megatron_fp4.arithmetic import formats, fp8_scales
from megatron_fp4.arithmetic.fp8_scales import SIGNIFICANDS, scales_in_fp8
from testing.oracles import normal
from testing.patching import patched

UE5M3 = Quantizer(scale="ue5m3", block=(1, 16), rule="mse-fp8")
E4M3 = replace(UE5M3, scale="e4m3", tensor_max=256.0)
GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
NEAREST = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5]


def exact_in_e4m3(value: float) -> bool:
    return float(np.float32(value).astype(ml_dtypes.float8_e4m3fn)) == value


@pytest.mark.parametrize("significand", [1, 3, 5, 7, 9])
def test_products_with_elements_are_exact_in_e4m3(significand: int) -> None:
    """By ml_dtypes, for all powers of two that keep the largest and smallest normal. The control:
    other significands are not."""
    exact = [
        exact_in_e4m3(float(element) * significand * 2.0**k)
        for element in GRID
        for k in range(-4, 2)
    ]
    assert all(exact) == (significand in SIGNIFICANDS)


@pytest.mark.parametrize("scale", ["e4m3", "ue5m3"])
def test_the_scales_are_all_of_their_format_with_these_significands(scale: str) -> None:
    """By ml_dtypes' E4M3. UE5M3 has its normal numbers, times 2^-8, and twice the range."""
    codes = np.arange(0x7F, dtype=np.uint8)
    values = codes.view(ml_dtypes.float8_e4m3fn).astype(float)
    odd = [math.frexp(v)[0] * 8 in (4, 5, 6) for v in values]  # 1, 1.25, 1.5 times a power of two
    wanted = [(v, int(c)) for v, c, fits in zip(values, codes, odd, strict=True) if fits]
    found = scales_in_fp8(scale)
    assert [value for value, _ in found] == sorted(value for value, _ in found)
    if scale == "e4m3":
        assert list(found) == wanted
    else:
        assert {value for value, _ in wanted} <= {value for value, _ in found}
        assert all(math.frexp(value)[0] * 8 in (4, 5, 6) for value, _ in found)
        assert (found[0][0], found[-1][0]) == (2.0**-17, 49152.0)
    codes_found = torch.tensor([code for _, code in found], dtype=torch.uint8)
    decoded = formats.SCALE_FLOATS[scale].decode(codes_found, torch.float64)
    assert decoded.tolist() == [value for value, _ in found]


def rounded(scaled: np.ndarray) -> np.ndarray:
    """Non-negative numbers rounded to E2M1, ties to even codes."""
    code = np.searchsorted(NEAREST, scaled, side="left")
    tie = np.isin(scaled, NEAREST)
    return GRID[np.where(tie, code + code % 2, code)]


def least_errors(blocks: np.ndarray, scale: str) -> tuple[np.ndarray, np.ndarray]:
    """(the smallest squared error of each block, the smallest scale that has it), of all scales
    that FP8 takes, in float64."""
    values = np.array([value for value, _ in scales_in_fp8(scale)])
    errors = np.array(
        [((rounded(np.abs(blocks) / s) * s - np.abs(blocks)) ** 2).sum(1) for s in values]
    )
    return errors.min(0), values[errors.argmin(0)]


def blocks_of(kind: str) -> Tensor:
    x = normal((512, 16), 1)
    if kind == "outliers":
        x[:, 3] *= 20
    elif kind == "heavy":
        x = x**3
    elif kind == "bf16":
        x = x.bfloat16().float()
    return x * (2 * normal((512, 1), 2)).exp()


def squared_errors(x: Tensor, quantizer: Quantizer) -> np.ndarray:
    """Of each row."""
    decoded = quantize(x, quantizer).dequantize(torch.float64)
    return (decoded - x).square().sum(1).numpy()


@pytest.mark.parametrize("kind", ["gaussian", "outliers", "heavy", "bf16"])
def test_no_scale_gives_a_smaller_error(kind: str) -> None:
    """But for the rounding of each element's error e, in units of the scale s, by up to 2^-9. The
    sum of squares E is then off by s (2^-8 |e| + 2^-18 s) for each element, in all by at most
    2^-8 s sqrt(16 E) + 2^-14 s^2."""
    x = blocks_of(kind)
    least, scales = least_errors(x.double().numpy(), "ue5m3")
    found = quantize(x, UE5M3)
    taken = formats.UE5M3.decode(found.scales.flatten(), torch.float64).numpy()
    errors = squared_errors(x, UE5M3)
    slack = sum(
        2.0**-8 * s * np.sqrt(16 * e) + 2.0**-14 * s**2
        for s, e in ((taken, errors), (scales, least))
    )
    assert (errors - least <= slack).all()
    assert (taken == scales).mean() > 0.97 and (errors / least).mean() < 1.001
    # Negative controls: fewer candidates, and powers of two alone.
    for candidates in ((-1, 0, 1), (0, 1, 2)):
        with patched(fp8_scales, "CANDIDATES", candidates):
            worse = squared_errors(x, UE5M3)
        assert (worse > 1.01 * least).any()
    powers = squared_errors(x, Quantizer(block=(1, 16), rule="mse"))
    assert np.median(powers / least) > 1.1


def test_equal_errors_take_the_smallest_scale() -> None:
    """A block of 6s: 1, 1.5 and 2 hold it exactly (6, 4, 3), and so does 1.25 not."""
    found = quantize(torch.full((1, 16), 6.0), UE5M3)
    assert formats.UE5M3.decode(found.scales).tolist() == [[1.0]]


def test_the_order_within_a_block_does_not_matter() -> None:
    x = blocks_of("gaussian")
    order = torch.randperm(16, generator=torch.Generator().manual_seed(1))
    assert torch.equal(quantize(x, UE5M3).scales, quantize(x[:, order], UE5M3).scales)


def test_a_power_of_two_moves_the_scales_alone() -> None:
    x = blocks_of("gaussian")
    one, other = quantize(x, UE5M3), quantize(x * 2.0**-5, UE5M3)
    assert torch.equal(one.codes, other.codes)
    scales = [formats.UE5M3.decode(each.scales) for each in (one, other)]
    assert torch.equal(scales[0], scales[1] * 2**5)


@pytest.mark.parametrize("quantizer", [UE5M3, E4M3, replace(E4M3, tensor_max=0.0, row_max=256.0)])
@pytest.mark.parametrize("maximum", [0.0, 2.0**-149, 1e-42, 1e-38, 1e-6, 1e5, 3e38], ids=str)
def test_extremes_stay_finite(quantizer: Quantizer, maximum: float) -> None:
    """Beside a block of zeros, whose scale is 0. Without an outer scale the format saturates."""
    x = torch.zeros(2, 32)
    x[0, 3] = maximum
    found = quantize(x, quantizer)
    decoded = found.dequantize()
    assert decoded.isfinite().all() and not decoded[1].any()
    assert found.scales[1].tolist() == [0, 0]
    ranged = quantizer.scale == "ue5m3" and not 1e-5 < maximum < 1e6
    if maximum >= 1e-38 and not ranged:
        assert decoded[0, 3].item() == pytest.approx(maximum, rel=0.07)
    elif ranged and maximum > 1:
        assert decoded[0, 3].item() == 6 * 49152


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_block_that_is_not_finite_is_nan_and_no_other(bad: float) -> None:
    x = normal((2, 64), 1)
    clean = quantize(x, E4M3).dequantize()
    top = x.abs().argmax()
    x.view(-1)[(top + 16) % 128] = bad
    found = quantize(x, E4M3).dequantize()
    nan = found.isnan()
    assert nan.sum() == 16 and torch.equal(found[~nan], clean[~nan])


def test_columns_are_rows_of_the_transpose() -> None:
    x = normal((64, 48), 3)
    one, other = quantize(x, UE5M3, axis=0), quantize(x.t().contiguous(), UE5M3)
    assert torch.equal(one.dequantize(), other.dequantize().t())


@pytest.mark.parametrize("rows", [1, 3])
def test_float64_takes_the_same_scales(rows: int) -> None:
    x = normal((rows * 64, 64), 5).bfloat16()
    narrow, wide = (quantize(x.to(dtype), UE5M3) for dtype in (torch.float32, torch.float64))
    same = (narrow.scales == wide.scales).double().mean()
    assert same > 0.999 and torch.equal(quantize(x, UE5M3).scales, narrow.scales)


@pytest.mark.parametrize("scale", ["e4m3", "ue5m3"])
def test_a_product_with_the_reciprocal_rounds_as_a_quotient(scale: str) -> None:
    """For every BF16 magnitude from 2^-4 to 8 times every scale: BF16 has no number so near to a
    middle of the grid that the reciprocal's rounding moves it across, and the middles stay."""
    bits = torch.arange(0x3D80, 0x4100).to(torch.int16).view(torch.bfloat16).double()
    for value, _ in scales_in_fp8(scale):
        x = (bits * 2.0 ** math.floor(math.log2(value))).float()
        product = formats.E2M1.encode(x * (1 / torch.tensor(value, dtype=torch.float32)))
        assert torch.equal(product, formats.E2M1.encode(x.double() / value))


def test_rounding_by_the_scales_is_to_nearest() -> None:
    x = blocks_of("gaussian")
    found = quantize(x, UE5M3)
    scales = formats.UE5M3.decode(found.scales, torch.float64).numpy()
    wanted = rounded(np.abs(x.double().numpy()) / scales) * scales
    assert np.array_equal(found.dequantize(torch.float64).abs().numpy(), wanted)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"rounding": "stochastic"}, "blocks of one row, nearest rounding and e2m1"),
        ({"element": "e1m2"}, "blocks of one row, nearest rounding and e2m1"),
        ({"block": (16, 16)}, "blocks of one row, nearest rounding and e2m1"),
        ({"block": (1, 128)}, "blocks of at most 64"),
        ({"block": (1, 0)}, "blocks of at most 64"),
        ({"inflate": 1.0625}, "neither inflate nor prescale"),
        ({"unit_gain": 32, "tensor_max": 256.0}, "nor unit_gain"),
        ({"prescale": 0.75}, "neither inflate nor prescale"),
        ({"tensor_max": 65536.0}, "its largest scale is 49152"),
        ({"scale": "e4m3", "tensor_max": 448.0}, "its largest scale is 384"),
        ({"scale": "e4m3", "row_max": 448.0}, "its largest scale is 384"),
        ({"scale": "e8m0"}, "scale e8m0 takes rule"),
        ({"scale": "fp32"}, "scale fp32 takes rule"),
    ],
)
def test_what_the_rule_does_not_take(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        replace(UE5M3, **fields)


def test_every_product_is_a_value_of_the_list() -> None:
    """Four significant bits at most, for every scale and element."""
    for (value, _), element in itertools.product(scales_in_fp8("ue5m3"), GRID):
        numerator = (value * float(element)).as_integer_ratio()[0]
        odd = numerator // (numerator & -numerator) if numerator else 0
        assert odd in (0, 1, 3, 5, 9, 15)
