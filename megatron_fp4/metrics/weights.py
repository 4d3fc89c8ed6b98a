"""Statistics of a weight W and its quantized value Q(W) over time, as TetraJet defines them.

"Oscillation-Reduced MXFP4 Training for Vision Transformers" (arXiv 2502.20853), section 4.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from megatron_fp4.arithmetic.formats import Fp4, table
from megatron_fp4.arithmetic.philox import stream_id
from megatron_fp4.arithmetic.quantized_tensor import QuantizedTensor
from megatron_fp4.metrics.ratios import ratio

SAMPLE = 8  # rows of each weight that are followed from step to step
BINS = 10  # of the histogram of confidences
OSCILLATING = 16  # an element oscillates if its R_w is above this
WINDOW = 200  # steps at most over which changes are summed: those of the paper's R_w
CONFIDENCE_WIDTH = 2 + BINS
CHANGE_WIDTH = 4  # sums for each step
OSCILLATION_WIDTH = 3
_EPSILON = 1e-8


def reports_in_window(interval: int) -> int:
    """How many reports the steps of a window belong to: 2 if these are no more than WINDOW steps,
    so that an interval of 100 has the paper's window, else 1. interval: steps between reports."""
    return 2 if 2 * interval <= WINDOW else 1


def window(interval: int) -> int:
    """The number of steps over which changes are summed. interval: steps between reports."""
    return min(WINDOW, reports_in_window(interval) * interval)


