"""The tables of a study as Markdown."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from typing import Any

from benchmarks.study.entries import BF16
from benchmarks.study.gap_words import gap_words
from benchmarks.study.gaps import (
    Cell,
    cell_of,
    evaluated_in,
    gap,
    losses,
    paired,
    runs_of,
    spread,
)
from benchmarks.study.running import named
from benchmarks.study.sizes import SIZES, size_order
from megatron_fp4.metrics.weights import WINDOW
from tools.pages import table
from tools.rows import Row

# r(W_Q) in arXiv 2502.20853 (a Vision Transformer on ImageNet), by the name of the recipe.
PAPER = {"tetrajet": 0.0045, "tetrajet-ema": 0.0018, "tetrajet-ramping": 0.0028}
_PLACE = ["size", "steps", "learning rate", "recipe", "seeds"]


def cells(rows: Iterable[Row]) -> list[Cell]:
    """The cells of finished runs: those of a text together, small models first."""
    found = set(map(cell_of, rows))
    return sorted(found, key=lambda cell: (cell.text, size_order(cell.size), cell))


def recipes(rows: Iterable[Row]) -> list[str]:
    """The recipes of finished runs, BF16 first, in the order of their names."""
    found = {row["configuration"]["recipe"] for row in rows}
    return sorted(found, key=lambda recipe: (recipe != BF16, recipe))


def loss_table(rows: list[Row]) -> list[str]:
    """The held-out losses: their mean over the seeds, and how far the seeds are apart."""
    rounding = any(len(own) > 1 for _, _, found in _groups(rows) for own in found.values())
    heads = [*_PLACE, "held-out loss", "spread of seeds"]
    heads += ["spread of rounding seeds"] if rounding else []
    body = []
    for cell, recipe, found in _groups(rows):
        means = [statistics.mean(own) for own in found.values()]
        line = [*_place(cell, recipe, len(found)), f"{statistics.mean(means):.4f}"]
        line.append(_number(spread(means), ".4f"))
        if rounding:
            apart = [each for each in map(spread, found.values()) if each is not None]
            line.append(_number(max(apart, default=None), ".4f"))
        body.append(line)
    return table(heads, body)


def gap_table(rows: list[Row], against: str) -> list[str]:
    """What each recipe's held-out loss is above that of `against`, paired by seed."""
    heads = [
        *_PLACE,
        f"minus `{against}`",
        "bootstrap interval",
        "perplexity ratio",
        "spread of seeds",
        "the mean is",
    ]
    body = []
    for cell, recipe, _ in _groups(rows):
        found = None if recipe == against else gap(rows, cell, recipe, against)
        if found is not None:
            low_high = found.interval
            interval = "" if low_high is None else "{:+.4f} to {:+.4f}".format(*low_high)
            place = _place(cell, recipe, len(found.by_seed))
            numbers = [f"{found.mean:+.4f}", interval, f"{math.exp(found.mean):.4f}"]
            body.append([*place, *numbers, _number(found.spread, ".4f"), found.verdict])
    return table(heads, body) if body else []


def evaluation_table(rows: list[Row]) -> list[str]:
    """The losses of the evaluations that follow training (`Matrix.evaluate_in`).

    A row is a recipe that models were trained with, and a column a precision in which they were
    evaluated. A cell is the held-out loss minus that of the model that BF16 trained, evaluated in
    BF16, paired by seed. [] if no such model was evaluated.
    """
    entries = list(dict.fromkeys(entry for row in rows for entry in row.get("evaluated", {})))
    body = []
    for cell, recipe, _ in _groups(rows):
        plain = losses(rows, cell, BF16, evaluated_in(BF16))
        found = [
            paired(losses(rows, cell, recipe, evaluated_in(entry)), plain) for entry in entries
        ]
        if any(found):
            seeds = max(len(each.by_seed) for each in found if each is not None)
            cells = ["" if each is None else gap_words(each) for each in found]
            body.append([*_place(cell, recipe, seeds), *cells])
    return table([*_PLACE, *(f"in `{entry}`" for entry in entries)], body) if body else []


def window(rows: Iterable[Row], interval: int) -> int:
    """The number of steps over which r(W), r(W_Q) and R_w are measured; of several the smallest.

    interval: the steps between reports. Rows from before `window` was recorded are of these steps,
    200 at most.
    """
    measured = [row for row in rows if row["metrics"]]
    return min((row.get("window", min(WINDOW, interval)) for row in measured), default=0)


