"""Block scales against exact arithmetic: E8M0's rules, tensor-scaled formats, blocks with a NaN
or an Inf, maxima over ranks."""

from __future__ import annotations

import math
from typing import Literal

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_fp4 import (
    QuantizedTensor,
    Quantizer,
    get_quantizer,
    list_quantizers,
    quantize,
)
from megatron_fp4.arithmetic import formats
from megatron_fp4.arithmetic.quantize import largest_magnitudes, quantize_matrix
from testing.oracles import e8m0_byte, mse_block, mx_block, normal

Rule = Literal["floor", "ceil", "nearest"]
MX: tuple[Rule, ...] = ("floor", "ceil", "nearest")
ALL_NAMES = list_quantizers()


def codes_of(q: QuantizedTensor) -> list[list[int]]:
    return formats.unpack(q.codes).tolist()


def block_with(maximum: float, seed: int = 0) -> Tensor:
    """A block of 32 whose absolute maximum is `maximum`, at a place of its own."""
    values = normal((32,), seed).clamp(-3, 3) / 3.5 * maximum
    values[seed % 32] = -maximum if seed % 2 else maximum
    return values.float()


# --- E8M0 -----------------------------------------------------------------------------------------

MAXIMA = {
    "31": 31.0,
    "1.5": 1.5,
    "just-above-1.5": float(np.nextafter(np.float32(1.5), np.float32(2))),
    "just-below-1.5": float(np.nextafter(np.float32(1.5), np.float32(1))),
    "1.125": 1.125,
    "just-below-1.125": float(np.nextafter(np.float32(1.125), np.float32(1))),
    "6": 6.0,
    "power-of-two": 64.0,
    "just-below-a-power": float(np.nextafter(np.float32(64), np.float32(0))),
    "just-above-a-power": float(np.nextafter(np.float32(64), np.float32(99))),
    "largest": float(np.finfo(np.float32).max),
    "smallest-normal": 2.0**-126,
    "denormal": 2.0**-149 * 11,
    "smallest": 2.0**-149,
    "tiny": 2.0**-124,
}


@pytest.mark.parametrize("rule", MX)
@pytest.mark.parametrize("name", MAXIMA)
def test_mx_block_is_the_rational_oracle(name: str, rule: Rule) -> None:
    for seed in range(4):
        block = block_with(MAXIMA[name], seed)
        q = quantize(block.view(1, 32), Quantizer(rule=rule))
        byte, codes = mx_block(block.tolist(), rule)
        assert (q.scales.tolist(), codes_of(q)) == ([[byte]], [codes])


@pytest.mark.parametrize(
    ("rule", "exponent", "first"), [("floor", 2, 7), ("nearest", 2, 7), ("ceil", 3, 6)]
)
def test_31_clips_unless_its_scale_is_rounded_up(rule: Rule, exponent: int, first: int) -> None:
    """31/4 = 7.75 is clipped to 6; 31/8 = 3.875 rounds to 4."""
    block = torch.zeros(1, 32)
    block[0, 0] = 31
    q = quantize(block, Quantizer(rule=rule))
    assert q.scales.item() == 127 + exponent
    assert codes_of(q)[0][0] == first


@pytest.mark.parametrize("rule", MX)
def test_scale_over_every_exponent(rule: Rule) -> None:
    mantissas = (1.0, 1.1249999, 1.125, 1.25, 1.5, 1.5000001, 1.75, 1.9999999)
    maxima = np.array([m * 2.0**e for e in range(-149, 128) for m in mantissas], np.float32)
    maxima = maxima[np.isfinite(maxima) & (maxima > 0)]
    x = torch.zeros(len(maxima), 32)
    x[:, 5] = torch.from_numpy(maxima)
    expected = [e8m0_byte(m, rule) for m in maxima.tolist()]
    assert quantize(x, Quantizer(rule=rule)).scales[:, 0].tolist() == expected


def blocks_for_mse() -> Tensor:
    """Gaussian blocks of many sizes, blocks of a few grid points, ties between both scales."""
    x = normal((400, 32), 21) * normal((400, 1), 22).mul(20).exp2()
    few = torch.randint(-16, 17, (200, 32), generator=torch.Generator().manual_seed(3)) / 2.0
    edges = torch.zeros(8, 32)
    edges[0, 0], edges[1, 3], edges[2] = 7.0, 1.75 * 2.0**-126, 2.0**-149 * 5
    edges[3, :2], edges[4, 1] = torch.tensor([float(np.finfo(np.float32).max), 1.0]), -5.0
    edges[5, :3], edges[6, 0] = torch.tensor([7.0, 0.25, 0.25]), 2.0**-124
    return torch.cat((x, few, edges)).float()


