"""Statistics of operands, against numpy in float64 that decodes codes and scales by itself."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_fp4 import list_quantizers, quantize
from megatron_fp4.arithmetic.quantized_tensor import QuantizedTensor
from megatron_fp4.arithmetic.quantizer import Quantizer, get_quantizer
from megatron_fp4.metrics.lines import rows_of
from megatron_fp4.metrics.operands import (
    WIDTH,
    carrier_sums,
    operand_metrics,
    operand_sums,
)
from testing.oracles import normal

GRIDS = {"e2m1": np.array([0.0, 0.5, 1, 1.5, 2, 3, 4, 6]), "e1m2": np.arange(8) / 4}
SQUARE = Quantizer(scale="e4m3", block=(16, 16), rule="nearest", tensor_max=448.0)
CASES = {name: get_quantizer(name) for name in list_quantizers()} | {
    "square": SQUARE,
    "tensor": Quantizer(scale="fp32", block=(0, 0), rule="absmax"),
    "prescaled": Quantizer(rule="floor", prescale=0.75),
    "ue5m3": Quantizer(scale="ue5m3", block=(1, 16), rule="nearest"),
    "e1m2": Quantizer(element="e1m2"),
    "e1m2-tensor": Quantizer(element="e1m2", scale="fp32", block=(0, 0), rule="absmax"),
}


def matrix(seed: int = 0) -> Tensor:
    """Gaussian, with outliers, zeros, a block of zeros and columns of different sizes."""
    x = normal((64, 96), seed) * torch.logspace(-3, 2, 96)
    x[::7, ::5] = 0
    x[3, 5] = 80
    x[16:32, 32:64] = 0
    return x.bfloat16()


def decoded(quantized: QuantizedTensor) -> tuple[np.ndarray, np.ndarray]:
    """(elements, the scale of each element), float64 [rows, K], by numpy."""
    packed = quantized.codes.numpy()
    codes = np.stack((packed & 15, packed >> 4), -1).reshape(packed.shape[0], -1)
    stored = quantized.scales
    if quantized.quantizer.scale == "e8m0":
        scales = np.ldexp(1.0, stored.numpy().astype(int) - 127)
    elif quantized.quantizer.scale == "fp32":
        scales = 1 / stored.double().numpy()
    elif quantized.quantizer.scale == "e4m3":
        scales = stored.view(torch.float8_e4m3fn).double().numpy()
    else:
        field, fraction = stored.numpy().astype(int) >> 3, stored.numpy() & 7
        scales = np.where(field, 8 + fraction, fraction) * np.ldexp(1.0, np.maximum(field, 1) - 18)
    if quantized.tensor_scale is not None:
        scales = scales * float(quantized.tensor_scale)
    rows, k = codes.shape
    scales = scales.reshape(-1, stored.shape[-1])
    across, along = rows // scales.shape[0], k // scales.shape[1]
    grid = GRIDS[quantized.quantizer.element]
    return np.concatenate((grid, -grid))[codes], scales.repeat(across, 0).repeat(along, 1)


def wanted(x: Tensor, quantized: QuantizedTensor) -> dict[str, Any]:
    """The metrics by numpy, from their definitions."""
    exact = x.movedim(quantized.axis, -1).double().numpy() * quantized.quantizer.prescale
    elements, scales = decoded(quantized)
    q, given = elements * scales, exact != 0
    _, smallest, *_, largest = GRIDS[quantized.quantizer.element]
    across, along = quantized.quantizer.block
    across, along = across or exact.shape[0], along or exact.shape[1]
    binades: Counter[int] = Counter()
    for row in range(0, exact.shape[0], across):
        for column in range(0, exact.shape[1], along):
            if given[row : row + across, column : column + along].any() and scales[row, column]:
                binades[math.floor(math.log2(scales[row, column]))] += 1
    first = min(binades)
    return {
        "zeros": (given & (q == 0)).sum() / given.sum(),
        "zeros_overall": (q == 0).mean(),
        "underflow": (given & (abs(exact) < smallest / 2 * scales)).sum() / given.sum(),
        # Scales in float32 can bring a largest element to 6 (1 + 2^-24) times its scale.
        "clipped": (abs(exact) > largest * scales * (1 + 1e-6)).mean(),
        "saturated": (abs(elements) == largest).mean(),
        "sqnr_db": 10 * math.log10((exact**2).sum() / ((q - exact) ** 2).sum()),
        "gain": (q * exact).sum() / (exact**2).sum(),
        "scales": {"first": first, "counts": [binades[e] for e in range(first, max(binades) + 1)]},
    }


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("name", CASES)
def test_the_metrics_are_those_of_numpy(name: str, axis: int) -> None:
    x = matrix()
    quantized = quantize(x, CASES[name], axis=axis, seed=7)
    found, expected = operand_metrics(operand_sums(x, quantized).tolist()), wanted(x, quantized)
    assert found.pop("scales") == expected.pop("scales")
    assert found == pytest.approx(expected, rel=1e-12, abs=0)


def test_what_clips_and_how_much_on_gaussian_numbers() -> None:
    """The figures of docs/numerics.md's scale rules: floor clips 2.33% of a Gaussian's elements
    and loses 1% of its size, ceil clips nothing."""
    x = normal((4096, 256), 1)
    found = {}
    for rule in ("floor", "ceil"):
        quantizer = Quantizer(rule=rule, rounding="stochastic")  # type: ignore[arg-type]
        sums = operand_sums(x, quantize(x, quantizer, seed=3))
        found[rule] = operand_metrics(sums.tolist())
    assert found["floor"]["clipped"] == pytest.approx(0.0233, abs=5e-4)
    assert found["floor"]["gain"] == pytest.approx(0.9895, abs=5e-4)
    assert found["ceil"]["clipped"] == 0
    assert found["ceil"]["gain"] == pytest.approx(1, abs=5e-4)
    assert found["floor"]["saturated"] > found["ceil"]["saturated"] > 0


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "square", "vector"])
def test_the_sums_of_shards_add_up(name: str) -> None:
    x = matrix()
    whole = quantize(x, CASES[name])
    cuts = torch.arange(64).split([16, 48])
    parts = [
        operand_sums(x[rows], _cut(whole, rows) if name == "square" else rows_of(whole, rows))
        for rows in cuts
    ]
    torch.testing.assert_close(parts[0] + parts[1], operand_sums(x, whole), rtol=1e-14, atol=0)
    # Negative control: a mean of the shards' metrics is another number.
    metrics = [operand_metrics(part.tolist()) for part in (*parts, parts[0] + parts[1])]
    mean = (metrics[0]["gain"] + metrics[1]["gain"]) / 2
    assert abs(mean - metrics[2]["gain"]) > 1e-4


def _cut(whole: QuantizedTensor, rows: Tensor) -> QuantizedTensor:
    blocks = slice(int(rows[0]) // 16, int(rows[-1]) // 16 + 1)
    shape = torch.Size((len(rows), whole.shape[1]))
    return replace(whole, codes=whole.codes[rows], scales=whole.scales[blocks], shape=shape)


def test_ranks_that_share_scales_count_each_once() -> None:
    x = matrix()
    whole = quantize(x, "vector")
    halves = [
        operand_sums(x[:, cut], replace(whole, codes=codes, shape=torch.Size((64, 48))), 0.5)
        for cut, codes in zip((slice(48), slice(48, 96)), whole.codes.chunk(2, 1), strict=True)
    ]
    assert (
        operand_metrics((halves[0] + halves[1]).tolist())["scales"]
        == (operand_metrics(operand_sums(x, whole).tolist())["scales"])
    )


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "vector", "square"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_block_with_a_nan_is_left_out(name: str, value: float) -> None:
    x = matrix()
    x[40, 40] = value
    quantized = quantize(x, CASES[name])
    bad = quantized.dequantize().isnan()
    metrics = operand_metrics(operand_sums(x, quantized).tolist())
    exact = x.double()[~bad]
    off = quantized.dequantize(torch.float64)[~bad] - exact
    assert bad.any() and metrics["sqnr_db"] == pytest.approx(
        10 * math.log10(exact.square().sum() / off.square().sum()), rel=1e-12
    )


def test_nothing_to_divide_by_is_none() -> None:
    zeros = torch.zeros(32, 64)
    metrics = operand_metrics(operand_sums(zeros, quantize(zeros, "mxfp4")).tolist())
    assert metrics["zeros_overall"] == 1 and metrics["clipped"] == 0
    assert metrics["zeros"] is metrics["gain"] is metrics["sqnr_db"] is None
    assert metrics["scales"] == {"first": 0, "counts": []}
    assert operand_metrics([0.0] * WIDTH)["saturated"] is None


def test_fp8_elements() -> None:
    x = matrix()
    quantizer = Quantizer(element="e5m2", scale="fp32", block=(1, 0), rule="absmax")
    quantized = quantize(x, quantizer)
    metrics = operand_metrics(operand_sums(x, quantized).tolist())
    largest = quantized.codes.view(torch.float8_e5m2).float().abs() == 57344
    assert metrics["saturated"] == largest.double().mean() > 0
    assert metrics["sqnr_db"] > 20 and metrics["clipped"] == 0


def test_carriers_are_counted_where_they_are_multiplied() -> None:
    x = matrix()
    sums = operand_sums(x, quantize(x, "mxfp4"))
    assert "outside_carrier" not in operand_metrics(sums.tolist())
    with_carriers = (
        sums + carrier_sums(torch.tensor([6], dtype=torch.int32), torch.tensor([600]))[0]
    )
    assert operand_metrics(with_carriers.tolist())["outside_carrier"] == 0.01