def oscillation_table(rows: list[Row], window: int) -> list[str]:
    """Movement of weights at the end of training; [] if no run has metrics.

    window: the number of steps over which it is measured. The paper's figures stand beside those of
    as many steps as the paper's.
    """
    heads = [*_PLACE, "r(W)", "r(W_Q)", "R_w above 16, %", "QuantConf"]
    heads += ["the paper's r(W_Q)"] if window == WINDOW else []
    body = []
    for cell, recipe, _ in _groups(rows):
        own = [row for row in runs_of(rows, cell, recipe) if row["metrics"]]
        if own:
            seeds = len({row["configuration"]["seed"] for row in own})
            paper = PAPER.get(recipe)
            numbers = [
                _mean(own, "r", ".4f"),
                _mean(own, "r_quantized", ".4f"),
                _mean(own, "oscillating", ".3f", 100),
                _mean(own, "confidence", ".3f"),
            ]
            numbers += [_number(paper, ".4f")] if window == WINDOW else []
            body.append([*_place(cell, recipe, seeds), *numbers])
    return table(heads, body) if body else []


def amounts_table(rows: list[Row]) -> list[str]:
    """How much text each length is, in tokens and in epochs, and the time of a step."""
    body = []
    for size, steps in dict.fromkeys((cell.size, cell.steps) for cell in cells(rows)):
        own = [r for r in rows if (cell_of(r).size, cell_of(r).steps) == (size, steps)]
        tokens = steps * SIZES[size].tokens
        times = [
            f"`{recipe}` {statistics.median(times):.0f}"
            for recipe in recipes(own)
            if (times := [r["milliseconds"] for r in own if r["configuration"]["recipe"] == recipe])
        ]
        body.append([size, str(steps), f"{tokens:,}", f"{epochs(own[0]):.2f}", ", ".join(times)])
    return table(["size", "steps", "tokens", "epochs", "ms a step"], body)


def epochs(row: Row) -> float:
    """How often a run reads its text."""
    of = cell_of(row)
    times: float = of.steps * SIZES[of.size].tokens / row["text"]["train"]["tokens"]
    return times


def about(rows: list[Row], planned: int) -> list[str]:
    """How many runs there are, what they were made on, and their text, as a list."""
    stamps = [row["stamp"] for row in rows]
    packages = ("python", "torch", "triton", "megatron-core", "numpy")
    versions = ", ".join(f"{name} {_each(stamp[name] for stamp in stamps)}" for name in packages)
    devices = _each(name for stamp in stamps for name in stamp["device"])
    commits = _each(stamp["commit"][:8] for stamp in stamps)
    numerics = _each(row["configuration"]["numerics"] for row in rows)
    lines = [
        f"- {len(rows)} of {planned} runs, on {devices}; {versions}; commit {commits}, numerics "
        f"version {numerics}."
    ]
    for text in {row["text"]["sha256"]: row["text"] for row in rows}.values():
        train, held_out = text["train"], text["held_out"]
        lines.append(
            f"- Text {text['sha256'][:12]}: {text['source']}; {train['documents']:,} files of "
            f"{train['bytes'] / 1e6:.1f} MB ({train['tokens']:,} tokens, a vocabulary of "
            f"{text['vocabulary']:,}) to train on, {held_out['documents']:,} files "
            f"({held_out['tokens']:,} tokens) held out."
        )
    return lines


def failures(rows: list[Row]) -> list[str]:
    """The runs that failed, as a list."""
    return [f"- Failed: {named(row)}: {row['error']}" for row in rows]


def _groups(rows: list[Row]) -> list[tuple[Cell, str, dict[int, list[float]]]]:
    """(cell, recipe, losses by seed) of all finished runs."""
    found = [
        (cell, name, losses(rows, cell, name)) for cell in cells(rows) for name in recipes(rows)
    ]
    return [group for group in found if group[2]]


def _place(cell: Cell, recipe: str, seeds: int) -> list[str]:
    return [cell.size, str(cell.steps), f"{cell.learning_rate:g}", f"`{recipe}`", str(seeds)]


def _mean(rows: list[Row], metric: str, form: str, factor: float = 1) -> str:
    """The mean over the runs of a metric of weights in their last report."""
    last = [row["metrics"].get("weight", {}).get(metric) for row in rows]
    values = [factor * series[-1][1] for series in last if series]
    return f"{statistics.mean(values):{form}}" if values else ""


def _number(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"


def _each(values: Iterable[Any]) -> str:
    return ", ".join(dict.fromkeys(map(str, values)))
