"""The running text of a page, and the committed results that its sentences are held to."""

from __future__ import annotations

from pathlib import Path

from benchmarks.study import matrix, results
from benchmarks.study.__main__ import default_results
from benchmarks.study.recipes_page import CLAIMS, OWN, RECIPES
from benchmarks.study.sizes import SIZES

ROOT = Path(__file__).parents[3]


def prose(page: str) -> str:
    """The text of a page with one space between words. page: its path from the checkout."""
    return " ".join((ROOT / page).read_text().split())


def recipes_prose() -> str:
    """`prose` of the pages that compare recipes, one after the other."""
    return " ".join(prose(page) for page in (RECIPES, CLAIMS, OWN))


def rows_of(name: str) -> list[results.Row]:
    """The committed results of the matrix with this name."""
    return results.read(ROOT / default_results(matrix.read(name)))


def linears(size: str) -> int:
    """The parameters of a model's linears."""
    model = SIZES[size].model
    assert model.heads == model.query_groups
    return model.layers * model.hidden * (4 * model.hidden + 3 * model.ffn)
