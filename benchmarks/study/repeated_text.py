"""Gaps in held-out and in training loss beside how often the text was read, for docs/recipes.md."""

from __future__ import annotations

from benchmarks.study import tables
from benchmarks.study.committed import runs_of_study
from benchmarks.study.comparison import Comparison
from benchmarks.study.entries import BF16
from benchmarks.study.gap_words import gap_words, tokens
from benchmarks.study.gaps import Cell, gap, runs_of, training
from benchmarks.study.sizes import size_order
from tools.pages import table
from tools.rows import Row

RECIPES = ["fp8", "tetrajet-fp8", "four-over-six", "tetrajet"]
ONCE = ["recipes-3M", "one-epoch"]  # whose runs read no text twice


def repeated_table(found: Comparison) -> list[str]:
    """The gaps of RECIPES in the studies ONCE and in the comparison, by size and length."""
    rows_of = {cell: found.rows for cell in found.cells}
    for name in ONCE:
        rows, _ = runs_of_study(name)
        rows_of |= dict.fromkeys(tables.cells(rows), rows)
    heads = ["size", "tokens", "text read", "recipe", "seeds", "held-out loss minus BF16's"]
    body = []
    for cell in sorted(rows_of, key=lambda cell: (size_order(cell.size), cell.steps)):
        body += [line for name in RECIPES if (line := _line(rows_of[cell], cell, name))]
    return table([*heads, "training loss minus BF16's"], body)


def _line(rows: list[Row], cell: Cell, recipe: str) -> list[str]:
    """A recipe's row of the table; [] if it has no run beside BF16's."""
    held_out, trained = gap(rows, cell, recipe, BF16), gap(rows, cell, recipe, BF16, training)
    if held_out is None or trained is None:
        return []
    times = f"{tables.epochs(runs_of(rows, cell, recipe)[0]):.2f} times"
    place = [cell.size, tokens(cell), times, f"`{recipe}`", str(len(held_out.by_seed))]
    return [*place, gap_words(held_out), gap_words(trained)]
