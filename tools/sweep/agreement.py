"""What one stage tells of the next: rank correlations of combinations that were promoted
whatever they scored, at random or by design."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tools.rows import Row
from tools.sweep import words
from tools.sweep.axes import Combination, without_training
from tools.sweep.promotion import DESIGNED, lines_of, on_lines, stars_of
from tools.sweep.results import ranks, scores, seeds_of

BOOTSTRAP_DRAWS, BOOTSTRAP_SEED = 2000, 20_250_917
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Correlation:
    """Spearman's rank correlation. interval: the bootstrap's, over stars, or over bases."""

    value: float
    interval: tuple[float, float]

    @property
    def above_0(self) -> bool:
        """Whether the whole interval is above 0."""
        return self.interval[0] > 0


@dataclass(frozen=True)
class Agreement:
    """How the scores of two stages agree.

    every: over all combinations. alike: of ranks among combinations that quantize the same GEMMs,
    by which combinations are promoted. better_half: among the half that is better in the first
    stage. ceiling: the square root of the second stage's reliability, the most that its scores
    could agree with the truth; None of one seed. ceiling_of_half: that among the better half.
    number: of combinations.
    """

    every: Correlation
    alike: Correlation
    better_half: Correlation
    ceiling: float | None
    ceiling_of_half: float | None
    number: int


def agreement(rows: list[Row], first: str, second: str) -> Agreement | None:
    """How the scores of two stages agree, over the combinations of the lines that were promoted to
    the second at random; None if there are fewer than three stars."""
    stars = stars_of(rows)
    lines = on_lines(lines_of(stars, second))
    return _agreement(rows, first, second, {e: star for e, star in stars.items() if e in lines})


def agreement_of_designed(rows: list[Row], first: str, second: str) -> Agreement | None:
    """How the scores of two stages agree, over the combinations of factorial.py and words.py.

    These go through all stages, whatever they score. Combinations that differ from others only in
    the training around a recipe (loss scale, optimizer) are left out. The bootstrap draws a
    combination of factorial.py together with those of words.py that change it. Returns None if
    there are fewer than three such groups.
    """
    stars, bases = stars_of(rows), words.bases()
    own = [e for e in stars if stars[e] in DESIGNED and e == without_training(e)]
    return _agreement(rows, first, second, {each: bases.get(each, each).key for each in own})


def _agreement(
    rows: list[Row], first: str, second: str, groups: dict[Combination, str]
) -> Agreement | None:
    """groups: the combinations that count, each with the group that the bootstrap draws it in."""
    one, two = scores(rows, first), scores(rows, second)
    common = [each for each in one if each in two and each in groups]
    names = [groups[each] for each in common]
    if len(set(names)) < 3:
        return None
    a, b = (np.array([table[each] for each in common]) for table in (one, two))
    kinds = [f"{each.forward} {each.backward}" for each in common]
    gemms = np.unique(kinds, return_inverse=True)[1]
    intervals = _intervals(_places(names), a, b, gemms)
    found = zip(_correlations(a, b, gemms), intervals, strict=True)
    every, alike, half = (Correlation(*each) for each in found)
    better = [common[place] for place in np.flatnonzero(_better(a))]
    whole, of_half = (ceiling(rows, second, among) for among in (common, better))
    return Agreement(every, alike, half, whole, of_half, len(common))


def _correlations(a: np.ndarray, b: np.ndarray, gemms: np.ndarray) -> tuple[float, float, float]:
    """The correlations of an Agreement. gemms: a number for the GEMMs that each
    combination quantizes."""
    better = _better(a)
    groups = [np.flatnonzero(gemms == each) for each in np.unique(gemms)]
    alike = spearman(_within(groups, a), _within(groups, b))
    return spearman(a, b), alike, spearman(a[better], b[better])


def _better(scores: np.ndarray) -> np.ndarray:
    """For each score whether it is in the better half, the lower one."""
    return scores <= np.median(scores)


def _places(names: Sequence[str]) -> list[np.ndarray]:
    """For each name the places where it is."""
    found: dict[str, list[int]] = {}
    for place, name in enumerate(names):
        found.setdefault(name, []).append(place)
    return [np.array(places) for places in found.values()]


def _intervals(
    groups: list[np.ndarray], a: np.ndarray, b: np.ndarray, gemms: np.ndarray
) -> list[tuple[float, float]]:
    """The 95% interval of each of `_correlations`, by a bootstrap over groups: stars or bases.

    groups: for each group the places in a and b of its combinations. The combinations of a group
    resemble one another, so that they are no independent samples. The bootstrap therefore draws
    whole groups. The better half is chosen anew in each draw.
    """
    source = np.random.default_rng(BOOTSTRAP_SEED)
    drawn = []
    for _ in range(BOOTSTRAP_DRAWS):
        chosen = np.concatenate([groups[i] for i in source.integers(len(groups), size=len(groups))])
        drawn.append(_correlations(a[chosen], b[chosen], gemms[chosen]))
    tail = (1 - CONFIDENCE) / 2
    # A draw of equal values is NaN.
    found = np.nanquantile(drawn, [tail, 1 - tail], axis=0)
    return [(float(low), float(high)) for low, high in found.T]


def _within(groups: list[np.ndarray], values: np.ndarray) -> np.ndarray:
    """The rank of each value in its group, from -1/2 to 1/2."""
    found = np.zeros(len(values))
    for places in groups:
        found[places] = (ranks(values[places]) + 0.5) / len(places) - 0.5
    return found


def ceiling(rows: list[Row], stage: str, among: Sequence[Combination]) -> float | None:
    """The square root of the reliability of a stage's scores: of the rank correlation of the mean
    over half of the seeds with that over the other half, stepped up to all seeds by
    Spearman and Brown. None of one seed; 0 where the halves do not agree at all."""
    seeds = seeds_of(rows, stage)
    if len(seeds) < 2:
        return None
    halves = [scores(rows, stage, part) for part in (seeds[::2], seeds[1::2])]
    a, b = (np.array([half[each] for each in among]) for half in halves)
    correlation = max(spearman(a, b), 0.0)
    return float(np.sqrt(2 * correlation / (1 + correlation)))


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """The correlation of the ranks, ties at their mean rank; NaN where all values are equal."""
    one, two = ranks(a), ranks(b)
    one, two = one - one.mean(), two - two.mean()
    with np.errstate(invalid="ignore"):
        return float(one @ two / np.sqrt((one @ one) * (two @ two)))
