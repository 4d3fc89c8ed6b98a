"""Scales of rows beside block scales, and float32 scales of blocks within a row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_fp4 import Quantizer, quantize
from megatron_fp4.arithmetic import formats
from megatron_fp4.arithmetic.quantize import largest_magnitudes, quantize_matrix
from testing.oracles import fp4_code, normal

ROWS: dict[str, dict] = {
    "e8m0-floor": {"rule": "floor", "row_max": 1.0},
    "e8m0-ceil": {"rule": "ceil", "row_max": 4.0},
    "e8m0-mse": {"rule": "mse", "row_max": 1.0, "block": (1, 16)},
    "e4m3": {"scale": "e4m3", "rule": "nearest", "row_max": 448.0, "block": (1, 16)},
    "ue5m3": {"scale": "ue5m3", "rule": "up", "row_max": 32768.0, "block": (1, 16)},
}


def spread_rows(rows: int = 48, columns: int = 128) -> Tensor:
    """Rows of many sizes, among them one of zeros and one of subnormal numbers."""
    x = normal((rows, columns), 8) * normal((rows, 1), 9).mul(12).exp2()
    x[3], x[4] = 0.0, normal((columns,), 10) * 2.0**-140
    return x.float()


@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_quantized_as_it_is_by_itself_over_its_scale(name: str) -> None:
    """The row's scale is its largest magnitude over 6 row_max; what is left is the plain format."""
    fields, x = ROWS[name], spread_rows()
    q = quantize(x, Quantizer(**fields))
    largest = np.abs(x.numpy()).max(1, keepdims=True)
    scale = largest / np.float32(6 * fields["row_max"])
    scale = np.where(scale > 0, scale, np.float32(1))
    assert q.tensor_scale is not None and q.tensor_scale.dtype == torch.float32
    assert np.array_equal(q.tensor_scale.numpy(), scale)
    for i, row in enumerate(x):
        if fields.get("scale", "e8m0") == "e8m0":
            limit = np.float32(6 * fields["row_max"])
            divided = np.clip(row.numpy() / scale[i], -limit, limit)
            plain = quantize(
                torch.from_numpy(divided)[None], Quantizer(**fields | {"row_max": 0.0})
            )
        else:  # a tensor of one row
            whole = {"row_max": 0.0, "tensor_max": fields["row_max"]}
            plain = quantize(row[None], Quantizer(**fields | whole))
        assert torch.equal(q.codes[i], plain.codes[0]) and torch.equal(q.scales[i], plain.scales[0])
    decoded = q.elements(torch.float64) * q.block_scales(torch.float64).repeat_interleave(
        q.quantizer.block[1], 1
    )
    assert torch.equal(q.dequantize(torch.float64), decoded * q.tensor_scale.double())


@pytest.mark.parametrize("rule", ["floor", "ceil", "nearest", "mse"])
def test_the_largest_of_a_row_is_on_top_of_the_grid(rule: Any) -> None:
    """It is not clipped, and decodes to itself to within the row scale's rounding; without a row
    scale it does not."""
    x = normal((256, 64), 12) * normal((256, 1), 13).exp()
    at = x.abs().argmax(1, keepdim=True)
    largest = x.gather(1, at).double()

    def error(row_max: float) -> Tensor:
        q = quantize(x, Quantizer(rule=rule, row_max=row_max))
        return (q.dequantize(torch.float64).gather(1, at) / largest - 1).abs()

    assert float(error(1.0).max()) < 2.0**-23
    assert float(error(0.0).max()) > 0.1
    q = quantize(x, Quantizer(rule="ceil", row_max=1.0))
    assert q.scales.amax(1).unique().tolist() == [127]  # the scale 1: nothing is above 6


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("name", ROWS)
def test_ranks_that_share_rows_agree_on_their_scales(name: str, axis: int) -> None:
    """A blocked axis that is sharded: with the maximum of both parts each has the whole's codes."""
    quantizer, x = Quantizer(**ROWS[name]), spread_rows(64, 64)
    whole, parts = quantize(x, quantizer, axis=axis), x.chunk(2, axis)
    assert quantizer.scale_spans(axis, axis) and not quantizer.scale_spans(1 - axis, axis)
    largest = torch.stack([largest_magnitudes(part, quantizer, axis) for part in parts]).amax(0)
    assert largest.shape == (64, 1)
    found = [quantize_matrix(part, quantizer, axis=axis, largest=largest) for part in parts]
    assert torch.equal(torch.cat([q.codes for q in found], 1), whole.codes)
    assert torch.equal(torch.cat([q.scales for q in found], 1), whole.scales)
    alone = [quantize_matrix(part, quantizer, axis=axis) for part in parts]  # the control
    assert not torch.equal(torch.cat([q.scales for q in alone], 1), whole.scales) or not (
        torch.equal(torch.cat([q.codes for q in alone], 1), whole.codes)
    )


def test_a_nan_leaves_the_rest_of_its_row() -> None:
    x = spread_rows()
    x[7, 40], x[8, 0] = torch.nan, torch.inf
    for fields in ROWS.values():
        q = quantize(x, Quantizer(**fields))
        lost = q.dequantize().isnan().view(len(x), -1, q.quantizer.block[1])
        assert lost.any(2).sum() == 2 == lost.all(2).sum()
        assert q.tensor_scale is not None and q.tensor_scale.isfinite().all()


@pytest.mark.parametrize("block", [(1, 16), (1, 32), (4, 16)])
def test_float32_scales_within_a_row(block: tuple[int, int]) -> None:
    x = spread_rows(48, 96)
    q = quantize(x, Quantizer(scale="fp32", block=block, rule="absmax"))
    assert q.scales.dtype == torch.float32
    height, length = block
    for i in range(0, 48, height):
        for j in range(0, 96, length):
            part = x[i : i + height, j : j + length].numpy()
            maximum = np.abs(part).max()
            with np.errstate(over="ignore", divide="ignore"):
                factor = np.minimum(np.float32(6) / maximum, np.finfo(np.float32).max)
            factor = np.float32(1) if maximum == 0 else factor
            row = i // height
            scales = q.scales.reshape(48 // height, -1)
            assert scales[row, j // length].item() == factor
            codes = [[fp4_code(float(v * factor)) for v in line] for line in part]
            found = formats.unpack(q.codes)[i : i + height, j : j + length]
            assert found.tolist() == codes
            values = formats.E2M1.decode(found, torch.float32).numpy() / factor
            assert np.array_equal(q.dequantize()[i : i + height, j : j + length].numpy(), values)
