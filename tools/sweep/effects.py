"""What each value of an axis does: differences of combinations that are alike on all other axes."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tools.sweep.axes import AXES, Combination, first


@dataclass(frozen=True)
class Effect:
    """A value of an axis against the axis's first value.

    differences: of the scores, one for each pair of combinations that differ on this axis alone;
    below 0 the value is the better one.
    """

    axis: str
    value: str
    against: str
    differences: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.differences)

    @property
    def better(self) -> float:
        """The share of the pairs in which the value is better."""
        return sum(each < 0 for each in self.differences) / len(self.differences)

    @property
    def quartiles(self) -> tuple[float, float]:
        """Between which the middle half of the differences lies."""
        if len(self.differences) == 1:
            return self.differences[0], self.differences[0]
        low, _, high = statistics.quantiles(self.differences, n=4, method="inclusive")
        return low, high


def effects(scores: Mapping[Combination, float]) -> list[Effect]:
    """The effects of all values of all axes, in their order.

    On an axis whose first value some combinations cannot have, such as a rule of another scale,
    values are compared with the first that the other axes allow.
    """
    found: dict[tuple[str, str, str], list[float]] = {}
    for axis in AXES:
        groups: dict[Combination, dict[str, float]] = {}
        for each, score in scores.items():
            same = replace(each, **{axis: first(axis)})
            groups.setdefault(same, {})[getattr(each, axis)] = score
        for group in groups.values():
            present = [value for value in AXES[axis] if value in group]
            for value in present[1:]:
                difference = group[value] - group[present[0]]
                found.setdefault((axis, value, present[0]), []).append(difference)
    order = {(axis, value): place for place, (axis, value) in enumerate(_pairs())}
    keys = sorted(found, key=lambda key: (order[key[:2]], order[key[0], key[2]]))
    return [Effect(*key, found[key]) for key in keys]


def _pairs() -> list[tuple[str, str]]:
    return [(axis, value) for axis, values in AXES.items() for value in values]
