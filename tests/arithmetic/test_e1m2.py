"""E1M2, the 4-bit elements on a uniform grid: codes, scales and rounding against exact rational
arithmetic, and what the format is not given."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_fp4 import ConfigError, QuantizedTensor, Quantizer, quantize
from megatron_fp4.arithmetic import formats
from megatron_fp4.arithmetic.formats import E1M2, E2M1
from megatron_fp4.arithmetic.quantize import largest_magnitudes, quantize_matrix
from testing.oracles import GRID, UNIFORM, e8m0_byte, fp4_code, mse_block, mx_block, normal

TOP = UNIFORM[-1]


def e1m2(**fields: Any) -> Quantizer:
    return Quantizer(element="e1m2", **fields)


def codes_of(q: QuantizedTensor) -> list[list[int]]:
    return formats.unpack(q.codes).tolist()


# --- the grid -------------------------------------------------------------------------------------


def defined(exponent_bits: int) -> list[Fraction]:
    """The magnitudes of a float of three bits beside the sign, with a bias of 1, in their order."""
    mantissa_bits, found = 3 - exponent_bits, []
    for code in range(8):
        field, fraction = divmod(code, 2**mantissa_bits)
        significand = Fraction(fraction, 2**mantissa_bits) + (field > 0)
        found.append(significand * Fraction(2) ** (max(field, 1) - 1))
    return found


def test_the_grids_are_those_of_their_definitions() -> None:
    assert [Fraction(m) for m in E1M2.magnitudes] == defined(1) == UNIFORM
    assert [Fraction(m) for m in E2M1.magnitudes] == defined(2) == GRID
    assert (E1M2.max, E1M2.smallest) == (1.75, 0.25)


def edges() -> Tensor:
    """Every grid point and tie, their neighbours in float32, zeros, subnormals, huge."""
    points = [n / 8 for n in range(17)] + [6.0, 3.4e38, 2.0**-126, 2.0**-149]
    values = np.array(points, np.float32)
    below, above = (np.nextafter(values, np.float32(end)) for end in (-1, 3.4e38))
    values = np.abs(np.concatenate((values, below, above)))
    return torch.from_numpy(np.concatenate((values, -values)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_nearest_is_the_rational_oracle(dtype: torch.dtype) -> None:
    values = torch.cat((edges(), normal((2000,), 0)))
    codes = E1M2.encode(values.to(dtype))
    assert codes.tolist() == [fp4_code(v, grid=UNIFORM) for v in values.tolist()]
    # The controls: E2M1's grid, and ties away from zero.
    assert codes.tolist() != [fp4_code(v) for v in values.tolist()]
    away = (values.abs() * 4 + 0.5).floor().clamp(max=7)
    assert (away != (codes & 7)).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_decoding_is_a_quarter_of_an_integer_with_a_sign(dtype: torch.dtype) -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    values = E1M2.decode(codes, dtype).double()
    integers = (codes & 7).double() / 4
    assert torch.equal(values, torch.where(codes < 8, integers, -integers))
    assert values.signbit().tolist() == [False] * 8 + [True] * 8
    packed = torch.arange(256, dtype=torch.uint8).view(16, 16)
    whole = E1M2.decode(formats.unpack(packed), dtype)
    assert torch.equal(E1M2.decode_stored(packed, dtype), whole)
    assert not torch.equal(E2M1.decode_stored(packed, dtype), whole)  # the control


def stochastic_cases() -> tuple[Tensor, Tensor]:
    """Values beside the threshold of their bits, at it, and at random."""
    values, bits = [], []
    for low in UNIFORM[:-1]:
        for r in (0, 1, 2, 255, 32767, 32768, 40000, 65534, 65535):
            at = np.float32(low + Fraction(2 * r + 1, 2 * 65536 * 4))
            for v in (at, np.nextafter(at, np.float32(0)), np.nextafter(at, np.float32(9))):
                values += [float(v), -float(v)]
                bits += [r, r]
    drawn = torch.randint(0, 65536, (2000,), generator=torch.Generator().manual_seed(1))
    return torch.cat((torch.tensor(values), normal((2000,), 3))), torch.tensor([*bits, *drawn])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_stochastic_threshold_is_exact(dtype: torch.dtype) -> None:
    values, bits = stochastic_cases()
    codes = E1M2.encode(values.to(dtype), bits.int()).tolist()
    pairs = list(zip(values.tolist(), bits.tolist(), strict=True))
    assert codes == [fp4_code(v, r, UNIFORM) for v, r in pairs]
    for slip in (-1, 1):  # the controls: the thresholds of the draws beside these
        assert codes != [fp4_code(v, r + slip, UNIFORM) for v, r in pairs]


def test_every_threshold_of_one_value() -> None:
    """Over all 65536 draws a value goes up as often as its fraction says, to half a draw."""
    bits = torch.arange(65536, dtype=torch.int32)
    for v in (0.01, 0.3, 0.7, 1.0, 1.25, 1.7):
        low, fraction = divmod(Fraction(float(np.float32(v))) * 4, 1)
        ups = E1M2.encode(torch.full((65536,), v), bits).long() - low
        assert set(ups.tolist()) <= {0, 1}
        assert abs(int(ups.sum()) - 65536 * fraction) <= Fraction(1, 2)


# --- E8M0 scales ----------------------------------------------------------------------------------


def maxima() -> np.ndarray:
    """Largest magnitudes in every binade of float32, and beside each power and limit."""
    limits = (1, 1.3125, 1.75)
    beside = [np.nextafter(np.float32(m), np.float32(end)) for m in limits for end in (0, 2)]
    each = (1.0, 1.3125, 1.5, 1.75, *beside)
    with np.errstate(over="ignore"):
        found = np.array([float(m) * 2.0**e for e in range(-149, 128) for m in each], np.float32)
    return found[np.isfinite(found) & (found > 0)]


@pytest.mark.parametrize("rule", ["floor", "ceil", "nearest"])
def test_scales_over_every_exponent(rule: Any) -> None:
    found = maxima()
    x = torch.zeros(len(found), 32)
    x[:, 5] = torch.from_numpy(found)
    bytes_ = quantize(x, e1m2(rule=rule)).scales[:, 0].tolist()
    assert bytes_ == [e8m0_byte(m, rule, TOP) for m in found.tolist()]
    assert bytes_ != [e8m0_byte(m, rule) for m in found.tolist()]  # the control: E2M1's emax
    if rule == "ceil":  # the control: E2M1's limit of 1.5
        assert bytes_ != [e8m0_byte(m, rule, Fraction(3, 2)) for m in found.tolist()]


def test_ceil_clips_nothing_and_halves_the_scale_where_it_can() -> None:
    """But for maxima that 1.75 * 2^127, the largest number of the format, lies below."""
    found = torch.from_numpy(maxima())
    x = torch.zeros(len(found), 32)
    x[:, 0] = found
    q = quantize(x, e1m2(rule="ceil"))
    v = q.grid_coordinates(x.double())[:, 0]
    within = found.double() <= 1.75 * 2.0**127
    assert within.sum() == len(found) - 1
    assert bool((v[within] <= 1.75).all()) and bool((v[~within] > 1.75).all())
    assert bool((v[within & (q.scales[:, 0] > 0)] > 0.875).all())
    floor = quantize(x, e1m2()).grid_coordinates(x.double())
    assert float(floor.max()) > 1.75 and float(floor.max()) < 2


@pytest.mark.parametrize("rule", ["floor", "ceil", "nearest"])
def test_blocks_are_the_rational_oracle(rule: Any) -> None:
    x = normal((200, 32), 1) * normal((200, 1), 2).mul(20).exp2()
    q = quantize(x, e1m2(rule=rule))
    expected = [mx_block(block, rule, grid=UNIFORM) for block in x.tolist()]
    assert q.scales[:, 0].tolist() == [byte for byte, _ in expected]
    assert codes_of(q) == [codes for _, codes in expected]
    values = [
        [(UNIFORM[c & 7] * (-1) ** (c >> 3)) * Fraction(2) ** (byte - 127) for c in codes]
        for byte, codes in expected
    ]
    assert [list(map(Fraction, row)) for row in q.dequantize(torch.float64).tolist()] == values


def blocks_for_mse() -> Tensor:
    """Gaussian blocks, for which floor's scale errs less; blocks whose elements, but for a few, lie
    on the grid of twice the scale; a tie; no larger scale."""
    x = normal((200, 32), 21) * normal((200, 1), 22).mul(20).exp2()
    few = torch.randint(-3, 4, (100, 32), generator=torch.Generator().manual_seed(3)) / 2.0
    few[:, :4] = 2 - normal((100, 4), 23).abs() / 16
    edges = torch.zeros(2, 32)
    edges[0, 0] = 1.875  # errs by 1/8 under both
    edges[1, :2] = torch.tensor([float(np.finfo(np.float32).max), 1.0])
    return torch.cat((x, few, edges))


def test_mse_takes_the_scale_that_errs_less() -> None:
    x = blocks_for_mse()
    q, floor = quantize(x, e1m2(rule="mse")), quantize(x, e1m2())
    expected = [mse_block(block, UNIFORM) for block in x.tolist()]
    assert q.scales[:, 0].tolist() == [byte for byte, _ in expected]
    assert codes_of(q) == [codes for _, codes in expected]
    # The controls: both are taken, and a tie takes floor's; nor is it always ceil's.
    assert (q.scales.int() - floor.scales.int()).unique().tolist() == [0, 1]
    assert torch.equal(q.scales[-2:], floor.scales[-2:])
    assert (q.scales != quantize(x, e1m2(rule="ceil")).scales).any()
    clamped = quantize(torch.full((1, 32), 2.0**600, dtype=torch.float64), e1m2(rule="mse"))
    assert clamped.scales.item() == 254


# --- other scales ---------------------------------------------------------------------------------

SCALES: dict[str, dict[str, Any]] = {
    "e4m3": {"scale": "e4m3", "rule": "nearest", "block": (1, 16)},
    "ue5m3-up": {"scale": "ue5m3", "rule": "up", "block": (1, 16)},
    "tensor": {"scale": "e4m3", "rule": "nearest", "block": (1, 16), "tensor_max": 448.0},
    "inflated": {"scale": "ue5m3", "rule": "nearest", "block": (1, 16), "inflate": 17 / 16},
    "row": {"scale": "e4m3", "rule": "nearest", "block": (1, 16), "row_max": 448.0},
}


@pytest.mark.parametrize("name", SCALES)
def test_small_floats_as_scales_map_the_maximum_to_the_top(name: str) -> None:
    """In numpy's float32: g = amax / (1.75 T), scale = M / (1.75 g), v = x / (scale g)."""
    fields, f32 = SCALES[name], np.float32
    x = normal((16, 64), 14)
    q, blocks = quantize(x, e1m2(**fields)), x.numpy().reshape(16, 4, 16)
    g: Any = f32(1)
    if bound := fields.get("tensor_max") or fields.get("row_max"):
        axes = None if "tensor_max" in fields else 1
        g = np.abs(x.numpy()).max(axes, keepdims=True) / f32(1.75 * bound)
        assert q.tensor_scale is not None
        assert np.array_equal(q.tensor_scale.numpy().reshape(g.shape), g)
    wanted = np.abs(blocks).max(-1) / (f32(1.75) * g) * f32(fields.get("inflate", 1.0))
    form = formats.SCALE_FLOATS[fields["scale"]]
    codes = form.encode(torch.from_numpy(wanted), up=fields["rule"] == "up")
    assert torch.equal(q.scales, codes)
    v = blocks / (form.decode(codes).numpy() * g)[..., None]
    expected = [fp4_code(each, grid=UNIFORM) for each in v.flatten().tolist()]
    assert np.array(codes_of(q)).flatten().tolist() == expected
    six = form.encode(torch.from_numpy(wanted * f32(1.75) / f32(6)))
    assert not torch.equal(q.scales, six) or bound  # the control: E2M1's largest element


