"""Element grids and scale formats against ml_dtypes and exact rational arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_fp4.arithmetic import formats
from megatron_fp4.arithmetic.formats import E2M1, E4M3, ELEMENTS, UE5M3
from megatron_fp4.arithmetic.fp8_blocks import Fp8Blocks
from testing.oracles import GRID, fp4_code, nearest_code, normal, ue5m3_value

FLOAT32_TINY = 2.0**-149


def _edges() -> np.ndarray:
    """Every grid point and tie of E2M1, their neighbours in float32, zeros, denormals, huge."""
    grid = [float(g) for g in GRID]
    points = grid + [(a + b) / 2 for a, b in zip(grid, grid[1:], strict=False)]
    points += [5.999999, 6.5, 7.0, 8.0, 1e30, 3.4e38, FLOAT32_TINY, 2.0**-126, 1e-40]
    values = np.array(points, np.float32)
    values = np.concatenate(
        (values, np.nextafter(values, np.float32(-1)), np.nextafter(values, np.float32(1e38)))
    )
    values = np.abs(values)
    return np.concatenate((values, -values))


INPUTS = {
    "edges": _edges(),
    "gaussian": (2 * np.random.default_rng(0).standard_normal(100_000)).astype(np.float32),
    "wide": np.exp(np.random.default_rng(1).uniform(-100, 80, 20_000)).astype(np.float32),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", INPUTS)
def test_e2m1_nearest_is_ml_dtypes(name: str, dtype: torch.dtype) -> None:
    values = INPUTS[name]
    expected = values.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    codes = E2M1.encode(torch.from_numpy(values).to(dtype))
    assert codes.dtype == torch.uint8
    np.testing.assert_array_equal(codes.numpy(), expected)


def test_ties_away_from_zero_are_told_apart() -> None:
    """Negative control: half-up rounding differs from ml_dtypes on the edges."""
    values = INPUTS["edges"]
    grid = np.array([float(g) for g in GRID])
    away = np.searchsorted((grid[1:] + grid[:-1]) / 2, np.abs(values), side="right")
    expected = values.astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 7
    assert (away != expected).any()


def test_e2m1_agrees_with_the_rational_oracle() -> None:
    values = torch.from_numpy(np.concatenate((INPUTS["edges"], INPUTS["gaussian"][:2000])))
    assert E2M1.encode(values).tolist() == [fp4_code(v) for v in values.tolist()]


def test_negative_values_that_round_to_zero_keep_their_sign() -> None:
    v = torch.tensor([-0.0, -0.25, -0.1, -FLOAT32_TINY, 0.0, 0.25, FLOAT32_TINY])
    assert E2M1.encode(v).tolist() == [8, 8, 8, 8, 0, 0, 0]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)
def test_decode_e2m1_is_ml_dtypes(dtype: torch.dtype) -> None:
    codes = np.arange(16, dtype=np.uint8)
    expected = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    values = E2M1.decode(torch.from_numpy(codes), dtype).double().numpy()
    np.testing.assert_array_equal(values, expected)
    assert np.signbit(values).tolist() == [False] * 8 + [True] * 8


def _stochastic_cases() -> tuple[Tensor, Tensor]:
    """Values beside the threshold of their bits, at it, and at random."""
    generator = np.random.default_rng(3)
    values, bits = [], []
    for low, high in zip(GRID, GRID[1:], strict=False):
        for r in (0, 1, 2, 255, 32767, 32768, 40000, 65534, 65535):
            at = np.float32(low + (high - low) * (r + Fraction(1, 2)) / 65536)
            for v in (at, np.nextafter(at, np.float32(0)), np.nextafter(at, np.float32(9))):
                values += [v, -v]
                bits += [r, r]
    values += list((2.5 * generator.standard_normal(3000)).astype(np.float32))
    bits += list(generator.integers(0, 65536, 3000))
    values += [np.float32(v) for v in (0, -0.0, 6, 6.5, 7.9, -8, FLOAT32_TINY, 2.0**-18)]
    bits += [0] * 8
    return torch.from_numpy(np.array(values, np.float32)), torch.from_numpy(np.array(bits))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_stochastic_threshold_is_exact(dtype: torch.dtype) -> None:
    values, bits = _stochastic_cases()
    codes = E2M1.encode(values.to(dtype), bits.int())
    expected = [fp4_code(v, r) for v, r in zip(values.tolist(), bits.tolist(), strict=True)]
    assert codes.tolist() == expected


@pytest.mark.parametrize("slip", [-0.5, 0.5, 1.0], ids=["no-half", "whole", "next"])
def test_another_threshold_is_told_apart(slip: float) -> None:
    """Negative control: thresholds r / 65536 and (r + 1) / 65536."""
    values, bits = _stochastic_cases()
    differ = 0
    for v, r in zip(values.tolist(), bits.tolist(), strict=True):
        a = min(abs(Fraction(v)), Fraction(6))
        low = max(i for i, g in enumerate(GRID) if g <= a)
        if low < 7:
            f = (a - GRID[low]) / (GRID[low + 1] - GRID[low])
            up = f > (r + Fraction(1, 2) + Fraction(slip)) / 65536
            differ += low + up != fp4_code(v, r) & 7
    assert differ > 0


def test_every_threshold_of_one_value() -> None:
    """Over all 65536 draws a value goes up as often as its fraction says, to half a draw."""
    bits = torch.arange(65536, dtype=torch.int32)
    for v in (0.1, 0.7, 1.9, 2.25, 3.3, 4.0, 5.7):
        a = Fraction(float(np.float32(v)))
        low = max(i for i, g in enumerate(GRID) if g <= a)
        f = (a - GRID[low]) / (GRID[low + 1] - GRID[low])
        codes = E2M1.encode(torch.full((65536,), v), bits).long()
        assert set(codes.tolist()) <= {low, low + 1}
        ups = Fraction(int((codes - low).sum()))
        assert abs(ups - 65536 * f) <= Fraction(1, 2)


def test_encode_leaves_its_arguments_alone() -> None:
    v, bits = normal((4, 8), 0), torch.randint(0, 65536, (4, 8)).float()
    kept, kept_bits = v.clone(), bits.clone()
    E2M1.encode(v, bits)
    assert torch.equal(v, kept) and torch.equal(bits, kept_bits)


# --- packing --------------------------------------------------------------------------------------


def test_low_nibble_first() -> None:
    codes = torch.tensor([[1, 2, 0xF, 0], [8, 7, 0, 9]], dtype=torch.uint8)
    assert formats.pack(codes).tolist() == [[0x21, 0x0F], [0x78, 0x90]]


def test_unpack_inverts_pack_over_all_bytes() -> None:
    packed = torch.arange(256, dtype=torch.uint8).view(16, 16)
    codes = formats.unpack(packed)
    assert codes.shape == (16, 32) and int(codes.max()) == 15
    assert torch.equal(formats.pack(codes), packed)
    expected = E2M1.decode(codes, torch.bfloat16)
    assert torch.equal(E2M1.decode_stored(packed, torch.bfloat16), expected)


# --- E8M0 and exponents ---------------------------------------------------------------------------


def test_decode_e8m0_is_ml_dtypes() -> None:
    codes = np.arange(256, dtype=np.uint8)
    expected = codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    values = formats.decode_e8m0(torch.from_numpy(codes)).double().numpy()
    np.testing.assert_array_equal(values, expected)
    assert values[0] == 2.0**-127 and math.isnan(values[255])


def test_encode_e8m0_clamps() -> None:
    exponents = torch.tensor([-1000, -128, -127, -126, 0, 126, 127, 128, 1000])
    assert formats.encode_e8m0(exponents).tolist() == [0, 0, 0, 1, 127, 253, 254, 254, 254]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_block_exponent_is_exact(dtype: torch.dtype) -> None:
    values = [
        2.0**e * m
        for e in range(-149, 128)
        for m in (1.0, 1.5, 1.75)
        if 2.0**e * m % FLOAT32_TINY == 0
    ]
    values += [float(np.nextafter(np.float32(2.0**e), np.float32(0))) for e in range(-148, 128)]
    mantissas, exponents = formats.block_exponent(torch.tensor(values, dtype=dtype))
    for v, m, e in zip(values, mantissas.tolist(), exponents.tolist(), strict=True):
        assert 1 <= m < 2 and Fraction(m) * Fraction(2) ** e == Fraction(v)


# --- E4M3 and UE5M3 scales ------------------------------------------------------------------------

E4M3_VALUES = [Fraction(float(np.uint8(c).view(ml_dtypes.float8_e4m3fn))) for c in range(127)]
UE5M3_VALUES = [v for v in map(ue5m3_value, range(256)) if v is not None]
SCALES = {"e4m3": (E4M3, E4M3_VALUES), "ue5m3": (UE5M3, UE5M3_VALUES)}


def _scale_inputs(values: list[Fraction]) -> list[float]:
    """Every value, every tie, neighbours of both in float32, subnormals, zero, saturation."""
    points = [float(v) for v in values]
    points += [float((a + b) / 2) for a, b in zip(values, values[1:], strict=False)]
    points += [float(values[-1]) * f for f in (1.01, 1.04, 1.07, 2.0)] + [3e38, FLOAT32_TINY, 1e-12]
    base = np.array(points, np.float32)
    around = (base, np.nextafter(base, np.float32(0)), np.nextafter(base, np.float32(np.inf)))
    return np.minimum(np.concatenate(around), np.float32(3.4e38)).tolist()


@pytest.mark.parametrize("up", [False, True], ids=["nearest", "up"])
@pytest.mark.parametrize("name", SCALES)
def test_scale_codes(name: str, up: bool) -> None:
    scale, values = SCALES[name]
    inputs = _scale_inputs(values)
    codes = scale.encode(torch.tensor(inputs), up=up)
    assert codes.tolist() == [nearest_code(Fraction(x), values, up) for x in inputs]


def test_e4m3_scale_is_ml_dtypes_below_saturation() -> None:
    inputs = np.array([x for x in _scale_inputs(E4M3_VALUES) if x <= 448], np.float32)
    expected = inputs.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(E4M3.encode(torch.from_numpy(inputs)).numpy(), expected)


@pytest.mark.parametrize("name", SCALES)
def test_scale_values(name: str) -> None:
    scale, values = SCALES[name]
    decoded = scale.decode(torch.arange(256, dtype=torch.uint8), torch.float64).tolist()
    assert [Fraction(v) for v in decoded[: len(values)]] == values
    assert all(math.isnan(v) for v in decoded[len(values) :])


def test_ue5m3_landmarks() -> None:
    decoded = UE5M3.decode(torch.tensor([1, 8, 247], dtype=torch.uint8), torch.float64)
    assert decoded.tolist() == [2.0**-17, 2.0**-14, 61440.0]


@pytest.mark.parametrize("name", SCALES)
def test_scale_specials(name: str) -> None:
    scale, values = SCALES[name]
    codes = scale.encode(torch.tensor([0.0, math.inf, math.nan]))
    assert codes.tolist() == [0, len(values) - 1, scale.nan]
    assert math.isnan(float(scale.decode(codes)[2]))


# --- FP8 elements ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("element", "dtype"),
    [("e4m3", ml_dtypes.float8_e4m3fn), ("e5m2", ml_dtypes.float8_e5m2)],
    ids=["e4m3", "e5m2"],
)
def test_fp8_elements_are_ml_dtypes(element: str, dtype: type) -> None:
    limit = ELEMENTS[element].max
    assert limit == float(ml_dtypes.finfo(dtype).max)
    grid = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
    grid = np.sort(grid[np.isfinite(grid)])
    ties = (grid[1:] + grid[:-1]) / 2
    values = np.concatenate((grid, ties, np.nextafter(ties, np.float32(-1e9)),
                             np.nextafter(ties, np.float32(1e9)), INPUTS["wide"],
                             -INPUTS["wide"], INPUTS["gaussian"]))  # fmt: skip
    expected = np.clip(values, -limit, limit).astype(dtype)
    codes = ELEMENTS[element].encode(torch.from_numpy(values))
    np.testing.assert_array_equal(codes.numpy(), expected.view(np.uint8))
    decoded = ELEMENTS[element].decode(codes, torch.float32).numpy()
    np.testing.assert_array_equal(decoded, expected.astype(np.float32))


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float16])
def test_stochastic_rounding_does_not_depend_on_torch_s_default_dtype(default: torch.dtype) -> None:
    """Half a unit of the last of 16 bits: in bfloat16 only eight of them would be left."""
    x, bits = torch.rand(4096) * 448, torch.randint(0, 65536, (4096,), dtype=torch.int32)
    block = Fp8Blocks("e4m3")
    wanted = formats.E4M3.encode(x, bits=bits), block._stochastic(x, bits).view(torch.uint8)
    torch.set_default_dtype(default)
    try:
        found = formats.E4M3.encode(x, bits=bits), block._stochastic(x, bits).view(torch.uint8)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(map(torch.equal, wanted, found))
