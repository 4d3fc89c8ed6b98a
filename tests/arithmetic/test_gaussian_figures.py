"""The quantizers' known figures on i.i.d. Gaussian data: clip rates, gain, errors.

Each figure is a mean over independent blocks, so its standard error comes from the sample of block
means itself; a figure passes within five standard errors plus half a unit of the last digit in
which the target is stated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_fp4 import Quantizer, quantize
from testing.oracles import normal

ELEMENTS = 1 << 20
WIDTH = 1024


@dataclass(frozen=True)
class Figure:
    """A mean over blocks with its standard error."""

    mean: float
    error: float

    def agrees(self, target: float, digit: float) -> bool:
        """digit: the last digit's unit in which the target is stated."""
        return abs(self.mean - target) <= 5 * self.error + digit / 2


def figure(per_block: Tensor) -> Figure:
    n = per_block.numel()
    return Figure(float(per_block.mean()), float(per_block.std() / math.sqrt(n)))


@cache
def gaussian() -> Tensor:
    return normal((ELEMENTS // WIDTH, WIDTH), 77)


@dataclass(frozen=True)
class Measured:
    clipped: Figure  # share of the elements beyond 6
    blocks: Figure  # share of blocks that clip
    gain: Figure  # <q, x> / <x, x>
    mse: Figure  # relative to E[x^2]


@cache
def measure(quantizer: Quantizer | str) -> Measured:
    """Figures of one quantizer; a prescale is undone first. The ratio's standard error is that of
    its linearisation."""
    x = gaussian()
    q = quantize(x, quantizer, seed=5)
    width, prescale = q.quantizer.block[1], q.quantizer.prescale
    decoded = q.dequantize(torch.float64) / prescale
    beyond = (q.grid_coordinates(x).abs() > 6 * (1 + 1e-6)).view(-1, width).double()
    wide = x.double()
    xx, qx, off = (
        t.view(-1, width).sum(1) for t in (wide**2, decoded * wide, (decoded - wide) ** 2)
    )
    power = xx.mean()
    gain, mse = qx.mean() / power, off.mean() / power
    return Measured(
        clipped=figure(beyond.mean(1)),
        blocks=figure(beyond.amax(1)),
        gain=Figure(float(gain), figure((qx - gain * xx) / power).error),
        mse=Figure(float(mse), figure((off - mse * xx) / power).error),
    )


FLOOR_SR, CEIL_SR = Quantizer(rounding="stochastic"), Quantizer(rule="ceil", rounding="stochastic")
THREE_QUARTERS = Quantizer(rounding="stochastic", prescale=3 / 4)
THREE_QUARTERS_NEAREST = Quantizer(prescale=3 / 4)
MSE = Quantizer(rule="mse")


def test_ocp_floor_clips() -> None:
    found = measure(FLOOR_SR)
    assert found.clipped.agrees(0.0233, 1e-4)
    assert found.blocks.agrees(0.295, 1e-3)
    assert found.gain.agrees(0.9895, 1e-4)


@pytest.mark.parametrize(
    "quantizer",
    [CEIL_SR, THREE_QUARTERS, "nvfp4-17-16-sr"],
    ids=["tetrajet-ceil", "three-quarters", "nvfp4-17-16"],
)
def test_unclipped_stochastic_rounding_is_unbiased(quantizer: Quantizer | str) -> None:
    found = measure(quantizer)
    assert found.clipped.mean == 0
    assert abs(found.gain.mean - 1) < 5 * found.gain.error
    assert 10 * found.gain.error < 1 - 0.9959  # fine enough to tell plain NVFP4 apart


@pytest.mark.parametrize("quantizer", [FLOOR_SR, "nvfp4-sr"], ids=["ocp-floor", "nvfp4"])
def test_clipping_biases_stochastic_rounding(quantizer: Quantizer | str) -> None:
    """Negative control: the same check of the gain fails where values lie beyond 6."""
    found = measure(quantizer)
    assert abs(found.gain.mean - 1) > 5 * found.gain.error


@pytest.mark.parametrize(
    ("quantizer", "target", "digit"),
    [
        (FLOOR_SR, 0.0253, 1e-4),
        (CEIL_SR, 0.0271, 1e-4),
        (THREE_QUARTERS, 0.0282, 1e-4),
        ("mxfp4", 0.01325, 1e-5),
        ("mxfp4-ceil", 0.01334, 1e-5),
        (THREE_QUARTERS_NEAREST, 0.01388, 1e-5),
        (MSE, 0.0125, 1e-4),
        (replace(MSE, block=(1, 16)), 0.0121, 1e-4),
        (replace(MSE, block=(1, 16), row_max=1.0), 0.0120, 1e-4),
    ],
    ids=[
        "floor-sr", "ceil-sr", "three-quarters-sr", "floor", "ceil", "three-quarters",
        "mse", "mse-16", "mse-16-rows",
    ],
)  # fmt: skip
def test_mx_errors(quantizer: Quantizer | str, target: float, digit: float) -> None:
    assert measure(quantizer).mse.agrees(target, digit)


# NVFP4's figures move in the third digit with the tensor scale, that is with the tensor's maximum.
@pytest.mark.parametrize(
    ("quantizer", "target", "digit"),
    [
        ("nvfp4-sr", 0.0189, 2e-4),
        ("nvfp4", 0.00908, 2e-4),
        ("nvfp4-17-16-sr", 0.0235, 2e-4),
        ("nvfp4-17-16", 0.0106, 2e-4),
        ("nvfp4-four-over-six", 0.00761, 2e-4),
    ],
)
def test_nvfp4_errors(quantizer: str, target: float, digit: float) -> None:
    assert measure(quantizer).mse.agrees(target, digit)


def test_nvfp4_clips() -> None:
    found = measure("nvfp4-sr")
    assert found.clipped.agrees(0.035, 1e-3)
    assert found.gain.agrees(0.9959, 2e-4)


def test_targets_tell_the_schemes_apart() -> None:
    """Negative control: schemes fail each other's check."""
    assert not measure(CEIL_SR).mse.agrees(0.0253, 1e-4)
    assert not measure(FLOOR_SR).mse.agrees(0.0271, 1e-4)
    assert not measure(THREE_QUARTERS).mse.agrees(0.0271, 1e-4)
    assert not measure(THREE_QUARTERS_NEAREST).mse.agrees(0.01334, 1e-5)
    assert not measure("mxfp4").mse.agrees(0.0125, 1e-4)
    assert not measure("mxfp4-ceil").mse.agrees(0.0125, 1e-4)


@pytest.mark.parametrize(("scale", "tensor_max"), [("e4m3", 256.0), ("ue5m3", 32768.0)])
def test_a_scale_rounded_up_clips_nothing(scale: Any, tensor_max: float) -> None:
    up = Quantizer(scale=scale, block=(1, 16), rule="up", tensor_max=tensor_max)
    found = measure(replace(up, rounding="stochastic"))
    assert found.clipped.mean == 0 and abs(found.gain.mean - 1) < 5 * found.gain.error


def test_ue5m3_scales_rounded_to_nearest_clip() -> None:
    """The mantissa is E4M3's, and so is the share of elements that are clipped."""
    nearest = Quantizer(scale="ue5m3", block=(1, 16), rule="nearest", tensor_max=32768.0)
    found = measure(replace(nearest, rounding="stochastic"))
    assert found.clipped.agrees(0.035, 1e-3)
    assert abs(found.gain.mean - 1) > 5 * found.gain.error
