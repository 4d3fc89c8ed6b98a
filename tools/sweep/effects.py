"""What each value of an axis does: differences of combinations of one line."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tools.sweep.axes import AXES, Combination
from tools.sweep.promotion import Line


@dataclass(frozen=True)
class Effect:
    """A value of an axis against another.

    differences: of the scores, one for each line that has both; below 0 the value is the better
    one.
    """

    axis: str
    value: str
    against: str
    differences: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.differences)

    @property
    def quartiles(self) -> tuple[float, float]:
        """Between which the middle half of the differences lies; NaN of a single one."""
        if len(self.differences) == 1:
            return math.nan, math.nan
        low, _, high = statistics.quantiles(self.differences, n=4, method="inclusive")
        return low, high


def effects(scores: Mapping[Combination, float], lines: Iterable[Line]) -> list[Effect]:
    """The effects of all values of all axes, in their order, on these lines.

    In each line a value is compared with the axis's first value, or the first that the line has:
    rules of one format of scales are not compared with those of another.
    """
    found: dict[tuple[str, str, str], list[float]] = {}
    for each in lines:
        present = {v: scores[c] for v, c in each.combinations.items() if c in scores}
        against = next(iter(present), "")
        for value, score in present.items():
            if value != against:
                differences = found.setdefault((each.axis, value, against), [])
                differences.append(score - present[against])
    return [Effect(*key, found[key]) for key in sorted(found, key=_order)]


def _order(key: tuple[str, str, str]) -> tuple[int, int, int]:
    axis, value, against = key
    values = AXES[axis]
    return list(AXES).index(axis), values.index(value), values.index(against)
