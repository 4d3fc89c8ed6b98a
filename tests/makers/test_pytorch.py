"""The maker in plain PyTorch: what an operand goes through, in which order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_fp4 import Quantizer, get_quantizer, quantize
from megatron_fp4.arithmetic.hadamard import transform
from megatron_fp4.arithmetic.philox import Key, Noise, Signs, random_bits16
from megatron_fp4.arithmetic.quantize import quantize_matrix
from megatron_fp4.arithmetic.quantized_tensor import QuantizedTensor
from megatron_fp4.makers.base import Given
from megatron_fp4.makers.pytorch import PyTorch, make_operand
from megatron_fp4.multipliers.reference import Reference
from megatron_fp4.operands import Decoded
from testing.builders.operand_plans import plan
from testing.oracles import normal, relative_error

FP8_TENSOR = Quantizer(element="e4m3", scale="fp32", block=(0, 0), rule="absmax")


def made(x: Tensor, quantizer: Any, axis: int, group: int = 0, **given: Any) -> Any:
    return make_operand(x, plan(x, quantizer, axis, group=group), Given(**given))


@pytest.mark.parametrize("axis", [0, 1], ids=["axis-0", "axis-1"])
@pytest.mark.parametrize("name", ["mxfp4", "mxfp4-ceil-sr", "nvfp4", "vector", None])
def test_codes_are_the_quantizers(axis: int, name: str | None) -> None:
    x = normal((64, 96), 7, torch.bfloat16)
    quantizer = None if name is None else get_quantizer(name)
    stochastic = quantizer is not None and quantizer.stochastic
    noise = Noise(Key(3, 4), 5) if stochastic else None
    [made] = PyTorch().make(x, [plan(x, quantizer, axis)], [Given(noise=noise)])
    found = made.operand
    assert made.carriers is None
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
    found = made(x, Quantizer(), axis, 64, fold=fold, signs=Signs(Key(1), 2))
    moved = x.movedim(axis, -1) * fold
    expected = quantize(transform(moved, 64, signs).bfloat16(), "mxfp4")
    assert torch.equal(found.codes, expected.codes) and torch.equal(found.scales, expected.scales)
    folded_last = quantize((transform(x.movedim(axis, -1), 64, signs) * fold).bfloat16(), "mxfp4")
    assert not torch.equal(found.codes, folded_last.codes)  # negative control


def test_a_transform_is_rounded_to_bf16_before_a_quantizer_alone() -> None:
    x = normal((32, 64), 10)
    plain = made(x, None, 1, 64)
    assert plain.dtype == torch.float32 and torch.equal(plain, transform(x, 64))
    rounded = made(x, Quantizer(), 1, 64)
    assert torch.equal(rounded.codes, quantize(transform(x, 64).bfloat16(), "mxfp4").codes)


def test_hadamard_in_high_precision_leaves_the_product() -> None:
    x, w = normal((48, 192), 11), normal((192, 32), 12)
    signs = Signs(Key(1), 2)
    a, b = made(x, None, 1, 64, signs=signs), made(w, None, 0, 64, signs=signs)
    product = Reference().multiply(Decoded(a), Decoded(b), 1.0, torch.float32)
    assert relative_error(product, x.double() @ w.double()) < 1e-6
    wrong = made(w.t(), None, 0, 32, signs=signs)  # the other axis
    assert relative_error(a.double() @ wrong.double(), x.double() @ w.double()) > 0.5


def test_random_bits_follow_the_layout_the_model_holds() -> None:
    """Along axis 0 the same bits belong to the same elements as along axis 1."""
    x = torch.full((32, 32), 0.6)
    x[0, :], x[:, 0] = 4.0, 4.0  # every block's scale is 1 either way
    quantizer, noise = get_quantizer("mxfp4-sr"), Noise(Key(8), 9)
    rows, columns = (made(x, quantizer, axis, noise=noise) for axis in (1, 0))
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
        largest = PyTorch().largest(x, plan(x, quantizer, 1), Given(fold=fold))
        assert largest.shape == shape and largest.max() == 2 * x.abs().max()
        found, same, wider = (
            made(x, quantizer, 1, fold=fold, largest=given)
            for given in (None, largest, 7 * largest)
        )
        assert torch.equal(found.codes, same.codes) and torch.equal(found.scales, same.scales)
        assert not torch.equal(found.codes, wider.codes)
