"""Which recipe has the lower loss after the same time, for docs/recipes.md.

A recipe whose steps have s times the speed of another's reads s times the tokens in the same time,
which is log2(s) doublings. If a doubling of the tokens lowers the loss by d, and the gap between
the two after the same tokens does not change, its loss after the same time is gap - d log2(s) above
that of the other. So it is ahead where d is above gap / log2(s).
"""

from __future__ import annotations

import math

from benchmarks.study.comparison import Comparison
from benchmarks.study.entries import BF16, recipe_of
from benchmarks.study.gaps import gap
from benchmarks.study.recipe_facts import step_of
from tools.pages import table

OTHERS = [BF16, "fp8"]  # what the recipes are compared with


def equal_time_table(found: Comparison) -> list[str]:
    """The registered recipes with a measured step, against each of OTHERS.

    The gaps are those of the first cell of the comparison, paired by seed.
    """
    heads = ["recipe"]
    for other in OTHERS:
        heads += [f"speed, times `{other}`", f"loss minus `{other}`", f"ahead of `{other}` where d"]
    names = [name for name in found.registered if step_of(name, recipe_of(name)) is not None]
    body = [[f"`{name}`", *_against_all(found, name)] for name in names]
    return table(heads, body)


def _against_all(found: Comparison, name: str) -> list[str]:
    """A recipe's cells: [speed, gap, where it is ahead] for each of OTHERS; empty against itself
    and where no seed has both."""
    cells = []
    for other in OTHERS:
        own = gap(found.rows, found.cells[0], name, other)
        if own is None or name == other:
            cells += ["", "", ""]
            continue
        speed = ratio_of(name) / ratio_of(other)
        cells += [f"{speed:.2f}", f"{own.mean:+.3f}", ahead(own.mean, speed)]
    return cells


def ratio_of(name: str) -> float:
    """The measured speed of a step of a recipe of a matrix, in times of BF16's."""
    found = step_of(name, recipe_of(name))
    assert found is not None
    return found.ratio


def ahead(loss: float, speed: float) -> str:
    """Where a recipe has the lower loss after the same time, as a condition on d, the loss by which
    a doubling of the tokens lowers the other's: "is above 0.036", "is below 0.036", "always" or
    "never".

    loss: the recipe's loss minus the other's after the same tokens. speed: in times of the other's.
    """
    doublings = math.log2(speed)
    if loss > 0 >= doublings or loss >= 0 > doublings:
        return "never"
    if doublings >= 0 >= loss:
        return "always"
    return f"is {'above' if doublings > 0 else 'below'} {loss / doublings:.3f}"
