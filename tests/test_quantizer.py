"""Quantizers bit for bit: scale rules, axes, blocks, packing, specials, stochastic rounding. Their
error on Gaussian data is test_targets.py's."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_fp4 import ConfigError, Quantizer, formats, get_quantizer, list_quantizers, quantize
from megatron_fp4.quantizer import quantize_matrix
from tests.oracles import e2m1_code, e8m0_byte, matrix_bits, mx_block, normal

MX = ("floor", "ceil")


def codes_of(q) -> list:
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
def test_mx_block_is_the_rational_oracle(name: str, rule: str) -> None:
    for seed in range(4):
        block = block_with(MAXIMA[name], seed)
        q = quantize(block.view(1, 32), Quantizer(rule=rule))
        byte, codes = mx_block(block.tolist(), rule)
        assert (q.scales.tolist(), codes_of(q)) == ([[byte]], [codes])


@pytest.mark.parametrize(("rule", "exponent", "first"), [("floor", 2, 7), ("ceil", 3, 6)])
def test_31_clips_under_floor_alone(rule: str, exponent: int, first: int) -> None:
    """31/4 = 7.75 is clipped to 6; 31/8 = 3.875 rounds to 4."""
    block = torch.zeros(1, 32)
    block[0, 0] = 31
    q = quantize(block, Quantizer(rule=rule))
    assert q.scales.item() == 127 + exponent
    assert codes_of(q)[0][0] == first


@pytest.mark.parametrize("rule", MX)
def test_scale_over_every_exponent(rule: str) -> None:
    mantissas = (1.0, 1.25, 1.5, 1.5000001, 1.75, 1.9999999)
    maxima = np.array([m * 2.0**e for e in range(-149, 128) for m in mantissas], np.float32)
    maxima = maxima[np.isfinite(maxima) & (maxima > 0)]
    x = torch.zeros(len(maxima), 32)
    x[:, 5] = torch.from_numpy(maxima)
    expected = [e8m0_byte(m, rule) for m in maxima.tolist()]
    assert quantize(x, Quantizer(rule=rule)).scales[:, 0].tolist() == expected


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
def test_ceil_never_clips_and_floor_does(rule: str) -> None:
    x = normal((4096, 32), 1)
    q = quantize(x, Quantizer(rule=rule))
    scaled = q.grid_coordinates(x).abs()
    assert bool((scaled > 6).any()) == (rule == "floor")
    assert float(scaled.max()) < 8


def test_a_block_of_zeros() -> None:
    x = torch.zeros(1, 32)
    x[0, 1] = -0.0
    q = quantize(x, "mxfp4")
    assert q.scales.tolist() == [[0]]
    assert codes_of(q)[0] == [0, 8] + [0] * 30


ALL_NAMES = [n for n in list_quantizers() if n != "vector-sr"]


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


# --- layout ---------------------------------------------------------------------------------------


def by_hand(x: Tensor, axis: int, rule: str) -> tuple[Tensor, Tensor]:
    """Codes and scale bytes by the rational oracle, block after block, the blocked axis last."""
    moved = x.movedim(axis, -1)
    blocks = moved.reshape(-1, 32)
    pairs = [mx_block(b.tolist(), rule) for b in blocks]
    codes = torch.tensor([c for _, c in pairs], dtype=torch.uint8).view(moved.shape)
    bytes_ = torch.tensor([b for b, _ in pairs], dtype=torch.uint8)
    return codes, bytes_.view(*moved.shape[:-1], -1)


@pytest.mark.parametrize(
    "shape", [(3, 64), (64, 5), (2, 3, 32), (2, 32, 3), (32, 2, 3), (96,)], ids=str
)
def test_axes(shape: tuple[int, ...]) -> None:
    x = normal(shape, 3)
    axis = next(i for i, n in enumerate(shape) if n % 32 == 0)
    for spelled in (axis, axis - len(shape)):
        q = quantize(x, "mxfp4-ceil", axis=spelled)
        codes, scales = by_hand(x, axis, "ceil")
        assert torch.equal(formats.unpack(q.codes), codes)
        assert torch.equal(q.scales, scales)
        assert q.axis == axis and q.dequantize().shape == shape
        values = formats.decode_e2m1(codes).view(-1, 32) * formats.decode_e8m0(scales).view(-1, 1)
        moved = values.view(codes.shape).movedim(-1, axis)
        assert torch.equal(q.dequantize(), moved)


def test_axis_zero_is_not_the_last_axis() -> None:
    x = normal((64, 64), 4)
    last = quantize(x, "mxfp4").dequantize()
    assert not torch.equal(quantize(x, "mxfp4", axis=0).dequantize(), last)
    assert torch.equal(quantize(x.t(), "mxfp4", axis=0).dequantize(), last.t())


@pytest.mark.parametrize(
    "view",
    [lambda x: x[::2], lambda x: x.t(), lambda x: x[:, 32:], lambda x: x[:1].expand(8, -1)],
    ids=["strided", "transposed", "sliced", "expanded"],
)
@pytest.mark.parametrize("name", ["mxfp4-sr", "nvfp4", "vector"])
def test_noncontiguous_input(view: Callable[[Tensor], Tensor], name: str) -> None:
    x = view(normal((64, 64), 5))
    q, expected = quantize(x, name, seed=3), quantize(x.clone().contiguous(), name, seed=3)
    assert torch.equal(q.codes, expected.codes) and torch.equal(q.scales, expected.scales)


@pytest.mark.parametrize("name", ["mxfp4", "mxfp4-ceil-sr", "nvfp4", "vector"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_input_dtypes(name: str, dtype: torch.dtype) -> None:
    """A narrow input gives what its float32 copy gives; so does a float64 one under E8M0 scales,
    which need no rounding."""
    if dtype == torch.float64 and not name.startswith("mxfp4"):
        pytest.skip("the scales of a float64 input are float64 numbers")
    x = normal((8, 64), 6, torch.bfloat16).to(dtype)
    q, wide = quantize(x, name, seed=9), quantize(x.float(), name, seed=9)
    assert torch.equal(q.codes, wide.codes) and torch.equal(q.scales, wide.scales)
    assert torch.equal(q.dequantize(), wide.dequantize())


def test_float64_is_computed_in_float64() -> None:
    """A value above a tie by less than float32 sees rounds up in float64 and to even in float32."""
    x = torch.zeros(1, 32, dtype=torch.float64)
    x[0, 0], x[0, 1] = 4.0, 0.25 + 2.0**-40
    assert codes_of(quantize(x, "mxfp4"))[0][1] == 1
    assert codes_of(quantize(x.float(), "mxfp4"))[0][1] == 0


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)
def test_dequantize_dtypes(dtype: torch.dtype) -> None:
    x = normal((4, 64), 7)
    q = quantize(x, "mxfp4")
    assert q.dequantize(dtype).dtype == dtype
    assert torch.equal(q.dequantize(dtype).double(), q.dequantize(torch.float64))


def test_gradients_do_not_enter() -> None:
    assert not quantize(normal((2, 32), 8).requires_grad_(), "mxfp4").dequantize().requires_grad


# --- 2-D blocks and whole rows --------------------------------------------------------------------


@pytest.mark.parametrize("axis", [0, 1], ids=["axis-0", "axis-1"])
@pytest.mark.parametrize("block", [(32, 32), (16, 16), (2, 64)], ids=str)
def test_2d_blocks(block: tuple[int, int], axis: int) -> None:
    x = normal((128, 64), 9) if axis else normal((64, 128), 9)
    q = quantize(x, Quantizer(block=block, rule="ceil"), axis=axis)
    moved = x.movedim(axis, -1)
    across, along = block
    expected = torch.empty(moved.shape)
    for i in range(0, moved.shape[0], across):
        for k in range(0, moved.shape[1], along):
            tile = moved[i : i + across, k : k + along]
            byte, codes = mx_block(tile.flatten().tolist(), "ceil")
            assert q.scales[i // across, k // along] == byte
            values = formats.decode_e2m1(torch.tensor(codes)) * 2.0 ** (byte - 127)
            expected[i : i + across, k : k + along] = values.view(tile.shape)
    assert torch.equal(q.dequantize(), expected.movedim(-1, axis))


def test_square_blocks_are_the_same_along_both_axes() -> None:
    x, square = normal((64, 64), 10), Quantizer(block=(32, 32))
    along, across = quantize(x, square, axis=1), quantize(x, square, axis=0)
    assert torch.equal(along.dequantize(), across.dequantize())


@pytest.mark.parametrize("axis", [0, 1], ids=["axis-0", "axis-1"])
def test_vector_wise(axis: int) -> None:
    x = normal((6, 10), 11)
    q = quantize(x, "vector", axis=axis)
    moved = x.movedim(axis, -1)
    gamma = (np.float32(6) / moved.abs().amax(1).numpy()).astype(np.float32)
    assert q.scales.dtype == torch.float32 and q.scales[:, 0].tolist() == gamma.tolist()
    scaled = moved.numpy() * gamma[:, None]
    assert codes_of(q) == [[e2m1_code(v) for v in row] for row in scaled.tolist()]
    values = formats.decode_e2m1(formats.unpack(q.codes)).numpy() / gamma[:, None]
    np.testing.assert_array_equal(q.dequantize().movedim(axis, -1).numpy(), values)


@pytest.mark.parametrize("row", [[0.0] * 4, [1e-40, -1e-40, 5e-41, 0.0]], ids=["zeros", "denormal"])
def test_vector_wise_specials(row: list[float]) -> None:
    q = quantize(torch.tensor([row]), "vector")
    assert torch.isfinite(q.scales).all() and torch.isfinite(q.dequantize()).all()
    if not any(row):
        assert q.scales.item() == 1.0


def test_whole_tensor_fp8() -> None:
    x = normal((8, 12), 12)
    q = quantize(x, Quantizer(element="e4m3", scale="fp32", block=(0, 0), rule="absmax"))
    gamma = np.float32(448) / np.float32(x.abs().max())
    assert q.scales.tolist() == [[gamma]]
    expected = (x * float(gamma)).clamp(-448, 448).to(torch.float8_e4m3fn).float() / float(gamma)
    torch.testing.assert_close(q.dequantize(), expected, rtol=2e-7, atol=0)


@pytest.mark.parametrize("name", [*ALL_NAMES, "vector-sr"])
@pytest.mark.parametrize(("shape", "axis"), [((0, 64), 1), ((64, 0), 1), ((0, 64), 0)], ids=str)
def test_empty(name: str, shape: tuple[int, int], axis: int) -> None:
    q = quantize(torch.zeros(shape), name, axis=axis, seed=0)
    assert q.dequantize().shape == shape


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "vector"])
@pytest.mark.parametrize("axis", [0, 1], ids=["axis-0", "axis-1"])
def test_factors_multiply_to_the_dequantized(name: str, axis: int) -> None:
    q = quantize(normal((64, 96), 13), name, axis=axis)
    values, outer = q.factors(torch.bfloat16)
    assert torch.equal(values, q.factors(torch.float64)[0].bfloat16())
    assert torch.equal(values.double(), q.factors(torch.float64)[0])  # exact in BF16
    product = values.double() if outer is None else values.double() * outer
    expected = q.dequantize(torch.float64).movedim(axis, -1)
    torch.testing.assert_close(product, expected, rtol=2e-7, atol=0)


# --- tensor-scaled formats ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "top", "inflate"), [("nvfp4", 448, 1.0), ("nvfp4-17-16", 256, 1.0625)]
)
def test_nvfp4_by_its_definition(name: str, top: int, inflate: float) -> None:
    """In numpy's float32 with ml_dtypes' E4M3: g = amax / (6 top), scale = E4M3(M / (6 g)),
    v = x / (scale g)."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = normal((16, 64), 14).numpy()
    f32 = np.float32
    g = f32(np.abs(x).max()) / f32(6 * top)
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
def test_ue5m3_without_a_tensor_scale(rule: str) -> None:
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


