"""What the choice on one axis does to a score, all other choices being the same.

It is read off lines (`axes.line`): combinations that differ on one axis alone.
"""

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
    """What each value of each axis changes, in the order of AXES.

    scores: of combinations; those that have none are left out. lines: each gives one difference for
    each of its values but the first, to which the others are compared. The first value of a line is
    that of its axis if the line has it. A line of rules for E4M3 scales, say, has none of E8M0's.
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