def sample_rows(name: str, rows: int) -> list[int]:
    """The rows of a weight that are followed, in ascending order; all of them if they are few.

    name: the global name of its linear. rows: how many the unsharded weight has. One row is taken
    from each of SAMPLE equal ranges, so that all layouts follow the same rows.
    """
    if rows <= SAMPLE:
        return list(range(rows))
    starts = [i * rows // SAMPLE for i in range(SAMPLE + 1)]
    return [
        start + stream_id(f"{name}:row{i}") % (end - start)
        for i, (start, end) in enumerate(zip(starts, starts[1:], strict=False))
    ]


def confidence_sums(w: Tensor, quantized: QuantizedTensor) -> Tensor:
    """float64 [CONFIDENCE_WIDTH]: the number of elements of W, the sum of their QuantConf, and a
    histogram of it in BINS bins over [0, 1].

    QuantConf = min_i |w/S - threshold_i| / (the largest distance for the same code), with the
    thresholds of rounding to nearest. Magnitudes that are clipped count as the largest element. W
    is quantized to 4-bit elements; those of blocks whose scale is zero or NaN are left out.
    """
    form = quantized.quantizer.format
    assert isinstance(form, Fp4)
    scaled = quantized.grid_coordinates(w).double().abs().flatten()
    counted = scaled.isfinite()
    scaled = torch.where(counted, scaled, 0).clamp(max=form.max)
    thresholds = table(_thresholds(form), torch.float64, w.device)
    upper = torch.bucketize(scaled, thresholds)
    low, high = thresholds[upper - 1], thresholds[upper]
    confidence = torch.minimum(scaled - low, high - scaled) / ((high - low) / 2)
    bins = (confidence * BINS).long().clamp(max=BINS - 1)
    ones = counted.double()
    histogram = ones.new_zeros(BINS).index_add_(0, bins, ones)
    return torch.cat((torch.stack((ones.sum(), (confidence * ones).sum())), histogram))


@cache
def _thresholds(form: Fp4) -> tuple[float, ...]:
    """Between which two values each magnitude of the grid is the nearest: magnitude i between
    numbers i and i + 1 of the result. They are the midpoints between neighbours.

    0 and the largest magnitude have a neighbour on one side alone. On the other side the threshold
    is as far away, so that QuantConf is 1 at 0 and at the largest magnitude.
    """
    grid = form.magnitudes
    middles = [(low + high) / 2 for low, high in zip(grid, grid[1:], strict=False)]
    return (-middles[0], *middles, 2 * form.max - middles[-1])


class Changes:
    """Follows several weights, or rows of them, and their quantized values from step to step.

    Keeps 24 bytes for each element, and 16 more for each earlier report of a window. All elements
    are in one vector, since each step would launch many kernels for many small tensors.
    """

    def __init__(self, reports: int = 1) -> None:
        """reports: the calls of `take` whose steps are summed; see `reports_in_window`."""
        # The paths and steps of the calls of `take` before, as far as the window goes back.
        self._earlier: deque[tuple[Tensor, list[Tensor]]] = deque(maxlen=reports - 1)
        self._sizes: list[int] = []  # of W's samples and then of Q(W)'s, in elements
        self._last: Tensor | None = None  # the samples, float32
        self._paths: Tensor | None = None  # of the same elements the sums |dW|, |dQ(W)|, float64
        self._steps: list[Tensor] = []

    @property
    def follows(self) -> bool:
        """Whether it has taken a sample."""
        return self._last is not None

    def update(self, weights: list[Tensor], quantized: list[Tensor]) -> None:
        """Takes the values of the next step, which are copied.

        weights, quantized: W and Q(W) of each weight, of the same shapes in each step, of floats
        that float32 can represent.
        """
        each = [part.detach().flatten() for part in (*weights, *quantized)]
        now = torch.cat([part.float() for part in each])
        if self._last is None or self._paths is None:
            self._sizes = [len(part) for part in each]
            self._paths = torch.zeros_like(now, dtype=torch.float64)
        else:
            last = self._last.double()
            changes = now.double() - last
            parts = (*changes.split(self._sizes), *last.split(self._sizes))
            norms = torch.stack(torch._foreach_norm(parts))
            self._steps.append(norms.view(CHANGE_WIDTH, -1).square())
            self._paths += changes.abs_()
        self._last = now

    def take(self) -> tuple[Tensor, Tensor]:
        """(changes, oscillation) of each weight over the steps of the window, in float64: those
        since the last call or, of several reports, since an earlier one.

        changes: [weights, steps, CHANGE_WIDTH]: for each step the sums of dW^2, dQ(W)^2, and of W^2
        and Q(W)^2 before it. oscillation: [weights, OSCILLATION_WIDTH]: the number of elements, the
        sum of their R_w, and how many have an R_w above OSCILLATING;
        R_w = sum |dQ(W)| / (sum |dW| + 1e-8) over the steps.
        """
        assert self._paths is not None
        of_window = [*self._earlier, (self._paths, self._steps)]
        summed = torch.stack([paths for paths, _ in of_window]).sum(0)
        steps = [step for _, steps in of_window for step in steps]
        paths, weights = summed.split(self._sizes), len(self._sizes) // 2
        oscillation = [
            _oscillation(path, quantized)
            for path, quantized in zip(paths[:weights], paths[weights:], strict=True)
        ]
        changes = torch.stack(steps).permute(2, 0, 1) if steps else None
        found = torch.stack(oscillation)
        if changes is None:
            changes = found.new_zeros(weights, 0, CHANGE_WIDTH)
        self._earlier.append((self._paths, self._steps))
        self._paths, self._steps = torch.zeros_like(self._paths), []
        return changes, found


def _oscillation(path: Tensor, quantized: Tensor) -> Tensor:
    rates = quantized / (path + _EPSILON)
    count = torch.full_like(rates.sum(), rates.numel())
    return torch.stack((count, rates.sum(), (rates > OSCILLATING).sum().double()))


def confidence_metrics(sums: Sequence[float]) -> dict[str, Any]:
    """confidence: the mean QuantConf; confidences: its histogram over [0, 1]. {} of no elements."""
    count, total, *counts = sums
    if not count:
        return {}
    bins = {"first": 0.0, "width": 1 / BINS, "counts": [round(n) for n in counts]}
    return {"confidence": ratio(total, count), "confidences": bins}


def change_metrics(steps: Sequence[Sequence[float]]) -> dict[str, Any]:
    """r: the mean over the steps of r(W) = ||W_t - W_{t-1}|| / ||W_{t-1}||; r_quantized: of r(W_Q).

    steps: `Changes.take`'s changes of one weight. {} without steps.
    """
    if not steps:
        return {}
    rates = [(ratio(dw, w), ratio(dq, q)) for dw, dq, w, q in steps]
    return {
        "r": _mean_root([r for r, _ in rates]),
        "r_quantized": _mean_root([r for _, r in rates]),
    }


def oscillation_metrics(sums: Sequence[float]) -> dict[str, Any]:
    """oscillation: the mean R_w; oscillating: the share of elements with R_w > OSCILLATING."""
    count, total, above = sums
    return {"oscillation": ratio(total, count), "oscillating": ratio(above, count)}


def _mean_root(squares: list[float | None]) -> float | None:
    roots = [square**0.5 for square in squares if square is not None]
    return sum(roots) / len(roots) if roots else None
