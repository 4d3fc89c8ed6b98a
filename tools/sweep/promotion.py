"""Which combinations go from one level of stages to the next: successive halving, and some at
random."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tools.rows import Row
from tools.sweep import factorial, llama
from tools.sweep.axes import AXES, Combination
from tools.sweep.results import ranked


@dataclass(frozen=True)
class Level:
    """Stages that the same combinations run.

    best: one of so many combinations of the level before is promoted to this level: the best ones.
    random: one of so many lines of the sample is promoted too, however good it is.
    """

    stages: tuple[str, ...]
    best: int
    random: int


LEVELS = (
    Level(("products",), best=1, random=1),
    Level(("draws", "regression", "digits"), best=20, random=10),
    Level(("diffusion",), best=8, random=10),
    Level((llama.NAME,), best=16, random=50),
)


def level_of(stage: str) -> int:
    """The number of the level, from 0, that has the stage."""
    return next(number for number, level in enumerate(LEVELS) if stage in level.stages)


def promoted(rows: list[Row], level: int) -> dict[Combination, str]:
    """The combinations that are promoted to level `level`, from 1, with their stars, the best ones
    first.

    rows: finished and failed rows of all stages. Of the combinations that quantize the same GEMMs,
    and so cost about the same, one in `best` is promoted, by the mean of its ranks in the stages of
    the level before. Beside them go those of `random_lines` and the factorial. A combination whose
    training failed has no rank and is not promoted.
    """
    ranks = ranked(rows, LEVELS[level - 1].stages)
    stars = stars_of(rows)
    groups: dict[tuple[str, str], list[Combination]] = {}
    for each in sorted(ranks, key=lambda each: (ranks[each], each.key)):
        groups.setdefault((each.forward, each.backward), []).append(each)
    count = LEVELS[level].best
    best = [each for own in groups.values() for each in own[: -(-len(own) // count)]]
    lines = random_lines(stars, LEVELS[level].random)
    others = [each for each in ranks if each in lines or stars[each] == factorial.STAR]
    return {each: stars[each] for each in [*best, *others]}


def stars_of(rows: Iterable[Row]) -> dict[Combination, str]:
    """The star of each combination that has a row."""
    return {Combination(**row["combination"]): row["star"] for row in rows}


def lines_of(stars: Mapping[Combination, str], stage: str) -> set[Combination]:
    """The combinations that were promoted to a stage at random: see `random_lines`."""
    return random_lines(stars, LEVELS[level_of(stage)].random)


def random_lines(stars: Mapping[Combination, str], count: int) -> set[Combination]:
    """The combinations of a random share of all lines: one line of `count`.

    A line is the center of a star, with the combinations of the star that differ from it on one
    axis. The hash of star and axis decides, and not how good the combinations are. A combination
    that is chosen for a multiple of `count` is chosen for `count` too.

    stars: the star of each combination; those of factorial.py are in no line.
    """
    centers = {each.key: each for each in stars}
    found: set[Combination] = set()
    for each, star in stars.items():
        center = centers.get(star, each)
        axis = next((axis for axis in AXES if getattr(each, axis) != getattr(center, axis)), None)
        if axis is not None and _number(f"{star} {axis}") % count == 0:
            found |= {center, each}
    return found


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])
