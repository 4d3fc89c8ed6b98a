"""What a recipe costs: its losses minus those of another recipe, paired by the data's seed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from benchmarks.study.configuration import point_of
from tools.rows import Row

DRAWS = 10_000  # resamples of the bootstrap
LEVEL = 0.95  # of its interval
ENOUGH = 4  # seeds; of fewer the interval goes from the smallest to the largest, and is too narrow
_FIRST = 20_250_220  # the bootstrap's seed: the same rows give the same interval
LossOf = Callable[[Row], float | None]  # reads a loss off a finished run


class Cell(NamedTuple):
    """What runs have in common that are compared: all but recipe and seeds.

    text: its SHA-256. numerics: the version of docs/numerics.md; runs of two are not comparable.
    """

    text: str
    size: str
    steps: int
    learning_rate: float
    numerics: int


@dataclass(frozen=True)
class Gap:
    """The differences of two recipes' losses.

    by_seed: for each seed of the data that both have, the difference of the means over the rounding
    seeds.
    """

    by_seed: dict[int, float]

    @property
    def mean(self) -> float:
        return statistics.mean(self.by_seed.values())

    @property
    def spread(self) -> float | None:
        """The largest minus the smallest; None of one seed."""
        return spread(self.by_seed.values())

    @property
    def interval(self) -> tuple[float, float] | None:
        """The bootstrap's interval of the mean; None of one seed."""
        values = list(self.by_seed.values())
        return bootstrap(values) if len(values) > 1 else None

    @property
    def verdict(self) -> str:
        """What can be said: nothing about a mean that is no larger than the seeds' spread."""
        if self.spread is None:
            return "one seed"
        if abs(self.mean) <= self.spread:
            return "within the spread"
        return "higher" if self.mean > 0 else "lower"


def bootstrap(values: list[float]) -> tuple[float, float]:
    """The percentile interval, at LEVEL, of the mean of `values`: of means of as many values, drawn
    with replacement. Of 2 or 3 values it is from the smallest to the largest."""
    drawn = np.random.default_rng(_FIRST).choice(values, (DRAWS, len(values)))
    low, high = np.quantile(drawn.mean(axis=1), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def spread(values: Iterable[float]) -> float | None:
    """The largest minus the smallest value; None of a single one."""
    kept = list(values)
    return max(kept) - min(kept) if len(kept) > 1 else None


def cell_of(row: Row) -> Cell:
    """What the runs that a finished run is compared with have in common with it."""
    of = row["configuration"]
    point = point_of(of)
    return Cell(of["text"], point.size, point.steps, point.learning_rate, of["numerics"])


def runs_of(rows: Iterable[Row], cell: Cell, recipe: str) -> list[Row]:
    """The finished runs of a recipe in a cell."""
    return [r for r in rows if cell_of(r) == cell and r["configuration"]["recipe"] == recipe]


def held_out(row: Row) -> float:
    """The held-out loss at the end of a finished run, in the precision in which it trained then."""
    loss: float = row["held_out"][-1][1]
    return loss


def training(row: Row) -> float:
    """The training loss in the last report of a finished run, which is a mean over the steps since
    the report before."""
    loss: float = row["train"][-1][1]
    return loss


def evaluated_in(entry: str) -> LossOf:
    """The held-out loss at the end of a finished run in the precision of `entry`, which is one of
    the matrix's `evaluate_in`; None of runs without that evaluation."""
    return lambda row: row.get("evaluated", {}).get(entry)


def losses(
    rows: Iterable[Row], cell: Cell, recipe: str, loss_of: LossOf = held_out
) -> dict[int, list[float]]:
    """The losses of the finished runs of a recipe: for each seed of the data those of its rounding
    seeds. Runs without such a loss are left out."""
    found: dict[int, list[float]] = {}
    for row in runs_of(rows, cell, recipe):
        if (loss := loss_of(row)) is not None:
            found.setdefault(row["configuration"]["seed"], []).append(loss)
    return found


def gap(
    rows: list[Row], cell: Cell, recipe: str, against: str, loss_of: LossOf = held_out
) -> Gap | None:
    """The gap of a recipe; None if no seed has both."""
    own, other = (losses(rows, cell, each, loss_of) for each in (recipe, against))
    return paired(own, other)


def paired(own: dict[int, list[float]], other: dict[int, list[float]]) -> Gap | None:
    """The gap between losses of `losses`; None if no seed has both."""
    pairs = {
        seed: statistics.mean(own[seed]) - statistics.mean(other[seed])
        for seed in sorted(own.keys() & other.keys())
    }
    return Gap(pairs) if pairs else None
