"""DGE against its published values, its definition and a numerical derivative."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_fp4 import ConfigError
from megatron_fp4.arithmetic.estimators import Estimator

# f' over linspace(-6, 6, 20) as BF16, k = 5, clip 3, from the authors' public code.
GOLDEN = [0.2002, 0.4375, 0.6055, 0.2168, 1.8359, 0.2695, 0.3027, 0.2695, 0.2402, 0.5781]
GRID = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def golden_gap(factor: Tensor) -> float:
    """The largest distance to the golden values in units of their BF16 spacing."""
    golden = torch.tensor(GOLDEN + GOLDEN[::-1], dtype=torch.float64)
    spacing = 2.0 ** (golden.log2().floor() - 7)
    return float(((factor.double() - golden).abs() / spacing).max())


def bf16_points() -> Tensor:
    return torch.linspace(-6, 6, 20).bfloat16()


def test_golden_values() -> None:
    assert golden_gap(Estimator().factor(bf16_points()).bfloat16()) <= 1


def test_golden_values_take_bf16_input() -> None:
    """In float32 the fifth is 2.1088: 15% from BF16's, beside the steepest point."""
    factor = Estimator().factor(torch.linspace(-6, 6, 20))
    assert float(factor[4]) == pytest.approx(2.1088, abs=1e-3)
    assert golden_gap(factor) > 1


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Estimator().factor(bf16_points()) * 5,
        lambda: Estimator(k=3.0).factor(bf16_points()),
        lambda: Estimator().factor(bf16_points() / 2),
        lambda: Estimator(clip=1.0).factor(bf16_points()),
    ],
    ids=["no-1-over-k", "other-k", "unscaled-weight", "other-clip"],
)
def test_known_mistakes_miss_the_golden_values(wrong) -> None:
    assert golden_gap(wrong().bfloat16()) > 1


def model(x: np.ndarray, k: float) -> np.ndarray:
    """f itself: on [lo, lo + d], lo + d/2 (1 + sign(u) |u|^(1/k)); odd around zero."""
    magnitude = np.abs(x)
    grid = np.array(GRID)
    i = np.clip(np.searchsorted(grid, magnitude, side="right") - 1, 0, 6)
    low, d = grid[i], grid[i + 1] - grid[i]
    u = 2 * (magnitude - low) / d - 1
    return np.sign(x) * (low + d / 2 * (1 + np.sign(u) * np.abs(u) ** (1 / k)))


@pytest.mark.parametrize("k", [3.0, 5.0, 10.0])
def test_numerical_derivative(k: float) -> None:
    """Central differences of f, away from the jumps in slope at grid points and from the clip."""
    x = np.random.default_rng(0).uniform(-5.9, 5.9, 20_000)
    grid = np.array(GRID)
    i = np.clip(np.searchsorted(grid, np.abs(x), side="right") - 1, 0, 6)
    u = 2 * (np.abs(x) - grid[i]) / (grid[i + 1] - grid[i]) - 1
    x = x[(np.abs(u) > 0.05) & (np.abs(u) < 0.999)]
    h = 1e-6
    slope = (model(x + h, k) - model(x - h, k)) / (2 * h)
    factor = Estimator(k=k, clip=1e9).factor(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(factor, slope, rtol=1e-6)


def test_clip_is_where_the_formula_exceeds_it() -> None:
    """At a tie of the grid |u| is 0 and f' infinite: the clip is what makes it a number."""
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert Estimator().factor(torch.cat((ties, -ties))).tolist() == [3.0] * 14
    unclipped = Estimator(clip=float("inf")).factor(ties)
    assert unclipped.isinf().all()  # negative control
    edge = (5 * 3.0) ** (1 / (1 / 5 - 1))  # |u| at which (1/k)|u|^(1/k - 1) is 3
    around = torch.tensor([0.25 + edge * 0.25 * f for f in (0.9, 1.1)], dtype=torch.float64)
    factor = Estimator().factor(around)
    assert factor[0] == 3.0 and 2.5 < float(factor[1]) < 3.0


def test_grid_points_have_slope_one_over_k() -> None:
    points = torch.tensor([g * s for g in GRID for s in (1, -1)], dtype=torch.float64)
    torch.testing.assert_close(
        Estimator().factor(points), torch.full((16,), 0.2, dtype=torch.float64)
    )


@pytest.mark.parametrize(("k", "mean"), [(3.0, 0.778), (5.0, 0.593), (10.0, 0.383)])
def test_mean_over_a_bin(k: float, mean: float) -> None:
    """By integration: 1/k of the bin lies within the clip, so the mean is 3 t + 1 - t^(1/k) with
    t the |u| at which the formula is 3; the published means follow."""
    t = (3 * k) ** (-k / (k - 1))
    exact = 3 * t + 1 - t ** (1 / k)
    assert exact == pytest.approx(mean, abs=5e-4)
    n = 1 << 20
    x = (torch.arange(n, dtype=torch.float64) + 0.5) / n / 2  # the bin [0, .5]
    assert float(Estimator(k=k).factor(x).mean()) == pytest.approx(exact, abs=1e-4)


@pytest.mark.parametrize(("beyond", "slope"), [("zero", 0.0), ("one", 1.0)])
def test_what_the_rounding_of_a_scale_puts_beyond_the_largest_is_not_clipped(
    beyond: Any, slope: float
) -> None:
    """A block's maximum, divided by a rounded scale, may be a few last bits above 6."""
    scaled = torch.tensor([6.0, 6 * (1 + 2.0**-20), 6 * (1 + 2.0**-16), 7.0])
    for sign in (1, -1):
        within = Estimator(beyond=beyond).factor(sign * scaled)
        assert within[:2].tolist() == pytest.approx([0.2, 0.2], abs=1e-5)  # 1 / k, as at 6
        assert within[2:].tolist() == [slope, slope]


@pytest.mark.parametrize(("k", "clip"), [(0.5, 3.0), (0.0, 3.0), (5.0, 0.0), (float("nan"), 3.0)])
def test_errors(k: float, clip: float) -> None:
    with pytest.raises(ConfigError):
        Estimator(k=k, clip=clip)
