"""Lines of operands are what the whole operand has there, whatever its quantizer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_fp4 import list_quantizers, quantize
from megatron_fp4.arithmetic.quantized_tensor import QuantizedTensor
from megatron_fp4.metrics.lines import decoded, lines_of, rows_of
from testing.oracles import normal

LINES = torch.tensor([0, 5, 17, 62, 63])
QUANTIZERS = list_quantizers()


def quantized(name: str, seed: int = 1, axis: int = 1) -> QuantizedTensor:
    x = normal((64, 64), seed) * torch.logspace(-2, 2, 64)[:, None]
    return quantize(x, name, axis=axis, seed=7)


@pytest.mark.parametrize("blocked", [0, 1])
@pytest.mark.parametrize("name", QUANTIZERS)
def test_lines_of_a_quantized_matrix(name: str, blocked: int) -> None:
    matrix = quantized(name, axis=blocked)
    rows = rows_of(matrix, LINES).dequantize()
    assert torch.equal(rows, matrix.dequantize().movedim(blocked, -1)[LINES])
    for axis in (0, 1):
        expected = matrix.dequantize(torch.bfloat16).movedim(axis, -1)[LINES]
        assert torch.equal(lines_of(matrix, axis, LINES), expected)
        # Negative control: other lines are not the same.
        assert not torch.equal(lines_of(matrix, axis, (LINES + 1) % 64), expected)


@pytest.mark.parametrize("axis", [0, 1])
def test_lines_in_high_precision(axis: int) -> None:
    x = normal((64, 64), 1).bfloat16()
    assert torch.equal(lines_of(x, axis, LINES), x.movedim(axis, -1)[LINES])


def test_matrices_are_decoded_together() -> None:
    """Of one quantizer, of two, of two widths, with tensor scales, and one in BF16."""
    each: list[QuantizedTensor | Tensor] = [
        rows_of(quantized(name, seed), LINES)
        for seed, name in enumerate(["mxfp4", "nvfp4", "mxfp4-ceil", "mxfp4", "nvfp4"])
    ]
    narrow = quantize(normal((64, 32), 9), "mxfp4")
    each += [rows_of(narrow, LINES), rows_of(narrow, LINES[:2]), normal((3, 32), 4).bfloat16()]
    found = decoded(each)
    assert len(found) == len(each)
    for matrix, values in zip(each, found, strict=True):
        whole = matrix.dequantize() if isinstance(matrix, QuantizedTensor) else matrix
        assert torch.equal(values, whole)
