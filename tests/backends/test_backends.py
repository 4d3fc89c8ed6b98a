"""Backends: who is chosen and why not the others; products against float64; preparation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_fp4 import GemmRecipe, Quantizer, get_quantizer, linear, quantize
from megatron_fp4.backends import BACKENDS, Backend, Preparation, choose
from megatron_fp4.backends.bf16 import Bf16
from megatron_fp4.backends.reference import Reference
from megatron_fp4.hadamard import transform
from megatron_fp4.outliers import OutlierClamp, Residual
from megatron_fp4.philox import Key, Noise, Signs, random_bits16
from megatron_fp4.quantizer import QuantizedTensor, quantize_matrix
from tests.oracles import normal, relative_error

CPU = torch.device("cpu")
MX = GemmRecipe(Quantizer(), Quantizer())
BOUND = {torch.bfloat16: 2e-3, torch.float32: 2e-4, torch.float64: 1e-13}
FP8_TENSOR = Quantizer(element="e4m3", scale="fp32", block=(0, 0), rule="absmax")
FP8_ROW = Quantizer(element="e5m2", scale="fp32", block=(1, 0), rule="absmax")


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.bfloat16, "bf16"),
        (torch.float32, "reference"),
        (torch.float16, "reference"),
        (torch.float64, "reference"),
    ],
    ids=str,
)
def test_choice_on_a_cpu(dtype: torch.dtype, name: str) -> None:
    choice = choose(MX, CPU, dtype)
    assert choice.backend.name == name
    names = [b.name for b in BACKENDS]
    assert [n for n, _ in choice.passed_over] == names[: names.index(name)]
    assert all(reason and "\n" not in reason for _, reason in choice.passed_over)


def test_the_reason_names_the_remedy() -> None:
    reasons = dict(choose(MX, CPU, torch.float32).passed_over)
    assert "float32" in reasons["bf16"] and "--bf16" in reasons["bf16"]


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
def test_names_are_unique(backend: Backend) -> None:
    assert [b.name for b in BACKENDS].count(backend.name) == 1


def test_outliers_are_split_by_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[torch.Size, OutlierClamp]] = []

    def split(self: Bf16, x: Tensor, outliers: OutlierClamp) -> tuple[Tensor, Residual]:
        seen.append((x.shape, outliers))
        return Reference.split(self, x, outliers)

    x, w = (normal((rows, 64), rows).bfloat16() for rows in (32, 96))
    wanted = linear(x, w, recipe="dge-occ")
    monkeypatch.setattr(Bf16, "split", split)
    assert torch.equal(linear(x, w, recipe="dge-occ"), wanted)
    assert seen == [(x.shape, OutlierClamp())]


# --- products -------------------------------------------------------------------------------------

M, N, K = 48, 32, 192
PAIRS: dict[str, tuple[Any, Any]] = {
    "mx": ("mxfp4", "mxfp4-ceil"),
    "nvfp4": ("nvfp4", "nvfp4"),
    "vector": ("vector", "vector"),
    "vector-and-mx": ("vector", "mxfp4"),
    "fp8-tensor": (FP8_TENSOR, FP8_TENSOR),
    "e5m2-row-and-high-precision": (FP8_ROW, None),
    "high-precision-and-nvfp4": (None, "nvfp4"),
    "high-precision": (None, None),
    "square-blocks": (Quantizer(block=(16, 16)), "mxfp4"),
    "mx-scale-of-a-row": (Quantizer(block=(1, 0)), "mxfp4"),
    "nvfp4-scale-of-a-row": (
        Quantizer(scale="e4m3", block=(1, 0), rule="nearest", tensor_max=448.0),
        "mxfp4",
    ),
}


def operand(rows: int, quantizer: Any, seed: int, dtype: torch.dtype) -> tuple[Any, Tensor]:
    """(operand, its value in float64)."""
    x = (normal((rows, K), seed) * normal((rows, 1), seed + 9).exp()).to(dtype)
    if quantizer is None:
        return x, x.double()
    q = quantize(x, quantizer)
    return q, q.dequantize(torch.float64)


@pytest.mark.parametrize("correction", [1.0, 16 / 9], ids=["plain", "16/9"])
@pytest.mark.parametrize("out", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("backend", [Reference(), Bf16()], ids=lambda b: b.name)
def test_products(backend: Backend, pair: str, out: torch.dtype, correction: float) -> None:
    if pair == "high-precision" and correction != 1.0:
        pytest.skip("a correction undoes the prescale of a quantizer")
    first, second = PAIRS[pair]
    a, a_value = operand(M, first, 1, torch.bfloat16)
    b, b_value = operand(N, second, 2, torch.bfloat16)
    product = backend.multiply(a, b, correction, out)
    assert product.dtype == out and product.shape == (M, N)
    assert relative_error(product, correction * a_value @ b_value.t()) < BOUND[out]


@pytest.mark.parametrize("pair", PAIRS)
def test_float64_products(pair: str) -> None:
    first, second = PAIRS[pair]
    a, a_value = operand(M, first, 1, torch.float64)
    b, b_value = operand(N, second, 2, torch.float64)
    product = Reference().multiply(a, b, 1.0, torch.float64)
    assert relative_error(product, a_value @ b_value.t()) < BOUND[torch.float64]


def test_bf16_does_not_narrow_a_float32_operand() -> None:
    """An unquantized Hadamard output or a folded dY stays in float32; narrowed, it would miss the
    bound of a float32 output."""
    a, b = normal((M, K), 3), quantize(normal((N, K), 4), "mxfp4")
    expected = a.double() @ b.dequantize(torch.float64).t()
    assert relative_error(Bf16().multiply(a, b, 1.0, torch.float32), expected) < 2e-4
    narrowed = Bf16().multiply(a.bfloat16(), b, 1.0, torch.float32)
    assert relative_error(narrowed, expected) > 1e-3  # negative control


def test_correction_comes_before_the_output_rounding() -> None:
    """The float32 product times 16/9, rounded once: bit for bit."""
    a, b = quantize(normal((M, K), 5), "mxfp4"), quantize(normal((N, K), 6), "mxfp4")
    product = a.dequantize() @ b.dequantize().t()
    found = Bf16().multiply(a, b, 16 / 9, torch.bfloat16)
    assert torch.equal(found, (product * (16 / 9)).bfloat16())
    assert not torch.equal(found, product.bfloat16() * (16 / 9))  # negative control


# --- preparation ----------------------------------------------------------------------------------


def preparation(quantizer: Any, axis: int, **fields: Any) -> Preparation:
    return Preparation(label="fc:dgrad:w", quantizer=quantizer, axis=axis, **fields)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
@pytest.mark.parametrize("axis", [0, 1], ids=["axis-0", "axis-1"])
@pytest.mark.parametrize("name", ["mxfp4", "mxfp4-ceil-sr", "nvfp4", "vector", None])
def test_prepared_codes_are_the_quantizers(backend: Backend, axis: int, name: str | None) -> None:
    if backend.unavailable(MX, CPU, torch.bfloat16) is not None:
        pytest.skip("cannot run here")
    x = normal((64, 96), 7, torch.bfloat16)
    quantizer = None if name is None else get_quantizer(name)
    stochastic = quantizer is not None and quantizer.stochastic
    noise = Noise(Key(3, 4), 5) if stochastic else None
    [found] = backend.prepare(x, preparation(quantizer, axis, noise=noise))
    if quantizer is None:
        assert torch.equal(found, x.movedim(axis, -1))  # type: ignore[arg-type]
        return
    bits = random_bits16(64, 96, Key(3, 4), 5) if stochastic else None
    expected = quantize_matrix(x, quantizer, axis=axis, bits=bits)
    assert isinstance(found, QuantizedTensor)
    assert torch.equal(found.codes, expected.codes) and torch.equal(found.scales, expected.scales)


@pytest.mark.parametrize("axis", [0, 1], ids=["axis-0", "axis-1"])
def test_order_is_fold_hadamard_quantizer(axis: int) -> None:
    x = normal((64, 128), 8)
    k = x.shape[axis]
    fold, signs = normal((k,), 9).exp(), Signs(Key(1), 2).vector(64)
    made = preparation(Quantizer(), axis, fold=fold, group=64, signs=Signs(Key(1), 2))
    [found] = Reference().prepare(x, made)
    moved = x.movedim(axis, -1) * fold
    expected = quantize(transform(moved, 64, signs).bfloat16(), "mxfp4")
    assert isinstance(found, QuantizedTensor)
    assert torch.equal(found.codes, expected.codes) and torch.equal(found.scales, expected.scales)
    folded_last = quantize((transform(x.movedim(axis, -1), 64, signs) * fold).bfloat16(), "mxfp4")
    assert not torch.equal(found.codes, folded_last.codes)  # negative control


def test_a_transform_is_rounded_to_bf16_before_a_quantizer_alone() -> None:
    x = normal((32, 64), 10)
    [plain] = Reference().prepare(x, preparation(None, 1, group=64))
    assert isinstance(plain, Tensor) and plain.dtype == torch.float32
    assert torch.equal(plain, transform(x, 64))
    [rounded] = Reference().prepare(x, preparation(Quantizer(), 1, group=64))
    assert isinstance(rounded, QuantizedTensor)
    assert torch.equal(rounded.codes, quantize(transform(x, 64).bfloat16(), "mxfp4").codes)


def test_hadamard_in_high_precision_leaves_the_product() -> None:
    x, w = normal((M, K), 11), normal((K, N), 12)
    prepare = Reference().prepare
    signs = Signs(Key(1), 2)
    [a] = prepare(x, preparation(None, 1, group=64, signs=signs))
    [b] = prepare(w, preparation(None, 0, group=64, signs=signs))
    product = Reference().multiply(a, b, 1.0, torch.float32)
    assert relative_error(product, x.double() @ w.double()) < 1e-6
    [wrong] = prepare(w.t(), preparation(None, 0, group=32, signs=signs))  # the other axis
    assert relative_error(a.double() @ wrong.double(), x.double() @ w.double()) > 0.5  # type: ignore


def test_noise_follows_the_layout_the_model_holds() -> None:
    """Along axis 0 the same bits belong to the same elements as along axis 1."""
    x = torch.full((32, 32), 0.6)
    x[0, :], x[:, 0] = 4.0, 4.0  # every block's scale is 1 either way
    quantizer, noise = get_quantizer("mxfp4-sr"), Noise(Key(8), 9)
    [rows] = Reference().prepare(x, preparation(quantizer, 1, noise=noise))
    [columns] = Reference().prepare(x, preparation(quantizer, 0, noise=noise))
    assert isinstance(rows, QuantizedTensor) and isinstance(columns, QuantizedTensor)
    assert torch.equal(rows.dequantize(), columns.dequantize())
    assert 0.1 < float((rows.dequantize() == 1.0).double().mean()) < 0.3  # .6: a fifth go up


def test_row_and_tensor_maxima_reach_the_quantizer() -> None:
    """What ranks agree on is of what the quantizer sees, and it scales by that."""
    x, fold = normal((4, 32), 13), torch.full((32,), 2.0)
    for quantizer, shape in (
        (get_quantizer("vector"), (4, 1)),
        (FP8_TENSOR, (1, 1)),
        (get_quantizer("nvfp4"), ()),
    ):
        plain = preparation(quantizer, 1, fold=fold)
        widest = Reference().absolute_max(x, plain)
        assert widest.shape == shape and widest.max() == 2 * x.abs().max()
        found, same, wider = (
            Reference().prepare(x, preparation(quantizer, 1, fold=fold, widest=given))[0]
            for given in (None, widest, 7 * widest)
        )
        assert all(isinstance(q, QuantizedTensor) for q in (found, same, wider))
        assert torch.equal(found.codes, same.codes) and torch.equal(found.scales, same.scales)  # type: ignore
        assert not torch.equal(found.codes, wider.codes)  # type: ignore


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("backend", [Reference(), Bf16()], ids=lambda b: b.name)
def test_decoded_operands_and_accumulation(backend: Backend, pair: str) -> None:
    """A kept decoded form gives the same product; `into` takes it without a rounding between."""
    first, second = PAIRS[pair]
    (a, a_value), (b, b_value) = (
        operand(M, first, 1, torch.bfloat16),
        operand(N, second, 2, torch.bfloat16),
    )
    product = backend.multiply(a, b, 1.0, torch.float32)
    decoded_a, decoded_b = backend.decode([a, b], torch.bfloat16)
    assert torch.equal(backend.multiply(decoded_a, decoded_b, 1.0, torch.float32), product)
    into, correction = normal((M, N), 14), 1.0 if pair == "high-precision" else 16 / 9
    expected = into.double() + correction * a_value @ b_value.t()
    found = backend.multiply(a, b, correction, torch.bfloat16, into)
    assert found is into
    assert relative_error(found, expected) < BOUND[torch.float32]
    rounded = normal((M, N), 14) + backend.multiply(a, b, correction, torch.bfloat16)
    assert relative_error(rounded, expected) > BOUND[torch.float32]  # negative control
