"""Registered recipes in studies of smaller models and shorter runs, for docs/recipes.md."""

from __future__ import annotations

from functools import cache

from benchmarks.study import matrix, results, showing, tables
from benchmarks.study.gap_words import loss_cells, tokens
from benchmarks.study.gaps import gap
from benchmarks.study.matrix import BF16
from benchmarks.study.recipe_facts import RESULTS
from megatron_fp4 import list_recipes
from megatron_fp4.arithmetic.formats import NUMERICS_VERSION
from tools.pages import table
from tools.rows import Row

SMALL = ["recipes-3M", "few-bits", "oscillation-3M", "sweep-best"]


@cache  # several claims are of one study
def runs_of_study(name: str) -> tuple[list[Row], matrix.Matrix]:
    """Reads the matrix `name` and its committed results; returns (its finished runs as rows of the
    result file, the matrix)."""
    study = matrix.read(name)
    rows, _ = showing.rows_of(study, results.read(RESULTS / f"study-{name}.jsonl"))
    return rows, study


def earlier_numerics(rows: list[Row]) -> str:
    """A remark on runs of earlier numerics versions (docs/numerics.md): their random bits differ.

    It follows the name of their study in a table, as in ", numerics version 2". "" if all runs are
    of the present version.
    """
    found = {row["configuration"]["numerics"] for row in rows} - {NUMERICS_VERSION}
    return f", numerics version {', '.join(map(str, sorted(found)))}" if found else ""


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
                if recipe.partition(",")[0] in list_recipes()  # perhaps with options, but no flags
                and len(recipe.split()) == 1
                and (own := gap(rows, cell, recipe, BF16)) is not None
            ]
    return table([*heads, "loss minus BF16's", "perplexity ratio", "mean is"], body)
