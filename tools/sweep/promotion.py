"""Which combinations go from one level of stages to the next: successive halving, and some at
random."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from megatron_fp4.errors import ConfigError
from tools.rows import Row
from tools.sweep import factorial, llama, words
from tools.sweep.axes import AXES, TRAINING, Combination, line
from tools.sweep.results import BF16, ranked
from tools.sweep.sampling import DIRECTED


@dataclass(frozen=True)
class Level:
    """Stages that the same combinations run.

    best_of: the best one of so many combinations of the level before is promoted to this level.
    line_of: one of so many lines of the sample is promoted too, however good it is.
    """

    stages: tuple[str, ...]
    best_of: int
    line_of: int


class Line(NamedTuple):
    """A center of a star, and an axis."""

    center: Combination
    axis: str

    @property
    def combinations(self) -> dict[str, Combination]:
        """By value: see `axes.line`."""
        return line(self.center, self.axis)


LEVELS = (
    Level(("products",), best_of=1, line_of=1),
    Level(("draws", "regression", "digits"), best_of=20, line_of=10),
    Level(("diffusion",), best_of=8, line_of=20),
    Level((llama.NAME,), best_of=16, line_of=60),
)
DESIGNED = (factorial.STAR, words.STAR)  # stars whose combinations go through all stages
# Stages that do not depend on the axes of TRAINING.
WITHOUT_TRAINING = ("products", "draws", llama.NAME)


def level_of(stage: str) -> int:
    """The number of the level, from 0, that has the stage."""
    return next(number for number, level in enumerate(LEVELS) if stage in level.stages)


def promoted(rows: list[Row], level: int) -> dict[Combination, str]:
    """The combinations that are promoted to level `level`, from 1, with their stars, the best ones
    first.

    rows: finished and failed rows of all stages. Of the combinations that quantize the same GEMMs,
    and so cost about the same, the best one of `best_of` is promoted, by the mean of its ranks in
    the stages of the level before. Beside them go those of `random_lines` and DESIGNED. A
    combination whose training failed has no rank and is not promoted.
    """
    ranks = ranked(rows, LEVELS[level - 1].stages)
    stars = stars_of(rows)
    groups: dict[tuple[str, str], list[Combination]] = {}
    for each in sorted(ranks, key=lambda each: (ranks[each], each.key)):
        groups.setdefault((each.forward, each.backward), []).append(each)
    count = LEVELS[level].best_of
    best = [each for own in groups.values() for each in own[: -(-len(own) // count)]]
    lines = on_lines(random_lines(stars, LEVELS[level].line_of))
    others = [each for each in ranks if each in lines or stars[each] in DESIGNED]
    return {each: stars[each] for each in [*best, *others]}


def to_evaluate(
    level: int, rows: list[Row], sampled: Mapping[Combination, str]
) -> dict[Combination, str]:
    """The combinations that the stages of a level are to evaluate, with their stars: `sampled` in
    the first level; in the others those that `rows` promote, and BF16."""
    if level == 0:
        return dict(sampled)
    return promoted(rows, level) | {each: each.key for each in BF16.values()}


def check_sampled(rows: list[Row], sampled: Mapping[Combination, str], path: Path) -> None:
    """Raises ConfigError if rows are of another sample than `sampled`, or of no sample.

    Promotion takes all rows of a file, so that a file has one sample. One of the same seed and a
    larger number has all of a smaller one. rows: of all stages, of the file `path`.
    """
    if any(row["star"] == DIRECTED for row in rows):
        what = f"{path} has results of values that were chosen"
        raise ConfigError(f"{what}: give --results with another file")
    own = stars_of(row for row in rows if row["stage"] in LEVELS[0].stages)
    if not own.items() <= sampled.items():
        what = f"{path} has results of another sample"
        other = "give the --number and --seed that it had, or --results with another file"
        raise ConfigError(f"{what}: {other}")


def check_directed(rows: list[Row], path: Path) -> None:
    """Raises ConfigError if rows are of a sample. rows: of all stages, of the file `path`."""
    directed = {DIRECTED, *(each.key for each in BF16.values())}
    if any(row["star"] not in directed for row in rows):
        raise ConfigError(f"{path} has results of a sample: give --results with another file")


def check_before(level: int, rows: list[Row], sampled: Mapping[Combination, str]) -> None:
    """Raises ConfigError if a stage before the level has not evaluated all that it was to.

    rows: of all stages. sampled: what the first level was to evaluate; empty: this is not known,
    and what it has evaluated is taken for all. What each other level was to evaluate follows from
    the results of the level before it.
    """
    for before in range(level):
        wanted = to_evaluate(before, rows, sampled)
        other = "" if before else ", or give the --number and --seed that it had"
        for stage in LEVELS[before].stages:
            check_complete(stage, wanted, evaluated(rows, stage), other)


def check_complete(
    stage: str, wanted: Collection[object], found: Container[object], other: str = ""
) -> None:
    """Raises ConfigError if a stage is not complete: `found`, what it has evaluated, lacks some of
    `wanted`. other: what the user can do beside running the stage, for the message."""
    count = sum(each in found for each in wanted)
    if count < len(wanted):
        have = f"{count} of {len(wanted)} have results of {stage}"
        raise ConfigError(f"{have}: run it first{other}")


def evaluated(rows: Iterable[Row], stage: str) -> set[Combination]:
    """The combinations that have a row of a stage."""
    return set(stars_of(row for row in rows if row["stage"] == stage))


def stars_of(rows: Iterable[Row]) -> dict[Combination, str]:
    """The star of each combination that has a row."""
    return {Combination(**row["combination"]): row["star"] for row in rows}


def lines_of(stars: Mapping[Combination, str], stage: str) -> list[Line]:
    """The lines that were promoted to a stage at random, without those of axes on which the stage
    does not depend: see `random_lines`."""
    found = random_lines(stars, LEVELS[level_of(stage)].line_of)
    return [each for each in found if stage not in WITHOUT_TRAINING or each.axis not in TRAINING]


def random_lines(stars: Mapping[Combination, str], count: int) -> list[Line]:
    """A random share of all lines: one of `count`. See `axes.line`.

    The hash of star and axis decides, and not how good the combinations are. A line that is chosen
    for a multiple of `count` is chosen for `count` too.

    stars: the star of each combination; those of DESIGNED are in no line.
    """
    centers = [each for each, star in stars.items() if star == each.key]
    chosen = (
        Line(each, axis)
        for each in centers
        for axis in AXES
        if _number(f"{each.key} {axis}") % count == 0
    )
    return [each for each in chosen if len(each.combinations) > 1]


def on_lines(lines: Iterable[Line]) -> set[Combination]:
    """All combinations of the lines."""
    return {each for own in lines for each in own.combinations.values()}


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])