@pytest.mark.parametrize("block", [(1, 0), (0, 0), (1, 16)])
def test_float32_scales(block: tuple[int, int]) -> None:
    x = normal((8, 64), 5)
    q = quantize(x, e1m2(scale="fp32", rule="absmax", block=block))
    parts = x.numpy().reshape(-1, {(1, 0): 64, (0, 0): 8 * 64, (1, 16): 16}[block])
    factors = np.float32(1.75) / np.abs(parts).max(1)
    assert np.array_equal(q.scales.numpy().flatten(), factors)
    v = (parts * factors[:, None]).flatten().tolist()
    assert np.array(codes_of(q)).flatten().tolist() == [fp4_code(each, grid=UNIFORM) for each in v]


@pytest.mark.parametrize("rule", ["floor", "ceil", "mse"])
def test_the_largest_of_a_row_is_on_top_of_the_grid(rule: Any) -> None:
    x = normal((256, 64), 12) * normal((256, 1), 13).exp()
    at = x.abs().argmax(1, keepdim=True)
    for element, limit in (("e1m2", 1.75), ("e2m1", 6.0)):
        q = quantize(x, Quantizer(element=element, rule=rule, row_max=4.0))  # type: ignore[arg-type]
        row_scales = x.abs().amax(1).numpy() / np.float32(limit * 4)
        assert q.tensor_scale is not None
        assert np.array_equal(q.tensor_scale.numpy()[:, 0], row_scales)
        decoded = q.dequantize(torch.float64).gather(1, at)
        assert float((decoded / x.gather(1, at).double() - 1).abs().max()) < 2.0**-23