def test_four_over_six_takes_the_smaller_error() -> None:
    x = normal((64, 64), 16)
    chosen = quantize(x, "nvfp4-four-over-six")
    g = float(chosen.tensor_scale)  # type: ignore[arg-type]
    grid = torch.tensor([float(v) for v in formats.E2M1_MAGNITUDES], dtype=torch.float64)
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


# --- stochastic rounding --------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [0, 1], ids=["axis-0", "axis-1"])
@pytest.mark.parametrize(
    ("rule", "prescale"), [("floor", Fraction(1)), ("ceil", Fraction(1)), ("floor", Fraction(3, 4))]
)
def test_stochastic_codes_are_the_rational_oracles(
    rule: str, prescale: Fraction, axis: int
) -> None:
    """The scalar Philox's bits, grouped along the last axis whatever the blocked one, and the
    exact threshold. BF16 values, so that 3/4 of them is exact."""
    x = normal((32, 64), 17, torch.bfloat16)
    seed = (5 << 40) + 3
    quantizer = Quantizer(rule=rule, rounding="stochastic", prescale=float(prescale))
    q = quantize(x, quantizer, axis=axis, seed=seed)
    bits = matrix_bits(32, 64, seed, step=0, stream=0).movedim(axis, -1)
    moved = x.float().movedim(axis, -1)
    for i, (row, r) in enumerate(zip(moved, bits, strict=True)):
        for k in range(0, row.numel(), 32):
            block = row[k : k + 32].tolist()
            byte = e8m0_byte(max(map(abs, block)), rule)
            scale = float(prescale) * 2.0 ** (127 - byte)
            pairs = zip(block, r[k : k + 32].tolist(), strict=True)
            expected = [e2m1_code(v * scale, b) for v, b in pairs]
            assert formats.unpack(q.codes)[i, k : k + 32].tolist() == expected


