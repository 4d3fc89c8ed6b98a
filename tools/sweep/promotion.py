"""Which combinations go from one level of stages to the next: successive halving, and some at
random."""

from __future__ import annotations

from dataclasses import dataclass

from tools.rows import Row
from tools.sweep import llama
from tools.sweep.axes import Combination
from tools.sweep.results import ranked

RANDOM = 10  # one star of so many is promoted, however good it is


@dataclass(frozen=True)
class Level:
    """Stages that the same combinations run. best: one of so many is promoted to the next level."""

    stages: tuple[str, ...]
    best: int


LEVELS = (
    Level(("products",), best=20),
    Level(("draws", "regression", "digits"), best=8),
    Level(("diffusion",), best=8),
    Level((llama.NAME,), best=8),
)


def level_of(stage: str) -> int:
    """The number of the level, from 0, that has the stage."""
    return next(number for number, level in enumerate(LEVELS) if stage in level.stages)


def promoted(rows: list[Row], level: int) -> dict[Combination, str]:
    """The combinations that level `level` promotes, with their stars, the best ones first.

    rows: finished and failed rows of all stages. Of the combinations that quantize the same GEMMs,
    and so cost about the same, one in `best` is promoted, by the mean of its ranks in the level's
    stages. Beside them go all of the stars that `random_star` names: what these say of the next
    level does not depend on how good they were. A combination whose training failed has no rank and
    is not promoted.
    """
    ranks = ranked(rows, LEVELS[level].stages)
    stars = {Combination(**row["combination"]): row["star"] for row in rows}
    groups: dict[tuple[str, str], list[Combination]] = {}
    for each in sorted(ranks, key=lambda each: (ranks[each], each.key)):
        groups.setdefault((each.forward, each.backward), []).append(each)
    best = [each for own in groups.values() for each in own[: -(-len(own) // LEVELS[level].best)]]
    others = [each for each in ranks if random_star(stars[each])]
    return {each: stars[each] for each in [*best, *others]}


def random_star(star: str) -> bool:
    """Whether all combinations of a star go through all levels: one star of RANDOM, by its key."""
    return int(star, 16) % RANDOM == 0
