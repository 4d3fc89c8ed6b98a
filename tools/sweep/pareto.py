"""Accuracy against overhead: what a combination needs in time, and which are on the frontier."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_fp4.errors import ConfigError
from megatron_fp4.estimate.overhead import DEVICES, setting_of, with_kernels
from tools.sweep.axes import Combination, without_training
from tools.sweep.building import recipe_of

INPUTS, OUTPUTS, TOKENS = 4096, 14336, 8192  # of the linear whose time is estimated
BEST, FASTER = 4, 2  # combinations to train with fresh seeds


@dataclass(frozen=True)
class Point:
    """A combination with its score and its time by device, as multiples of BF16's."""

    combination: Combination
    score: float
    times: dict[str, float]


def points(scores: Mapping[Combination, float]) -> list[Point]:
    """Each combination with the estimated time of a linear of INPUTS x OUTPUTS and TOKENS, if each
    of its techniques had a kernel (`estimate.overhead.with_kernels`). The best score is first."""
    found = [Point(each, score, times(each)) for each, score in scores.items()]
    return sorted(found, key=lambda point: (point.score, point.combination.key))


def times(combination: Combination) -> dict[str, float]:
    """The time of a linear by device, as multiples of BF16's."""
    recipe = recipe_of(without_training(combination))
    found = {}
    for device, gpu in DEVICES.items():
        setting = setting_of(gpu, INPUTS, OUTPUTS, TOKENS)
        found[device] = with_kernels(recipe, setting, gpu).times_bf16
    return found


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

    size = (4.2 * len(DEVICES), 3.6)
    figure, panels = plt.subplots(1, len(DEVICES), figsize=size, layout="constrained", sharey=True)
    for device, axes in zip(DEVICES, panels, strict=True):
        for fp4, color in ((True, "#4c72b0"), (False, "#b0b0b0")):
            own = [p for p in every if (p.combination.forward == "fp4") == fp4]
            label = "fprop in FP4" if fp4 else "fprop in BF16"
            axes.plot(
                *([p.times[device] for p in own], [p.score for p in own]),
                *("o",), color=color, markersize=3, alpha=0.6, label=label,
            )  # fmt: skip
        best = frontier(every, device)
        axes.step(
            *([p.times[device] for p in best], [p.score for p in best]),
            *("-",), where="post", color="#dd5533", linewidth=1.2, label="the frontier",
        )  # fmt: skip
        axes.set_title(device if device == "hopper" else f"{device}, not measured", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    panels[0].set(ylabel=what)
    panels[0].legend(frameon=False)
    figure.supxlabel("estimated time of a linear, in times of BF16's", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})  # the same results make the same file
    plt.close(figure)