@pytest.mark.parametrize("name", ["e4m3", "ue5m3"])
def test_elements_times_scales_are_exact_in_bf16(name: str) -> None:
    """Every code under every scale: three significant bits times four."""
    form = formats.SCALE_FLOATS[name]
    scales = torch.arange(form.nan if name == "e4m3" else 248, dtype=torch.uint8)[:, None]
    codes = formats.pack(torch.arange(16, dtype=torch.uint8)).expand(len(scales), 8)
    quantizer = e1m2(scale=name, rule="nearest", block=(1, 16))
    every = QuantizedTensor(codes, scales, None, quantizer, torch.Size((len(scales), 16)), 1)
    exact = every.dequantize(torch.float64)
    assert torch.equal(every.dequantize(torch.bfloat16).double(), exact)
    significands = torch.frexp(exact)[0] * 64
    assert bool((significands != significands.round()).any())  # the control: six bits are too few


def test_powers_of_two_are_exact_in_bf16() -> None:
    """And none overflows, as 4 * 2^127 does in E2M1."""
    scales = torch.arange(255, dtype=torch.uint8)[:, None]
    codes = formats.pack(torch.arange(32, dtype=torch.uint8) % 16).expand(255, 16)
    every = QuantizedTensor(codes, scales, None, e1m2(), torch.Size((255, 32)), 1)
    assert torch.equal(every.dequantize(torch.bfloat16).double(), every.dequantize(torch.float64))