def test_mse_takes_the_scale_that_errs_less() -> None:
    x = blocks_for_mse()
    q = quantize(x, Quantizer(rule="mse"))
    expected = [mse_block(block) for block in x.tolist()]
    assert q.scales[:, 0].tolist() == [byte for byte, _ in expected]
    assert codes_of(q) == [codes for _, codes in expected]
    floor = quantize(x, "mxfp4")
    chosen = q.scales.int() - floor.scales.int()
    assert chosen.unique().tolist() == [0, 1]
    # The controls: neither rule is always right, and a tie takes floor's scale.
    assert (q.scales != quantize(x, "mxfp4-ceil").scales).any()
    assert q.scales[604] == floor.scales[604]  # -5 errs by 1 under both


def test_mse_errs_least_of_the_three_rules() -> None:
    """In exact sums of float64, up to what counting in units of 2^-18 leaves out."""
    x = normal((2048, 32), 4)

    def error(rule: str) -> Tensor:
        q = quantize(x, Quantizer(rule=rule))  # type: ignore[arg-type]
        return (q.dequantize(torch.float64) - x.double()).square().sum(1)

    unit = quantize(x, "mxfp4").block_scales(torch.float64)[:, 0].square() * 2.0**-18
    best = torch.minimum(error("floor"), error("ceil"))
    assert bool((error("mse") <= best + 32 * unit).all())
    assert bool((error("mse") < error("floor") - 32 * unit).any())


def test_mse_does_not_depend_on_the_order_of_a_block() -> None:
    x = normal((4096, 32), 5)
    turned = x[:, torch.randperm(32, generator=torch.Generator().manual_seed(1))]
    for block in ((1, 32), (2, 32), (1, 0)):
        rule = Quantizer(rule="mse", block=block)
        assert torch.equal(quantize(x, rule).scales, quantize(turned, rule).scales)


def test_mse_of_float64_where_scales_are_clamped() -> None:
    x = torch.zeros(2, 32, dtype=torch.float64)
    x[0, 0], x[1, 0] = 2.0**600, 2.0**-600
    q = quantize(x, Quantizer(rule="mse"))
    assert q.scales.flatten().tolist() == [254, 0]


def test_mse_counts_an_error_to_the_nearest_unit() -> None:
    """Of 7 + e both scales err by 1 within 2 e. In units of 2^-18 that is no difference for e of
    2^-21, a quarter of a unit, and a tie takes the smaller scale; cut off, the errors would differ.
    For e of 2^-19 it is one unit either way."""
    x = torch.zeros(2, 32)
    x[:, 0] = 7 + torch.tensor([2.0**-21, 2.0**-19])
    assert quantize(x, Quantizer(rule="mse")).scales[:, 0].tolist() == [127, 128]


def test_log2_and_a_sixth_are_told_apart() -> None:
    """Negative control: ceil(log2(M / 6)) in float32, which methods write down, differs from the
    exact rule beside 1.5 * 2^e."""
    edges = np.array([1.5 * 2.0**e for e in range(-20, 60)], np.float32)
    maxima = np.concatenate((edges, np.nextafter(edges, np.float32(np.inf))))
    x = torch.zeros(len(maxima), 32)
    x[:, 0] = torch.from_numpy(maxima)
    naive = np.ceil(np.log2(maxima * np.float32(1 / 6))).astype(int) + 127
    ours = quantize(x, Quantizer(rule="ceil")).scales[:, 0]
    assert ours.tolist() == [e8m0_byte(m, "ceil") for m in maxima.tolist()]
    assert (naive != ours.numpy()).any()


@pytest.mark.parametrize("rule", MX)
def test_ceil_alone_never_clips(rule: Rule) -> None:
    """Floor's scale is at least M/8, and that of nearest at least M/9."""
    x = normal((4096, 32), 1)
    q = quantize(x, Quantizer(rule=rule))
    largest = float(q.grid_coordinates(x).abs().max())
    assert (largest > 6) == (rule != "ceil")
    assert (largest >= 8) == (rule == "nearest") and largest < 9


