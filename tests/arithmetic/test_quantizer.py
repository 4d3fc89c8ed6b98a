"""Quantizers bit for bit: axes, layouts, dtypes, stochastic rounding, errors. Scale rules are
test_scaling.py's, the error on Gaussian data is test_targets.py's."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_fp4 import (
    ConfigError,
    QuantizedTensor,
    Quantizer,
    get_quantizer,
    list_quantizers,
    quantize,
)
from megatron_fp4.arithmetic import formats
from megatron_fp4.arithmetic.quantize import quantize_matrix
from testing.oracles import e8m0_byte, fp4_code, matrix_bits, mx_block, normal

ALL_NAMES = list_quantizers()


def codes_of(q: QuantizedTensor) -> list[list[int]]:
    return formats.unpack(q.codes).tolist()


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
        values = formats.E2M1.decode(codes).view(-1, 32) * formats.decode_e8m0(scales).view(-1, 1)
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
            values = formats.E2M1.decode(torch.tensor(codes)) * 2.0 ** (byte - 127)
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
    assert codes_of(q) == [[fp4_code(v) for v in row] for row in scaled.tolist()]
    values = formats.E2M1.decode(formats.unpack(q.codes)).numpy() / gamma[:, None]
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


@pytest.mark.parametrize("name", ALL_NAMES)
@pytest.mark.parametrize(("shape", "axis"), [((0, 64), 1), ((64, 0), 1), ((0, 64), 0)], ids=str)
def test_empty(name: str, shape: tuple[int, int], axis: int) -> None:
    q = quantize(torch.zeros(shape), name, axis=axis, seed=0)
    assert q.dequantize().shape == shape


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "vector"])
@pytest.mark.parametrize("axis", [0, 1], ids=["axis-0", "axis-1"])
def test_factors_multiply_to_the_dequantized(name: str, axis: int) -> None:
    q = quantize(normal((64, 96), 13), name, axis=axis)
    values, factors = q.with_row_factors(torch.bfloat16)
    assert torch.equal(values, q.with_row_factors(torch.float64)[0].bfloat16())
    assert torch.equal(values.double(), q.with_row_factors(torch.float64)[0])  # exact in BF16
    product = values.double() if factors is None else values.double() * factors
    expected = q.dequantize(torch.float64).movedim(axis, -1)
    torch.testing.assert_close(product, expected, rtol=2e-7, atol=0)


# --- stochastic rounding --------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [0, 1], ids=["axis-0", "axis-1"])
@pytest.mark.parametrize(
    ("rule", "prescale"), [("floor", Fraction(1)), ("ceil", Fraction(1)), ("floor", Fraction(3, 4))]
)
def test_stochastic_codes_are_the_rational_oracles(
    rule: Literal["floor", "ceil"], prescale: Fraction, axis: int
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
            expected = [fp4_code(v * scale, b) for v, b in pairs]
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
        {"rule": "mse", "rounding": "stochastic"},
        {"rule": "mse", "rounding": "ema"},
        {"rule": "mse", "prescale": 0.75},
        {"scale": "e4m3", "rule": "mse"},
        {"row_max": -1.0},
        {"row_max": 3.0},
        {"row_max": 1.0, "rounding": "ema"},
        {"row_max": 1.0, "block": (2, 32)},
        {"row_max": 1.0, "block": (1, 0)},
        {"scale": "fp32", "rule": "absmax", "row_max": 1.0},
        {"scale": "e4m3", "rule": "nearest", "row_max": 1.0, "tensor_max": 448.0},
        {"element": "e4m3", "scale": "fp32", "rule": "absmax"},
    ],
    ids=lambda fields: ",".join(f"{k}={v}" for k, v in fields.items()),
)
def test_a_quantizer_that_makes_no_sense_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Quantizer(**fields)


def test_names() -> None:
    assert {"mxfp4", "mxfp4-ceil", "mxfp4-sr", "mxfp4-ceil-sr", "nvfp4"} <= set(list_quantizers())
    assert get_quantizer("mxfp4") == Quantizer()
    assert get_quantizer("mxfp4-ceil-sr") == Quantizer(rule="ceil", rounding="stochastic")


def test_mxfp4_is_exact_in_bf16() -> None:
    """Every code under every scale, the subnormal and the overflowing ones too."""
    bytes_ = torch.arange(255, dtype=torch.uint8)[:, None]
    codes = formats.pack(torch.arange(32, dtype=torch.uint8) % 16).expand(255, 16)
    every = QuantizedTensor(codes, bytes_, None, Quantizer(), torch.Size((255, 32)), 1)
    wide, narrow = every.dequantize(torch.float64), every.dequantize(torch.bfloat16)
    within = wide.abs() <= torch.finfo(torch.bfloat16).max
    assert torch.equal(narrow.double()[within], wide[within])
    assert narrow[~within].isinf().all() and every.dequantize()[~within].isinf().all()


def test_equal_quantizers_hash_alike_here_and_elsewhere() -> None:
    """They are keys; a process that unpickles one finds what it put under its own."""
    one, other = Quantizer(prescale=1), Quantizer(prescale=1.0)
    assert one == other and hash(one) == hash(other)
    hash(one)  # once: it is kept
    code = (
        "import pickle, sys; from megatron_fp4 import Quantizer; "
        "found = pickle.loads(sys.stdin.buffer.read()); "
        "assert found == Quantizer() and hash(found) == hash(Quantizer())"
    )
    for seed in ("1", "2"):
        subprocess.run(
            [sys.executable, "-c", code],
            input=pickle.dumps(one),
            env=os.environ | {"PYTHONHASHSEED": seed},
            check=True,
        )
