"""Accuracy against overhead: what a combination needs in time, and which are on the frontier."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_fp4.errors import ConfigError
from megatron_fp4.estimate.overhead import DEVICES, as_it_runs, setting_of, with_kernels
from tools.sweep.axes import Combination, without_training
from tools.sweep.building import recipe_of

INPUTS, OUTPUTS, TOKENS = 4096, 14336, 8192  # of the linear whose time is estimated
BEST, FASTER = 4, 2  # combinations to train with fresh seeds
CUT = 0.15  # the highest score of the picture
TODAY = "hopper"  # the device on which what runs today is timed


@dataclass(frozen=True)
class Point:
    """A combination with its score, and its times as multiples of BF16's.

    times: by device, if each of its techniques had a kernel. today: on the device TODAY, as it runs
    today. error: the standard error of the score over seeds; None of a single seed. seeds: how many
    the score is the mean of.
    """

    combination: Combination
    score: float
    times: dict[str, float]
    today: float
    error: float | None = None
    seeds: int = 1


def points(
    scores: Mapping[Combination, float],
    errors: Mapping[Combination, float] | None = None,
    seeds: int = 1,
) -> list[Point]:
    """Each combination with the estimated times of a linear of INPUTS x OUTPUTS and TOKENS
    (`estimate.overhead`). The best score is first. errors: the standard errors of the scores over
    so many seeds."""
    found = [_point(each, score, (errors or {}).get(each), seeds) for each, score in scores.items()]
    return sorted(found, key=lambda point: (point.score, point.combination.key))


def _point(combination: Combination, score: float, error: float | None, seeds: int) -> Point:
    recipe, times = recipe_of(without_training(combination)), {}
    for device, gpu in DEVICES.items():
        setting = setting_of(gpu, INPUTS, OUTPUTS, TOKENS)
        times[device] = with_kernels(recipe, setting, gpu).times_bf16
        if device == TODAY:
            today = as_it_runs(recipe, setting, gpu).times_bf16
    return Point(combination, score, times, today, error, seeds)


def frontier(every: list[Point], device: str) -> list[Point]:
    """The points than which no other one has both a lower score and a shorter time on the device;
    the best score first."""
    kept: list[Point] = []
    for point in sorted(every, key=lambda point: (point.score, point.times[device])):
        if not kept or point.times[device] < kept[-1].times[device]:
            kept.append(point)
    return kept


def of_all_gemms(every: list[Point]) -> list[Point]:
    """The points of combinations that quantize all three GEMMs."""
    return [p for p in every if p.combination.forward == p.combination.backward == "fp4"]


def to_confirm(every: list[Point]) -> list[Combination]:
    """The combinations to train with fresh seeds: of those that quantize all three GEMMs the BEST
    first, and the FASTER first of those that take less time than BF16 on Hopper."""
    own = of_all_gemms(every)
    faster = [point for point in own if point.times["hopper"] < 1]
    return list(dict.fromkeys(point.combination for point in own[:BEST] + faster[:FASTER]))


def better(point: Point, every: list[Point], device: str) -> list[Point]:
    """The points with both a lower score and a shorter time on the device; none for a point of the
    frontier."""
    return [
        each
        for each in every
        if each.score < point.score and each.times[device] < point.times[device]
    ]


def draw(every: list[Point], what: str, path: Path) -> None:
    """Draws scores over times, a panel for each device, as SVG. what: the score, in words.

    Raises ConfigError if matplotlib is missing.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("the picture needs matplotlib: pip install matplotlib")
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.hashsalt": "sweep", "svg.fonttype": "none", "font.size": 9}
    import matplotlib.pyplot as plt

    size = (4.8 * len(DEVICES), 5.6)
    figure, panels = plt.subplots(1, len(DEVICES), figsize=size, layout="constrained", sharey=True)
    for device, axes in zip(DEVICES, panels, strict=True):
        _draw_points(axes, every, device)
        _draw_frontier(axes, frontier(every, device), device)
        axes.set_title(device if device == "hopper" else f"{device}, not measured", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.margins(x=0.08)
    lowest = min(each.score - (each.error or 0) for each in every)
    panels[0].set(ylabel=what, ylim=(min(lowest, 0) - CUT / 30, CUT))
    panels[0].legend(frameon=False, loc="center right")
    told = (
        "time of a linear in times of BF16's, by the cost model, with a kernel for each technique"
    )
    figure.supxlabel(told, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})  # the same results make the same file
    plt.close(figure)


def _draw_points(axes: Any, every: list[Point], device: str) -> None:
    """All points; those whose score is CUT or higher are marked at the upper edge."""
    for fp4, color in ((True, "#4c72b0"), (False, "#b0b0b0")):
        own = [p for p in every if (p.combination.forward == "fp4") == fp4]
        near = [p for p in own if p.score < CUT]
        axes.plot(
            *([p.times[device] for p in near], [p.score for p in near], "o"),
            color=color, markersize=4, alpha=0.6, label=f"fprop in {'FP4' if fp4 else 'BF16'}",
        )  # fmt: skip
        beyond = [p.times[device] for p in own if p.score >= CUT]
        axes.plot(
            *(beyond, [CUT] * len(beyond), "^"),
            color=color, markersize=4, alpha=0.6, clip_on=False, in_layout=False,
        )  # fmt: skip
    scores = [p.score for p in every if p.score >= CUT]
    if scores:
        told = f"▲ {len(scores)} combinations at {min(scores):.2f} to {max(scores):.2f}"
        where = {"ha": "right", "va": "top", "transform": axes.transAxes}
        axes.text(0.99, 0.97, told, fontsize=8, in_layout=False, **where)


def _draw_frontier(axes: Any, best: list[Point], device: str) -> None:
    """Draws the frontier as a line of steps, with the standard error and the number of each point.

    best: the points of the frontier, from the best score, which takes the most time. The line shows
    the best score that is possible in each time. Numbers are those of the frontier's table. They
    stand to the left of the points, alternately near and far, so that they do not cover each other.
    """
    times, scores = [p.times[device] for p in best], [p.score for p in best]
    color = "#dd5533"
    axes.step(times, scores, "-", where="pre", color=color, linewidth=1.2, label="the frontier")
    errors = [p.error or 0.0 for p in best]
    axes.errorbar(times, scores, errors, fmt="o", color=color, markersize=3, capsize=2, linewidth=1)
    for number, (time, score) in enumerate(zip(times, scores, strict=True), start=1):
        axes.annotate(
            *(str(number), (time, score)), xytext=(-4 - 8 * (number % 2), 0), in_layout=False,
            textcoords="offset points", ha="right", va="center",
            color=color, fontsize=8, fontweight="bold",
        )  # fmt: skip