def test_a_block_of_zeros() -> None:
    x = torch.zeros(1, 32)
    x[0, 1] = -0.0
    q = quantize(x, "mxfp4")
    assert q.scales.tolist() == [[0]]
    assert codes_of(q)[0] == [0, 8] + [0] * 30


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("name", ALL_NAMES)
def test_a_block_with_a_nan_or_an_inf(name: str, bad: float) -> None:
    x = normal((4, 64), 2)
    clean = quantize(x, name, seed=1)
    x[2, 40] = bad
    q = quantize(x, name, seed=1)
    decoded, expected = q.dequantize(), clean.dequantize()
    width = get_quantizer(name).block[1] or 64
    spoilt = slice(40 // width * width, 40 // width * width + width)
    assert decoded[2, spoilt].isnan().all()
    assert set(codes_of(q)[2][spoilt]) == {0}
    keep = torch.ones(4, 64, dtype=torch.bool)
    keep[2, spoilt] = False
    assert torch.equal(decoded[keep], expected[keep])  # the other blocks do not notice
    if get_quantizer(name).scale == "e8m0":
        assert q.scales[2].tolist() == [clean.scales[2, 0].item(), 0xFF]


# --- tensor-scaled formats ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "tensor_max", "inflate"), [("nvfp4", 448, 1.0), ("nvfp4-17-16", 256, 1.0625)]
)
def test_nvfp4_by_its_definition(name: str, tensor_max: int, inflate: float) -> None:
    """In numpy's float32 with ml_dtypes' E4M3: g = amax / (6 T), scale = E4M3(M / (6 g)),
    v = x / (scale g)."""
    x = normal((16, 64), 14).numpy()
    f32 = np.float32
    g = f32(np.abs(x).max()) / f32(6 * tensor_max)
    blocks = x.reshape(16, 4, 16)
    wanted = np.abs(blocks).max(-1) / (f32(6) * g) * f32(inflate)
    scales = np.minimum(wanted, f32(448)).astype(ml_dtypes.float8_e4m3fn)
    v = blocks / (scales.astype(f32) * g)[..., None]
    codes = v.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    q = quantize(torch.from_numpy(x), name)
    assert q.tensor_scale is not None and q.tensor_scale.item() == g
    np.testing.assert_array_equal(q.scales.numpy(), scales.view(np.uint8))
    np.testing.assert_array_equal(formats.unpack(q.codes).numpy(), codes.reshape(16, 64))
    expected = codes.view(ml_dtypes.float4_e2m1fn).astype(f32) * scales.astype(f32)[..., None] * g
    np.testing.assert_array_equal(q.dequantize().numpy(), expected.reshape(16, 64))


@pytest.mark.parametrize("rule", ["nearest", "up"])
def test_ue5m3_without_a_tensor_scale(rule: Literal["nearest", "up"]) -> None:
    x = normal((8, 32), 15) * 100
    q = quantize(x, Quantizer(scale="ue5m3", block=(1, 16), rule=rule))
    assert q.tensor_scale is None
    maxima = x.view(8, 2, 16).abs().amax(-1)
    assert torch.equal(q.scales, formats.UE5M3.encode(maxima / 6, up=rule == "up"))
    clips = bool((q.grid_coordinates(x).abs() > 6).any())
    assert clips == (rule == "nearest")


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4-17-16", "nvfp4-four-over-six", "nvfp4-sr"])
@pytest.mark.parametrize("maximum", [0.0, 2.0**-149, 1e-42, 1e-38, 3e38], ids=str)
def test_nvfp4_extremes_stay_finite(name: str, maximum: float) -> None:
    """Zeros, and maxima whose tensor scale is denormal or underflows, next to a block of zeros."""
    x = torch.zeros(2, 32)
    x[0, 3] = maximum
    q = quantize(x, name, seed=1)
    decoded = q.dequantize()
    assert torch.isfinite(decoded).all() and (decoded[1] == 0).all()
    assert q.scales[1].tolist() == [0, 0]
    if maximum >= 1e-38:
        assert decoded[0, 3].item() == pytest.approx(maximum, rel=0.07)


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4-17-16", "nvfp4-four-over-six", "nvfp4-sr"])
def test_a_block_whose_scale_is_rounded_to_zero_has_codes_of_zero(name: str) -> None:
    """Its elements are not the largest ones, as if they were divided by zero."""
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 16:20] = 1.0, torch.tensor([1e-9, -1e-9, 1e-12, 0.0])
    q = quantize(x, name, seed=1 if name.endswith("-sr") else None)
    assert q.scales[0, 1].item() == 0 < q.scales[0, 0].item()
    assert {code & 7 for code in codes_of(q)[0][16:]} == {0}
    assert (q.dequantize()[0, 16:] == 0).all()


