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
from tools.sweep.rank_correlation import (
    medians_of_draws,
    places_in_groups,
    spearman,
    spearman_of_draws,
)
from tools.sweep.results import scores, seeds_of

BOOTSTRAP_DRAWS, BOOTSTRAP_SEED = 2000, 20_250_917
CONFIDENCE = 0.95
# Combinations that a correlation needs. A draw of few has the same ones several times: it then
# repeats the order that was found, so that the interval is narrow however little is known.
FEWEST_RANKED = 10


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
    the second at random; None if there are fewer than three stars, or than FEWEST_RANKED
    combinations."""
    stars = stars_of(rows)
    lines = on_lines(lines_of(stars, second))
    return _agreement(rows, first, second, {e: star for e, star in stars.items() if e in lines})


def agreement_of_designed(rows: list[Row], first: str, second: str) -> Agreement | None:
    """How the scores of two stages agree, over the combinations of factorial.py and words.py.

    These go through all stages, whatever they score. Combinations that differ from others only in
    the training around a recipe (loss scale, optimizer) are left out. The bootstrap draws a
    combination of factorial.py together with those of words.py that change it. Returns None if
    there are fewer than three such groups, or than FEWEST_RANKED combinations.
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
    if len(set(names)) < 3 or len(names) < FEWEST_RANKED:
        return None
    a, b = (np.array([table[each] for each in common]) for table in (one, two))
    kinds = [f"{each.forward} {each.backward}" for each in common]
    gemms = np.unique(kinds, return_inverse=True)[1]
    [of_all] = _correlations(a, b, gemms, np.ones((1, len(a)), dtype=int)).T
    tail = (1 - CONFIDENCE) / 2
    # A draw of equal values is NaN.
    low, high = np.nanquantile(_correlations(a, b, gemms, _draws(names)), [tail, 1 - tail], axis=1)
    every, alike, half = (
        Correlation(float(value), (float(least), float(most)))
        for value, least, most in zip(of_all, low, high, strict=True)
    )
    better = [common[place] for place in np.flatnonzero(a <= np.median(a))]
    whole, of_half = (ceiling(rows, second, among) for among in (common, better))
    return Agreement(every, alike, half, whole, of_half, len(common))


def _correlations(
    a: np.ndarray, b: np.ndarray, gemms: np.ndarray, counts: np.ndarray
) -> np.ndarray:
    """The correlations of an Agreement, in bootstrap draws; (3, draws).

    a, b: the scores of each combination. gemms: a number for the GEMMs that each quantizes.
    counts: how often each draw has each combination. The better half is chosen anew in each draw.
    """
    one, two = (places_in_groups(each, counts, gemms) for each in (a, b))
    better = a <= medians_of_draws(a, counts)[:, None]
    return np.stack(
        [
            spearman_of_draws(a, b, counts),
            spearman_of_draws(one, two, counts),
            spearman_of_draws(a, b, counts * better),
        ]
    )


def _draws(names: Sequence[str]) -> np.ndarray:
    """How often each bootstrap draw has each combination; (draws, combinations).

    names: the group of each combination, a star or a base. The combinations of a group resemble
    one another, so that they are no independent samples. The bootstrap therefore draws whole
    groups.
    """
    groups = list(dict.fromkeys(names))
    source = np.random.default_rng(BOOTSTRAP_SEED)
    drawn = source.integers(len(groups), size=(BOOTSTRAP_DRAWS, len(groups)))
    of_group = np.stack([np.bincount(each, minlength=len(groups)) for each in drawn])
    return of_group[:, [groups.index(name) for name in names]]


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
