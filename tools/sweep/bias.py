"""The bias of gradients by what is rounded stochastically or transformed, on recorded tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tools.pages import table
from tools.rows import Row
from tools.sweep.axes import Combination, settled
from tools.sweep.factorial import BACKWARD, HADAMARD
from tools.sweep.results import scores
from tools.sweep.words import FORMATS, MS_EDEN

STAGE = "draws"
NEAREST = {"rounding": "nearest"}
# What is done in the backward pass: changes of a combination that rounds dY stochastically.
CHANGES = {
    "nearest": NEAREST,
    "SR of dY": {},
    "SR of dY, X and W": BACKWARD,
    "Hadamard": NEAREST | HADAMARD,
    "SR of dY, Hadamard": HADAMARD,
    "SR of dY, X and W, Hadamard": BACKWARD | HADAMARD,
    "MS-EDEN": NEAREST | MS_EDEN,
}


def bias_table(rows: list[Row]) -> list[str]:
    """A line for each format and gradient, with its relative squared bias under each of CHANGES;
    nothing under a change that the format does not have. No lines without results."""
    lines = [
        [_format(base), product, *(f"{own[c]:z.5f}" if c in own else "" for c in CHANGES)]
        for base, product, own in biases(rows)
    ]
    return table(["format", "bias of", *CHANGES], lines) if lines else []


def biases(rows: list[Row]) -> Iterator[tuple[Combination, str, dict[str, float]]]:
    """Yields the lines of the table: (combination, product, biases).

    combination: one of FORMATS, if there are results of all its changes. product: "dX" or "dW".
    biases: the relative squared bias of this product under each of CHANGES that the format has.
    """
    by_product = {each: scores(rows, STAGE, figure=f"{each.lower()} bias") for each in ("dX", "dW")}
    for base in FORMATS:
        every = {name: replace(base, **change) for name, change in CHANGES.items()}
        changed = {name: each for name, each in every.items() if settled(each) == each}
        for product, found in by_product.items():
            if all(each in found for each in changed.values()):
                yield base, product, {name: found[each] for name, each in changed.items()}


def _format(base: Combination) -> str:
    outer = ", tensor scale" if base.outer_scale == "tensor" else ""
    return f"{base.scale.upper()}, blocks of {base.block}{outer}"
