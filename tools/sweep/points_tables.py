"""Tables of points: the best ones, the frontiers, and a paper's best trade beside the frontiers."""

from __future__ import annotations

import math

from scipy.stats import t as student

from megatron_fp4.estimate.overhead import DEVICES
from tools.pages import table
from tools.sweep import factorial
from tools.sweep.agreement import CONFIDENCE
from tools.sweep.pareto import TODAY, Point, better, frontier, of_all_gemms

BEST = 10  # combinations of a table of the best
TIMES = [*(f"time, {device}" for device in DEVICES), f"as it runs today, {TODAY}"]
TRADE = factorial.TENSOR | factorial.STOCHASTIC | factorial.HADAMARD  # that of the paper


def points_section(every: list[Point], stage: str) -> list[list[str]]:
    """The tables of a stage's points, each after a line that says what it has."""
    best = f"The best {BEST} of `{stage}` that quantize all three GEMMs; times by the cost model:"
    parts = [[best], points_table(of_all_gemms(every)[:BEST])]
    for device in DEVICES:
        what = f"No combination is better in `{stage}` and needs less time on {device} than these"
        parts += [[f"{what}, by the cost model:"], points_table(frontier(every, device))]
    if found := trade_table(every):
        what = "a tensor scale, stochastic rounding of dY and a Hadamard transform"
        told = "the numbers of the points of each frontier that are better in score and time"
        parts += [[f"The combinations of the factorial with {what}, and {told}:"], found]
    return parts


def points_table(found: list[Point]) -> list[str]:
    """A line for each point, with its number in the picture if the points are a frontier."""
    lines = [[str(number), *_cells(point)] for number, point in enumerate(found, start=1)]
    return table(["number", "score", *TIMES, "combination"], lines)


def _cells(point: Point) -> list[str]:
    error = "" if point.error is None else f" ± {point.error:.4f}"
    times = [f"{each:.2f}" for each in (*point.times.values(), point.today)]
    return [f"{point.score:+.4f}{error}", *times, f"`{point.combination}`"]


def trade_table(every: list[Point]) -> list[str]:
    """A line for each point of `traded`, with the numbers of the points of each frontier that are
    better in both score and time, and for each device whether it is a best trade. No lines if there
    is none."""
    lines, fronts = [], {device: frontier(every, device) for device in DEVICES}
    for point in traded(every):
        numbers = [_numbers(point, best, device) for device, best in fronts.items()]
        verdicts = [_verdict(point, best, device) for device, best in fronts.items()]
        lines.append([*_cells(point), *numbers, *verdicts])
    head = [f"{what} on {device}" for what in ("better", "a best trade") for device in DEVICES]
    return table(["score", *TIMES, "combination", *head], lines) if lines else []


def traded(every: list[Point]) -> list[Point]:
    """The points of the factorial that have all of TRADE."""
    own = set(factorial.combinations())
    return [
        point
        for point in every
        if point.combination in own
        and all(getattr(point.combination, axis) == value for axis, value in TRADE.items())
    ]


def _numbers(point: Point, best: list[Point], device: str) -> str:
    """Which points of the frontier `best` are better than the point, by their numbers."""
    if point in best:
        return f"it is number {best.index(point) + 1}"
    return ", ".join(str(best.index(each) + 1) for each in better(point, best, device))


def _verdict(point: Point, best: list[Point], device: str) -> str:
    """Whether a point is a best trade of score and time on the device.

    best: the frontier. Returns "yes" for a point of the frontier; "no" if a point of the frontier
    needs less time and has a lower score, by a difference that is `certain`; otherwise
    "not decided".
    """
    if point in best:
        return "yes"
    worse = (certain(point, each) for each in better(point, best, device))
    return "no" if any(worse) else "not decided"


def certain(point: Point, other: Point) -> bool:
    """Whether the scores of two points differ by more than Student's interval of 95%.

    Each standard error has one degree of freedom less than there are seeds. The difference has
    those of both, since the scores of both points are taken to spread alike over seeds. Without
    standard errors nothing is certain.
    """
    errors = [each.error for each in (point, other) if each.error is not None]
    if len(errors) < 2:
        return False
    freedom = point.seeds + other.seeds - 2
    quantile = float(student.ppf((1 + CONFIDENCE) / 2, freedom))
    return abs(point.score - other.score) > quantile * math.hypot(*errors)
