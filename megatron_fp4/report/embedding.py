"""Runs as the JSON that the page contains.

Numbers of maps and histograms are little-endian float32 in base64: a browser decodes only what it
draws, so that a model of 100 layers with 1,000 points of time opens at once.
"""

from __future__ import annotations

import base64
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_fp4.report.layers import place
from megatron_fp4.report.reading import Histogram, Points, Run

MOST_STEPS = 1000  # of a map: a screen has few more columns
MOST_HISTOGRAMS = 100  # of a layer
_SERIES = ("loss", "grad_norm", "learning_rate", "tokens_per_second")


def embedded(runs: Sequence[Run]) -> dict[str, Any]:
    """The page's data.

    layers: the names of both runs' layers, in the order of the model; the runs' maps and histograms
    have indices into it. runs: see `_run`.
    """
    layers = sorted({name for run in runs for name in run.layers}, key=place)
    return {"layers": layers, "runs": [_run(run, layers) for run in runs]}


def _run(run: Run, layers: list[str]) -> dict[str, Any]:
    index = {name: number for number, name in enumerate(layers)}
    places = np.array([index[name] for name in run.layers], dtype=np.int64)
    steps = sorted(run.steps)
    evaluations = sorted(run.evaluations)
    return {
        "name": run.name,
        "unreadable": run.unreadable,
        "starts": [
            {**start, "changes": _changes(before, start)}
            for before, start in zip([None, *run.starts], run.starts, strict=False)
        ],
        "steps": {
            "step": steps,
            **{name: [run.steps[step][name] for step in steps] for name in _SERIES},
        },
        "evaluations": {
            "step": evaluations,
            "loss": [run.evaluations[step] for step in evaluations],
        },
        "maps": [
            {"group": group, "metric": metric, **_map(points, places)}
            for (group, metric), points in run.maps.items()
        ],
        "histograms": [
            {"group": group, "metric": metric, **_histograms(by_step, places)}
            for (group, metric), by_step in run.histograms.items()
        ],
        "warnings": list(run.warnings.values()),
    }


def _changes(before: dict[str, Any] | None, start: dict[str, Any]) -> list[str]:
    """What a start of the run changed of the start before it, a line for each value."""
    if before is None:
        return []
    changes = []
    for part in ("environment", "arguments"):
        old, new = before[part], start[part]
        changes += [
            f"{name}: {old.get(name, '(not set)')} → {new.get(name, '(not set)')}"
            for name in sorted(old.keys() | new.keys())
            if old.get(name) != new.get(name)
        ]
    return changes


def thinned(steps: Sequence[int], most: int) -> list[int]:
    """At most `most` of the steps, evenly spaced, the first and the last among them."""
    if len(steps) <= most:
        return list(steps)
    return [steps[round(i * (len(steps) - 1) / (most - 1))] for i in range(most)]


def _map(points: Points, places: np.ndarray) -> dict[str, Any]:
    """A metric by layer and step.

    layers: the indices of the rows. steps: the columns. all: how many steps the run has. values:
    float32 [rows, columns], NaN where there is none.
    """
    rows, row = np.unique(places[np.array(points.layers)], return_inverse=True)
    steps, column = np.unique(np.array(points.steps), return_inverse=True)
    values = np.full((len(rows), len(steps)), np.nan, dtype=np.float32)
    with np.errstate(over="ignore"):  # beyond float32 it is inf, which the page draws as missing
        values[row, column] = np.array(points.values)  # of equal places the last is assigned
    kept = thinned(steps.tolist(), MOST_STEPS)
    return {
        "layers": rows.tolist(),
        "steps": kept,
        "all": len(steps),
        "values": _base64(values[:, np.searchsorted(steps, kept)]),
    }


def _histograms(found: dict[tuple[int, int], Histogram], places: np.ndarray) -> dict[str, Any]:
    """Histograms of each layer over steps.

    width: of a bin. steps: those that are kept. all: how many steps the run has. layers: by index,
    with the beginning of the first bin, the number of bins, and the counts, float32 [steps, bins],
    NaN at steps without this layer.
    """
    width = next(iter(found.values())).width
    steps = sorted({step for _, step in found})
    kept = thinned(steps, MOST_HISTOGRAMS)
    by_layer: dict[int, dict[int, Histogram]] = {}
    for (layer, step), histogram in found.items():
        if histogram.width == width:
            by_layer.setdefault(int(places[layer]), {})[step] = histogram
    return {
        "width": width,
        "steps": kept,
        "all": len(steps),
        "layers": {layer: _layer(by_step, kept, width) for layer, by_step in by_layer.items()},
    }


def _layer(by_step: dict[int, Histogram], steps: list[int], width: float) -> dict[str, Any]:
    chosen = {step: by_step[step] for step in steps if step in by_step}
    first = min((one.first for one in chosen.values()), default=0.0)
    offsets = {step: round((one.first - first) / width) for step, one in chosen.items()}
    bins = max((offsets[step] + len(one.counts) for step, one in chosen.items()), default=0)
    counts = np.full((len(steps), bins), np.nan, dtype=np.float32)
    for row, step in enumerate(steps):
        if step in chosen:
            counts[row] = 0
            values: array[float] = chosen[step].counts
            counts[row, offsets[step] : offsets[step] + len(values)] = values
    return {"first": first, "bins": bins, "counts": _base64(counts)}


def _base64(values: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(values, dtype="<f4").tobytes()).decode()
