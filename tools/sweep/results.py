"""The result rows of a sweep: reads them, and makes scores and ranks of them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from megatron_fp4.errors import ConfigError
from tools import rows as jsonl
from tools.rows import Row
from tools.sweep import llama
from tools.sweep.axes import AXES, Combination, with_values
from tools.sweep.rank_correlation import ranks_of_draws
from tools.sweep.stages import STAGES

# What scores are compared with: BF16 by each optimizer.
BF16 = {
    optimizer: Combination(forward="bf16", backward="bf16", optimizer=optimizer)
    for optimizer in AXES["optimizer"]
}
SCORES = {name: stage.score for name, stage in STAGES.items()} | {llama.NAME: "loss"}
KEYS = {"hash", "stage", "star", "combination", "seeds", "status", "seconds"}
MADE_WITH = ("settings", "tensors", "numerics")


def read(path: Path) -> list[Row]:
    """The rows of a result file, each hash once; none if it does not exist.

    Raises ValueError if a row has an axis or a value that does not exist, or if `check_alike` does.
    """
    every = jsonl.read(path, KEYS)
    for number, row in enumerate(every, start=1):
        try:
            with_values(row["combination"])
        except (TypeError, ConfigError) as error:
            raise ValueError(f"{path}:{number}: {error}: use another file") from error
    check_alike(every, path)
    return list({row["hash"]: row for row in every}.values())


def check_alike(every: Iterable[Row], path: Path) -> None:
    """Raises ValueError if results of one stage were made with different settings, recorded tensors
    or numerics: their scores cannot be compared.

    every: rows, or the configurations of rows that are to be added to the file `path`.
    """
    found: dict[str, Row] = {}
    for row in every:
        made = {key: row.get(key) for key in MADE_WITH}
        before = found.setdefault(row["stage"], made)
        if differ := [key for key in MADE_WITH if made[key] != before[key]]:
            what = f"results of {row['stage']} in {path} differ in {', '.join(differ)}"
            raise ValueError(f"{what}: use another file")


def scores(
    rows: list[Row], stage: str, seeds: Sequence[str] = (), figure: str | None = None
) -> dict[Combination, float]:
    """The score of each combination that finished the stage: the mean over seeds, less BF16's of
    the same seeds and optimizer where BF16 ran the stage.

    seeds: those that count; none: all. figure: another figure of the stage than its score; where
    a row does not have it, there is none.
    """
    name = figure or SCORES[stage]
    found = {
        Combination(**row["combination"]): row["seeds"]
        for row in rows
        if row["stage"] == stage and row["status"] == "finished" and name in row["seeds"]["1"]
    }
    plain = {optimizer: found.pop(each, None) for optimizer, each in BF16.items()}
    compared = any(plain.values())

    def score(each: Combination) -> float:
        own, other = found[each], plain[each.optimizer] if compared else None
        return statistics.mean(
            own[seed][name] - (other[seed][name] if other else 0.0) for seed in seeds or own
        )

    return {each: score(each) for each in found if not compared or plain[each.optimizer]}


def seeds_of(rows: list[Row], stage: str) -> list[str]:
    """The seeds with which the stage's combinations ran."""
    found = (row for row in rows if row["stage"] == stage and row["status"] == "finished")
    return next((sorted(row["seeds"]) for row in found), [])


def ranked(rows: list[Row], stages: Sequence[str]) -> dict[Combination, float]:
    """The mean over the stages of each combination's rank, from 0 for the best; of those that
    finished all the stages."""
    tables = [scores(rows, stage) for stage in stages]
    common = set.intersection(*map(set, tables))
    order = sorted(common, key=lambda each: each.key)
    each_once = np.ones((1, len(order)), dtype=int)
    places = [
        ranks_of_draws(np.array([table[each] for each in order]), each_once)[0] for table in tables
    ]
    return dict(zip(order, np.mean(places, 0).tolist(), strict=True))