def test_four_over_six_takes_the_smaller_error() -> None:
    x = normal((64, 64), 16)
    chosen = quantize(x, "nvfp4-four-over-six")
    g = float(chosen.tensor_scale)  # type: ignore[arg-type]
    grid = torch.tensor([float(v) for v in formats.E2M1.magnitudes], dtype=torch.float64)
    blocks = x.double().view(-1, 16)
    errors = []
    for target in (6.0, 4.0):
        wanted = (blocks.abs().amax(1) / (target * g)).float()
        scale = formats.E4M3.decode(formats.E4M3.encode(wanted), torch.float64) * g
        distance = blocks.abs() - scale[:, None] * grid[:, None, None]  # [8, blocks, 16]
        errors.append(distance.abs().amin(0).square().sum(1))
    six, four = errors
    actual = (chosen.dequantize(torch.float64).view(-1, 16) - blocks).square().sum(1)
    torch.testing.assert_close(actual, torch.minimum(six, four), rtol=1e-5, atol=0)
    assert 0.1 < float((four < six).double().mean()) < 0.9  # both are taken


def test_four_over_six_ties_go_to_six() -> None:
    """A block of values that both scales hold exactly: amax 6 with 448 / 256 to spare."""
    x = torch.zeros(1, 32)
    x[0, 0] = 6.0 * 256  # fixes g = 1; the second block's maximum is 3 * 2^k
    x[0, 16:18] = torch.tensor([12.0, 6.0])  # /2: 6, 3; /3: 4, 2: both exact
    q = quantize(x, "nvfp4-four-over-six")
    assert q.tensor_scale is not None and q.tensor_scale.item() == 1.0
    assert formats.E4M3.decode(q.scales)[0].tolist() == [256.0, 2.0]


# --- across ranks ---------------------------------------------------------------------------------


@pytest.mark.parametrize("spoil", [None, math.nan], ids=["finite", "nan-on-one-rank"])
def test_row_scales_take_the_maximum_over_ranks(spoil: float | None) -> None:
    x = normal((4, 64), 20)
    if spoil is not None:
        x[1, 40] = spoil
    whole = quantize(x, "vector")
    halves = x.split(32, dim=1)

    vector = get_quantizer("vector")
    # fmax, as a collective that drops NaN does.
    largest = torch.fmax(*(largest_magnitudes(half, vector, 1) for half in halves))
    for half, codes in zip(halves, whole.codes.split(16, dim=1), strict=True):
        q = quantize_matrix(half, vector, axis=1, largest=largest)
        assert torch.equal(q.codes, codes)
        assert torch.equal(q.scales.nan_to_num(-1), whole.scales.nan_to_num(-1))


def test_a_nan_reaches_the_collective_as_an_inf() -> None:
    """NaN need not survive a maximum over ranks, and a lost NaN would leave garbage codes."""
    x, vector = torch.full((1, 2), math.nan), get_quantizer("vector")
    assert largest_magnitudes(x, vector, 1).item() == math.inf


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4-four-over-six", "nvfp4-17-16"])
def test_tensor_scale_takes_the_maximum_over_ranks(name: str) -> None:
    x = normal((4, 64), 21)
    x[:, 32:] *= 3
    x[2, 5] = math.inf  # marked by its own block's scale
    whole, quantizer, halves = quantize(x, name), get_quantizer(name), x.split(32, dim=1)
    largest = torch.maximum(*(largest_magnitudes(half, quantizer, 1) for half in halves))
    for half, codes in zip(halves, whole.codes.split(16, dim=1), strict=True):
        assert torch.equal(quantize_matrix(half, quantizer, axis=1, largest=largest).codes, codes)
    assert not torch.equal(quantize(halves[0], name).codes, whole.codes[:, :16])  # its own scale


@pytest.mark.parametrize("axis", [0, 1])
def test_which_scales_ranks_share(axis: int) -> None:
    tensor = Quantizer(element="e4m3", scale="fp32", block=(0, 0), rule="absmax")
    for quantizer in (tensor, get_quantizer("nvfp4")):
        assert quantizer.scale_spans(0, axis) and quantizer.scale_spans(1, axis)
    vector = get_quantizer("vector")
    assert vector.scale_spans(axis, axis) and not vector.scale_spans(1 - axis, axis)
    assert not any(get_quantizer("mxfp4").scale_spans(sharded, axis) for sharded in (None, 0, 1))
    assert not any(q.scale_spans(None, axis) for q in (tensor, vector, get_quantizer("nvfp4")))
