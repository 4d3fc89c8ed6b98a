"""Registered recipes in studies of smaller models and shorter runs, for docs/recipes.md."""

from __future__ import annotations

from benchmarks.study import tables
from benchmarks.study.committed import earlier_numerics, runs_of_study
from benchmarks.study.entries import BF16, read_entry
from benchmarks.study.gap_words import loss_cells, tokens
from benchmarks.study.gaps import gap
from megatron_fp4 import list_recipes
from tools.pages import table

SMALL = ["recipes-3M", "few-bits", "oscillation-3M", "sweep-best"]


def small_table() -> list[str]:
    """The gaps of registered recipes in the studies SMALL: the longest runs of each."""
    heads = ["study", "size", "tokens", "learning rate", "further flags", "recipe", "seeds"]
    body = []
    for name in SMALL:
        rows, study = runs_of_study(name)
        longest = max(row["configuration"]["steps"] for row in rows)
        for cell in (cell for cell in tables.cells(rows) if cell.steps == longest):
            flags = f"`{study.flags}`" if study.flags else ""
            named = f"`{name}`{earlier_numerics(rows)}"
            place = [named, cell.size, tokens(cell), f"{cell.learning_rate:g}", flags]
            body += [
                [*place, f"`{recipe}`", *loss_cells(own)]
                for recipe in tables.recipes(rows)
                if (entry := read_entry(recipe)).name in list_recipes()
                and not entry.flags
                and (own := gap(rows, cell, recipe, BF16)) is not None
            ]
    return table([*heads, "loss minus BF16's", "perplexity ratio", "mean is"], body)