# --- across ranks, prescales, refusals ------------------------------------------------------------


@pytest.mark.parametrize("name", ["tensor", "row"])
def test_ranks_that_share_a_scale_agree_on_it(name: str) -> None:
    quantizer, x = e1m2(**SCALES[name]), normal((8, 64), 30) * normal((8, 1), 31).exp()
    whole, parts = quantize(x, quantizer), x.split(32, 1)
    largest = torch.stack([largest_magnitudes(part, quantizer, 1) for part in parts]).amax(0)
    found = [quantize_matrix(part, quantizer, axis=1, largest=largest) for part in parts]
    assert torch.equal(torch.cat([q.codes for q in found], 1), whole.codes)
    assert torch.equal(torch.cat([q.scales for q in found], 1), whole.scales)
    alone = [quantize(part, quantizer).codes for part in parts]  # the control
    assert not torch.equal(torch.cat(alone, 1), whole.codes)


def test_a_prescale_multiplies_what_is_rounded() -> None:
    x = normal((64, 32), 40)
    q = quantize(x, e1m2(prescale=0.75))
    expected = [mx_block(block, "floor", Fraction(3, 4), UNIFORM) for block in x.tolist()]
    assert codes_of(q) == [codes for _, codes in expected]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rounding": "ema"}, "ema takes e2m1"),
        ({"scale": "e4m3", "rule": "four-over-six"}, "four-over-six takes .* e2m1"),
        ({"scale": "e4m3", "rule": "nearest", "unit_gain": 32}, "unit_gain takes e2m1"),
        ({"scale": "e4m3", "rule": "floor"}, "takes rule nearest"),
        ({"row_max": 3.0}, "power of two"),
    ],
)
def test_what_it_is_not_given(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        e1m2(**fields)
    assert "\n" not in str(error.value)
    if "e2m1" in words:
        Quantizer(**fields)  # the control


def test_codes_share_bytes() -> None:
    quantizer = e1m2(scale="fp32", rule="absmax", block=(1, 0))
    assert e1m2().nbytes(64, 64) == Quantizer().nbytes(64, 64)
    with pytest.raises(ConfigError, match="two a byte"):
        quantize(torch.zeros(2, 31), quantizer)
    q = quantize(normal((32, 64), 1), e1m2(scale="fp32", rule="absmax", block=(0, 0))).unscaled()
    assert torch.equal(q.along(0).elements(), q.elements().t())
