"""Reads the result rows of a sweep: scores, and ranks over several stages."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from tools.rows import Row
from tools.sweep import llama
from tools.sweep.axes import Combination
from tools.sweep.stages import STAGES

BF16 = Combination(forward="bf16", backward="bf16")
SCORES = {name: stage.score for name, stage in STAGES.items()} | {llama.NAME: "loss"}


def scores(
    rows: list[Row], stage: str, seeds: Sequence[str] = (), figure: str | None = None
) -> dict[Combination, float]:
    """The score of each combination that finished the stage: the mean over seeds, less BF16's of
    the same seeds where BF16 ran the stage.

    seeds: those that count; none: all. figure: another figure of the stage than its score.
    """
    found = {
        Combination(**row["combination"]): row["seeds"]
        for row in rows
        if row["stage"] == stage and row["status"] == "finished"
    }
    plain = found.get(BF16, {})
    name = figure or SCORES[stage]

    def score(by_seed: dict[str, dict[str, float]]) -> float:
        chosen = seeds or list(by_seed)
        own = (by_seed[seed][name] for seed in chosen)
        other = (plain[seed][name] if plain else 0.0 for seed in chosen)
        return statistics.mean(a - b for a, b in zip(own, other, strict=True))

    return {each: score(by_seed) for each, by_seed in found.items() if each != BF16}


def ranked(rows: list[Row], stages: Sequence[str]) -> dict[Combination, float]:
    """The mean over the stages of each combination's rank, from 0 for the best; of those that
    finished all the stages."""
    tables = [scores(rows, stage) for stage in stages]
    common = set.intersection(*map(set, tables))
    places = [
        {each: place for place, each in enumerate(sorted(common, key=lambda c: (table[c], c.key)))}
        for table in tables
    ]
    return {each: statistics.mean(place[each] for place in places) for each in common}