def test_stochastic_rounding_is_the_seeds() -> None:
    x = normal((8, 64), 18)
    first = quantize(x, "mxfp4-sr", seed=1)
    assert torch.equal(first.codes, quantize(x, "mxfp4-sr", seed=1).codes)
    assert not torch.equal(first.codes, quantize(x, "mxfp4-sr", seed=2).codes)
    assert torch.equal(first.scales, quantize(x, "mxfp4-sr", seed=2).scales)


def test_grid_points_are_fixed_points_of_stochastic_rounding() -> None:
    x = quantize(normal((16, 64), 19), "mxfp4").dequantize()
    for seed in range(5):
        assert torch.equal(quantize(x, "mxfp4-ceil-sr", seed=seed).dequantize(), x)


# --- across ranks ---------------------------------------------------------------------------------


@pytest.mark.parametrize("spoil", [None, math.nan], ids=["finite", "nan-on-one-rank"])
def test_row_scales_take_the_maximum_over_ranks(spoil: float | None) -> None:
    x = normal((4, 64), 20)
    if spoil is not None:
        x[1, 40] = spoil
    whole = quantize(x, "vector")
    halves = x.split(32, dim=1)

    def reduce(amax: Tensor) -> None:  # fmax, as a collective that drops NaN does
        others = [h.abs().amax(1, keepdim=True).nan_to_num(math.inf) for h in halves]
        amax.copy_(torch.fmax(amax, torch.fmax(*others)))

    for half, codes in zip(halves, whole.codes.split(16, dim=1), strict=True):
        q = quantize_matrix(half, get_quantizer("vector"), axis=1, reduce_row=reduce)
        assert torch.equal(q.codes, codes)
        assert torch.equal(q.scales.nan_to_num(-1), whole.scales.nan_to_num(-1))


