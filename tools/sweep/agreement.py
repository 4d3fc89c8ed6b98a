"""Whether one stage tells anything of the next: rank correlations of a random part of the sweep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tools.rows import Row
from tools.sweep.axes import Combination
from tools.sweep.promotion import lines_of, stars_of
from tools.sweep.results import scores

DRAWS, LEVEL, FIRST = 2000, 0.95, 20_250_917  # of the bootstrap, its interval, its seed


@dataclass(frozen=True)
class Agreement:
    """Spearman's rank correlation of two stages' scores.

    interval: the bootstrap's, over stars. ceiling: the square root of the second stage's
    reliability, the most that its scores could agree with the truth; None of one seed. number: of
    combinations.
    """

    correlation: float
    interval: tuple[float, float]
    ceiling: float | None
    number: int

    @property
    def predicts(self) -> bool:
        """Whether the interval is above 0."""
        return self.interval[0] > 0


def agreement(rows: list[Row], first: str, second: str) -> Agreement | None:
    """How the scores of two stages agree, over the combinations of the lines that were promoted to
    the second at random; None if there are fewer than three stars."""
    stars = stars_of(rows)
    lines = lines_of(stars, second)
    one, two = scores(rows, first), scores(rows, second)
    common = [each for each in one if each in two and each in lines]
    groups: dict[str, list[int]] = {}
    for place, each in enumerate(common):
        groups.setdefault(stars[each], []).append(place)
    if len(groups) < 3:
        return None
    a, b = (np.array([table[each] for each in common]) for table in (one, two))
    places = [np.array(group) for group in groups.values()]
    source = np.random.default_rng(FIRST)
    drawn = []
    for _ in range(DRAWS):  # whole stars: their combinations are alike
        chosen = np.concatenate([places[i] for i in source.integers(len(places), size=len(places))])
        drawn.append(spearman(a[chosen], b[chosen]))
    limits = interval(np.array(drawn))
    return Agreement(spearman(a, b), limits, ceiling(rows, second, common), len(common))


def interval(drawn: np.ndarray) -> tuple[float, float]:
    """The limits between which the middle LEVEL of a bootstrap's draws lies; NaN is left out."""
    low, high = np.nanquantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def ceiling(rows: list[Row], stage: str, among: Sequence[Combination]) -> float | None:
    """The square root of the reliability of a stage's scores: of the rank correlation of the mean
    over half of the seeds with that over the other half, stepped up to all seeds by
    Spearman and Brown. None of one seed; 0 where the halves do not agree at all."""
    seeds = next((sorted(row["seeds"]) for row in rows if row["stage"] == stage), [])
    if len(seeds) < 2:
        return None
    halves = [scores(rows, stage, part) for part in (seeds[::2], seeds[1::2])]
    a, b = (np.array([half[each] for each in among]) for half in halves)
    correlation = max(spearman(a, b), 0.0)
    return float(np.sqrt(2 * correlation / (1 + correlation)))


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """The correlation of the ranks, ties at their mean rank."""
    return float(np.corrcoef(ranks(a), ranks(b))[0, 1])


def ranks(values: np.ndarray) -> np.ndarray:
    """The rank of each value, from 0; equal values have the mean of their ranks."""
    order = np.argsort(values, kind="stable")
    _, inverse, counts = np.unique(values[order], return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    found = np.empty(len(values))
    found[order] = ((ends - counts + ends - 1) / 2)[inverse]
    return found
