"""Sums of parts that were added together are those of each part alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_fp4 import list_quantizers, quantize
from megatron_fp4.arithmetic.quantized_tensor import QuantizedTensor
from megatron_fp4.metrics import tally
from megatron_fp4.metrics.lines import rows_of
from megatron_fp4.metrics.operands import WIDTH, carrier_sums, operand_sums
from megatron_fp4.metrics.tally import MOST_CARRIERS, Tally
from testing.oracles import normal

CPU = torch.device("cpu")


def part(name: str, seed: int, rows: int = 4) -> tuple[Tensor, QuantizedTensor]:
    """Rows of a matrix whose size, and so whose scales, depend on the seed."""
    x = normal((64, 64), seed) * 4.0**-seed
    x[:, 32:48] = 0
    lines = torch.arange(0, 16 * rows, 16)
    return x[lines], rows_of(quantize(x, name, seed=7), lines)


@pytest.mark.parametrize("most", [1, 3 * 4 * 64, 2**21])
@pytest.mark.parametrize("name", list_quantizers())
def test_parts_are_summed_together(name: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tally, "MOST_WAITING", most)
    parts, places = [part(name, seed) for seed in range(5)], [2, 0, 2, 1, 0]
    expected = torch.zeros(4, WIDTH, dtype=torch.float64)
    found = Tally(4, CPU)
    for place, each in zip(places, parts, strict=True):
        found.add_rows(place, *each, 0.5)
        expected[place] += operand_sums(*each, 0.5)
    table = found.take()
    torch.testing.assert_close(table, expected, rtol=1e-14, atol=0)
    # Negative controls: a part at another place, and another part's scales.
    assert not torch.allclose(table[[1, 0, 2, 3]], expected, rtol=1e-6)
    wrong = operand_sums(parts[0][0], parts[1][1], 0.5)
    assert not torch.allclose(wrong, operand_sums(*parts[0], 0.5), rtol=1e-6)
    assert found.take().count_nonzero() == 0  # it has begun anew


def test_parts_of_other_kinds_do_not_mix() -> None:
    """Quantizers, shapes, dtypes and shares of one step."""
    found, expected = Tally(1, CPU), torch.zeros(1, WIDTH, dtype=torch.float64)
    for seed, (name, rows) in enumerate([("mxfp4", 4), ("nvfp4", 4), ("mxfp4", 3), ("mxfp4", 4)]):
        x, quantized = part(name, seed, rows)
        x = x.bfloat16() if seed == 3 else x
        found.add_rows(0, x, quantized, 1 / (1 + seed))
        expected[0] += operand_sums(x, quantized, 1 / (1 + seed))
    x, quantized = part("mxfp4", 9)
    found.add(0, x, quantized, 1.0)
    found.add_carriers(0, torch.tensor(3), 100)
    expected += operand_sums(x, quantized) + carrier_sums(torch.tensor([3]), torch.tensor([100]))
    torch.testing.assert_close(found.take(), expected, rtol=1e-14, atol=0)


def test_carriers_of_a_place_are_summed() -> None:
    """More than wait at a time; a place occurs in several of them."""
    found, expected = Tally(3, CPU), torch.zeros(3, WIDTH, dtype=torch.float64)
    for number in range(2 * MOST_CARRIERS + 5):
        rounded, elements = number % 7, 1000 + number
        found.add_carriers(number % 3, torch.tensor(rounded, dtype=torch.int32), elements)
        of_one = carrier_sums(torch.tensor([rounded]), torch.tensor([elements]))
        expected[number % 3] += of_one[0]
    assert torch.equal(found.take(), expected) and expected.count_nonzero() == 6
    assert found.take().count_nonzero() == 0  # it has begun anew