def test_a_nan_reaches_the_collective_as_an_inf() -> None:
    """NaN need not survive a maximum over ranks, and a lost NaN would leave garbage codes."""
    seen = []
    x = torch.full((1, 2), math.nan)
    quantize_matrix(x, get_quantizer("vector"), axis=1, reduce_row=lambda m: seen.append(m.clone()))
    assert seen[0].item() == math.inf


def test_tensor_scale_takes_the_maximum_over_ranks() -> None:
    x = normal((4, 64), 21)
    whole = quantize(x, "nvfp4")
    top = x.abs().max()
    for half, codes in zip(x.split(32, dim=1), whole.codes.split(16, dim=1), strict=True):
        q = quantize_matrix(
            half, get_quantizer("nvfp4"), axis=1, reduce_tensor=lambda m: m.copy_(top)
        )
        assert torch.equal(q.codes, codes)


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: quantize(torch.zeros(3, 40), "mxfp4"), ["axis 1", "40", "32"]),
        (lambda: quantize(torch.zeros(40, 32), "mxfp4", axis=0), ["axis 0", "40", "32"]),
        (lambda: quantize(torch.zeros(2, 24, 5), "mxfp4", axis=-2), ["axis 1", "24"]),
        (lambda: quantize(torch.zeros(24, 32), Quantizer(block=(32, 32))), ["24 rows", "32 x 32"]),
        (lambda: quantize(torch.zeros(2, 3), "vector"), ["even"]),
        (lambda: quantize(torch.zeros(2, 32), "mxfp4", axis=2), ["no axis 2"]),
        (lambda: quantize(torch.tensor(1.0), "mxfp4-sr", seed=1), ["0 axes"]),
        (lambda: quantize(torch.zeros(2, 32), "mxfp4-sr"), ["seed"]),
        (lambda: quantize_matrix(torch.zeros(2, 32), get_quantizer("mxfp4-sr"), axis=1), ["seed"]),
        (lambda: quantize(torch.zeros(2, 32), "mxfp8"), ["mxfp8", "mxfp4-ceil-sr", "nvfp4"]),
    ],
    ids=["last", "axis-0", "3-d", "rows", "odd", "no-such-axis", "scalar", "seedless",
         "bitless", "name"],
)  # fmt: skip
def test_errors(call: Callable[[], object], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        call()
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"rounding": "stochastc"},
        {"element": "e3m2"},
        {"scale": "e9m0"},
        {"rule": "absmax"},
        {"rule": "sideways"},
        {"scale": "e4m3", "rule": "floor"},
        {"scale": "fp32", "rule": "absmax"},
        {"element": "e4m3"},
        {"block": (1,)},
        {"block": (1, -32)},
        {"block": (0, 32)},
        {"block": (16, 0)},
        {"block": (1, 32.0)},
        {"prescale": 0.0},
        {"tensor_max": 448.0},
        {"inflate": 1.0625},
        {"scale": "e4m3", "rule": "four-over-six", "rounding": "stochastic", "block": (1, 16)},
    ],
    ids=lambda fields: ",".join(f"{k}={v}" for k, v in fields.items()),
)
def test_a_quantizer_that_makes_no_sense_is_refused(fields: dict) -> None:
    with pytest.raises(ConfigError):
        Quantizer(**fields)


def test_names() -> None:
    assert {"mxfp4", "mxfp4-ceil", "mxfp4-sr", "mxfp4-ceil-sr", "nvfp4"} <= set(list_quantizers())
    assert get_quantizer("mxfp4") == Quantizer()
    assert get_quantizer("mxfp4-ceil-sr") == Quantizer(rule="ceil", rounding="stochastic")
