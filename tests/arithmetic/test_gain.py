"""Scales that give groups of elements a gain of 1 (MS-EDEN): scales rounded stochastically, the
correction, and what both do together after a random rotation. The oracles are exact fractions and
NumPy, and share no code with the package."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from functools import cache
from statistics import NormalDist
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_fp4 import ConfigError, Quantizer, quantize
from megatron_fp4.arithmetic.formats import SCALE_FLOATS, unpack
from megatron_fp4.arithmetic.quantize import quantize_matrix
from testing.oracles import GRID, element_bits, fp4_code, normal, ue5m3_value

EDEN = Quantizer(
    scale="e4m3",
    block=(1, 16),
    rule="nearest",
    tensor_max=256.0,
    inflate=17 / 16 * 0.93,
    unit_gain=128,
    scale_rounding="stochastic",
)
NEAREST_SCALES = replace(EDEN, scale_rounding="nearest")
UNCORRECTED = replace(NEAREST_SCALES, unit_gain=0)
UE5M3 = replace(EDEN, scale="ue5m3", tensor_max=32768.0)
SR = Quantizer(
    scale="e4m3",
    block=(1, 16),
    rule="nearest",
    rounding="stochastic",
    tensor_max=256.0,
    inflate=17 / 16,
)


@cache
def values_of(scale: str) -> list[Fraction]:
    """The finite values of a scale format, by code."""
    if scale == "ue5m3":
        return [value for code in range(256) if (value := ue5m3_value(code)) is not None]
    bytes_ = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    return [Fraction(float(value)) for value in bytes_]


def stochastic_code(x: Fraction, scale: str, bits: int) -> int:
    values = values_of(scale)
    low = max(code for code, value in enumerate(values) if value <= x)
    if low == len(values) - 1:
        return low
    fraction = (x - values[low]) / (values[low + 1] - values[low])
    return low + (fraction > (bits + Fraction(1, 2)) / 65536)


# --- scales rounded stochastically ----------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("scale", ["e4m3", "ue5m3"])
def test_a_scale_is_rounded_up_by_its_bits(scale: str, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(1)
    grid = [float(value) for value in values_of(scale)]
    spread = rng.uniform(-20, 17, 3000)  # subnormals and saturated values too
    x = torch.tensor([*grid, 1e30, *(2.0**spread)], dtype=dtype)
    bits = torch.from_numpy(rng.integers(0, 65536, len(x)))
    found = SCALE_FLOATS[scale].encode(x, bits=bits).tolist()
    expected = [
        stochastic_code(Fraction(v), scale, b)
        for v, b in zip(x.tolist(), bits.tolist(), strict=True)
    ]
    assert found == expected
    assert found[: len(grid)] == list(range(len(grid)))  # a scale on the grid stays
    assert found != SCALE_FLOATS[scale].encode(x).tolist()  # the control: nearest


@pytest.mark.parametrize("scale", ["e4m3", "ue5m3"])
def test_the_mean_over_all_bits_is_the_scale(scale: str) -> None:
    form, bits = SCALE_FLOATS[scale], torch.arange(65536)
    for wanted in (1.0, 1.03, 203.7, 0.00271, 2.0**-11 * 1.3):
        x = torch.full((65536,), wanted)
        mean = form.decode(form.encode(x, bits=bits), torch.float64).mean()
        step = form.decode(form.encode(x[:1], up=True), torch.float64) - wanted
        assert abs(mean - float(x[0])) <= 2.0**-16 * wanted
        nearest = form.decode(form.encode(x[:1]), torch.float64)
        assert step == 0 or abs(nearest - wanted) > 2.0**-10 * wanted  # the control


def test_a_nan_stays_a_nan() -> None:
    found = SCALE_FLOATS["e4m3"].encode(torch.tensor([math.nan]), bits=torch.tensor([0]))
    assert found.tolist() == [0x7F]


# --- the correction -------------------------------------------------------------------------------


def row_by_fractions(row: np.ndarray, q: Quantizer, g: np.float32, bits: list[int] | None) -> Any:
    """(codes, scale codes) of one row, by its definition. bits: of its elements."""
    one, values = np.float32, values_of(q.scale)
    codes, firsts = [], []
    for block in row.reshape(-1, 16):
        wanted = np.abs(block).max() / (one(6) * g) * one(q.inflate)
        low = max(code for code, v in enumerate(values) if v <= Fraction(float(wanted)))
        near = [abs(values[c] - Fraction(float(wanted))) for c in (low, low + 1)]
        first = low + (near[1] < near[0] or (near[1] == near[0] and low % 2))
        divisor = one(float(values[first])) * g
        codes += [
            fp4_code(float(v / divisor)) if divisor else fp4_code(float(v) * 0) for v in block
        ]
        firsts.append(first)
    scales: list[int] = []
    blocks = q.unit_gain // 16
    for start in range(0, len(firsts), blocks):
        group = range(16 * start, 16 * (start + blocks))
        xx = sum(Fraction(float(row[i])) ** 2 for i in group)
        xq = sum(
            Fraction(float(row[i])) * (1 - 2 * (codes[i] >> 3)) * GRID[codes[i] & 7]
            * values[firsts[i // 16]] * Fraction(float(g))
            for i in group
        )  # fmt: skip
        for at in range(start, start + blocks):
            wanted = one(float(values[firsts[at]] * (xx / xq if xq else 1)))
            draw = None if bits is None else bits[16 * at]
            if draw is None:
                near = [abs(v - Fraction(float(wanted))) for v in values]
                scales.append(near.index(min(near)))
            else:
                scales.append(stochastic_code(Fraction(float(wanted)), q.scale, draw))
    return codes, scales


def matrix() -> Tensor:
    """Rows of many sizes, with blocks of zeros, a group of zeros, and blocks whose scales are
    subnormal or rounded to zero."""
    x = normal((16, 256), 4) * normal((16, 1), 5).exp()
    x[1, :16], x[2, 128:] = 0, 0
    x[3, 128:] *= 2.0**-18
    x[4, 16:32] *= 2.0**-20
    return x


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(
    "quantizer", [EDEN, UE5M3, NEAREST_SCALES, replace(EDEN, unit_gain=32)],
    ids=["e4m3", "ue5m3", "nearest-scales", "groups-of-32"],
)  # fmt: skip
def test_codes_and_scales(quantizer: Quantizer, axis: int) -> None:
    """A block's scale takes the bits of the block's first element."""
    rows = matrix()
    x = rows if axis == 1 else rows.t().contiguous()
    found = quantize(x, quantizer, axis=axis, seed=7)
    g = np.float32(rows.abs().max()) / np.float32(6 * quantizer.tensor_max)
    assert found.tensor_scale is not None and float(found.tensor_scale) == g
    codes, scales = unpack(found.codes), found.scales
    groups = x.shape[1] // 8
    for i, row in enumerate(rows.numpy()):
        places = [(i, k) if axis == 1 else (k, i) for k in range(256)]
        bits = [element_bits(7, 0, 0, r * groups + c // 8, c % 8) for r, c in places]
        draws = bits if quantizer.scale_rounding == "stochastic" else None
        expected = row_by_fractions(row, quantizer, g, draws)
        assert (codes[i].tolist(), scales[i].tolist()) == expected, i
    # The control: without the correction the codes are the same. The scales are too if they are
    # rounded to nearest, since no correction here reaches half the distance of two scales.
    plain = quantize(x, replace(quantizer, unit_gain=0, scale_rounding="nearest"), axis=axis)
    assert torch.equal(plain.codes, found.codes)
    assert torch.equal(plain.scales, found.scales) == (quantizer.scale_rounding == "nearest")


def test_the_gain_is_1_on_average() -> None:
    x = normal((256, 1024), 3)
    wide = x.double().view(-1, 128)

    def gains(quantizer: Quantizer, seed: int) -> Tensor:
        q = quantize(x, quantizer, seed=seed).dequantize(torch.float64).view(-1, 128)
        return (wide * q).sum(1) / wide.square().sum(1)

    means = torch.stack([gains(EDEN, seed) for seed in range(32)]).mean(0)
    assert abs(means.mean() - 1) < 5 * means.std() / math.sqrt(len(means)) < 1e-3
    for wrong in (NEAREST_SCALES, UNCORRECTED):  # the controls
        assert gains(wrong, 0).mean() < 0.995


def test_blocks_that_are_not_finite_change_no_others() -> None:
    x = normal((2, 128), 8)
    x[0, 5], x[1, 40] = math.nan, math.inf
    held = x.clone()
    held[0, :16], held[1, 32:48] = 0, 0
    # The tensor scale is that of the finite blocks, and so is the group's correction.
    found, other = quantize(x, EDEN, seed=1), quantize(held, EDEN, seed=1)
    nan = torch.zeros(2, 8, dtype=torch.bool)
    nan[0, 0] = nan[1, 2] = True
    assert (found.scales == 0x7F).equal(nan)
    assert torch.equal(found.scales[~nan], other.scales[~nan])
    decoded = found.dequantize()
    assert decoded.view(2, 8, 16).isnan().all(2).equal(nan)
    assert torch.equal(decoded[~decoded.isnan()], other.dequantize()[~decoded.isnan()])


def test_empty_and_zero_tensors() -> None:
    assert quantize(torch.zeros(0, 128), EDEN, seed=1).dequantize().shape == (0, 128)
    assert not quantize(torch.zeros(3, 128), EDEN, seed=1).dequantize().any()


@pytest.mark.parametrize(
    "fields",
    [
        {"unit_gain": -128},
        {"unit_gain": 128.0},
        {"unit_gain": 24},
        {"unit_gain": 0},  # scale_rounding alone
        {"scale": "e8m0", "rule": "floor", "tensor_max": 0.0, "inflate": 1.0},
        {"block": (16, 16)},
        {"block": (1, 0)},
        {"rounding": "stochastic"},
        {"prescale": 0.75},
        {"scale_rounding": "up"},
    ],
    ids=lambda fields: ",".join(f"{k}={v}" for k, v in fields.items()),
)
def test_fields_that_contradict_each_other(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        replace(EDEN, **fields)


def test_what_is_missing_is_told() -> None:
    x = normal((2, 192), 1)
    with pytest.raises(ConfigError, match="unit_gain 128"):
        quantize(x, EDEN, seed=1)
    with pytest.raises(ConfigError, match="seed"):
        quantize(x[:, :128], EDEN)
    with pytest.raises(ConfigError, match="random bits"):
        quantize_matrix(x[:, :128], EDEN, axis=1)


# --- over rotations -------------------------------------------------------------------------------

ROTATIONS = 16384
SYLVESTER = np.array([[(-1.0) ** (i & j).bit_count() for j in range(128)] for i in range(128)])
SYLVESTER /= math.sqrt(128)
LIMIT = NormalDist().inv_cdf(1 - 1e-6 / (2 * 129))  # once in a million, by Bonferroni's bound


def deviates(quantizer: Quantizer) -> tuple[float, float]:
    """(largest of 128 elements, gain): deviates of the mean over rotations from a Gaussian x, in
    standard errors. Each rotation is a row, with random signs and bits of its own."""
    rng = np.random.default_rng(12)
    x = rng.standard_normal(128)
    signs = rng.choice([-1.0, 1.0], (ROTATIONS, 128))
    turned = torch.from_numpy((x * signs) @ SYLVESTER).float()
    decoded = quantize(turned, quantizer, seed=3).dequantize(torch.float64).numpy()
    back = decoded @ SYLVESTER * signs
    gain = back @ x / (x @ x)

    def off(samples: np.ndarray, expected: Any) -> Any:
        error = samples.std(0, ddof=1) / math.sqrt(ROTATIONS)
        return np.abs(samples.mean(0) - expected) / error

    return float(off(back, x).max()), float(off(gain, 1.0))


@pytest.mark.parametrize("quantizer", [EDEN, UE5M3, SR], ids=["e4m3", "ue5m3", "stochastic"])
def test_the_mean_over_rotations_is_the_tensor(quantizer: Quantizer) -> None:
    worst, gain = deviates(quantizer)
    assert worst < LIMIT and gain < LIMIT


@pytest.mark.parametrize("quantizer", [NEAREST_SCALES, UNCORRECTED], ids=["nearest", "no-gain"])
def test_without_either_half_it_is_not(quantizer: Quantizer) -> None:
    """The correction alone, with scales rounded to nearest, gains nothing: most corrections are
    smaller than half the distance of two scales."""
    worst, gain = deviates(quantizer)
    assert worst > LIMIT and gain > 10 * LIMIT


# --- errors, against NumPy ------------------------------------------------------------------------


def rounded(v: np.ndarray, noise: np.ndarray | None) -> np.ndarray:
    """Magnitudes on the E2M1 grid; ties are left to chance, which they have none on this data."""
    grid = np.array([float(value) for value in GRID])
    size = np.minimum(np.abs(v), 6.0)
    low = np.clip(np.searchsorted(grid, size, side="right") - 1, 0, 6)
    fraction = (size - grid[low]) / (grid[low + 1] - grid[low])
    return np.sign(v) * grid[low + (fraction > (0.5 if noise is None else noise))]


def errors_in_numpy(x: np.ndarray, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """The squared errors of MS-EDEN and of stochastic rounding, for each group of 128."""
    turned = (x * rng.choice([-1.0, 1.0], 128)) @ SYLVESTER
    blocks = turned.reshape(-1, 8, 16)
    tensor_scale = np.abs(turned).max() / (6 * 256)
    e4m3 = np.array([float(value) for value in values_of("e4m3")])

    def scales(inflate: float) -> np.ndarray:
        wanted = np.abs(blocks).max(2) / (6 * tensor_scale) * inflate
        return wanted.astype(ml_dtypes.float8_e4m3fn).astype(np.float64)[:, :, None]

    found = {}
    s = scales(17 / 16)
    q = rounded(blocks / (s * tensor_scale), rng.random(blocks.shape)) * s * tensor_scale
    found["stochastic"] = (q - blocks) ** 2
    s = scales(17 / 16 * 0.93)
    codes = rounded(blocks / (s * tensor_scale), None)
    xq = (blocks * codes * s * tensor_scale).sum((1, 2), keepdims=True)
    wanted = s * (blocks**2).sum((1, 2), keepdims=True) / xq
    low = np.searchsorted(e4m3, wanted, side="right") - 1
    up = (wanted - e4m3[low]) / (e4m3[low + 1] - e4m3[low]) > rng.random(wanted.shape)
    found["eden"] = (codes * e4m3[low + up] * tensor_scale - blocks) ** 2
    return {name: off.sum((1, 2)) / (x**2).sum() * len(blocks) for name, off in found.items()}


def test_the_error_is_less_than_half_of_stochastic_rounding_s() -> None:
    """NumPy's errors and the package's agree within five standard errors, and are in this order."""
    rng = np.random.default_rng(21)
    x = rng.standard_normal((1 << 13, 128))
    oracle = errors_in_numpy(x, rng)
    assert oracle["eden"].mean() < oracle["stochastic"].mean() / 2
    turned = torch.from_numpy((x * rng.choice([-1.0, 1.0], 128)) @ SYLVESTER).float()
    means = {}
    for name, quantizer in (("eden", EDEN), ("stochastic", SR)):
        off = quantize(turned, quantizer, seed=2).dequantize(torch.float64) - turned.double()
        own = (off**2).sum(1).numpy() / (x**2).sum() * len(x)
        error = math.hypot(own.std(), oracle[name].std()) / math.sqrt(len(x))
        assert abs(own.mean() - oracle[name].mean()) < 5 * error
        means[name] = own.mean(), error
    # The control: the check tells them apart.
    assert abs(means["eden"][0] - means["stochastic"][0]) > 50 * means["eden"][1]
