"""Gaps and cells in the words of docs/recipes.md."""

from __future__ import annotations

import math

from benchmarks.study.gaps import ENOUGH, Cell, Gap
from benchmarks.study.sizes import SIZES

NOT_RUN = "not run"


def label(cell: Cell) -> str:
    """A cell in a few words, as in "26M, 200M tokens, rate 0.002"."""
    return f"{cell.size}, {tokens(cell)} tokens, rate {cell.learning_rate:g}"


def tokens(cell: Cell) -> str:
    """The tokens of a run, as in "200M"."""
    millions = cell.steps * SIZES[cell.size].tokens / 1e6
    return f"{millions:.0f}M" if millions >= 10 else f"{millions:.1f}M"


def loss_cells(found: Gap | None) -> list[str]:
    """[seeds, gap, perplexity ratio, verdict]."""
    if found is None:
        return ["", NOT_RUN, "", ""]
    return [str(len(found.by_seed)), gap_words(found), perplexity(found), found.verdict]


def perplexity(found: Gap) -> str:
    """The perplexity as a multiple of that of the other recipe."""
    return f"{math.exp(found.mean):.3f}"


def gap_words(found: Gap) -> str:
    """A gap, with its interval from ENOUGH seeds on, and with the values of fewer seeds."""
    if len(found.by_seed) >= ENOUGH and found.interval is not None:
        return "{:+.3f} ({:+.3f} to {:+.3f})".format(found.mean, *found.interval)
    values = ", ".join(f"{each:+.3f}" for each in found.by_seed.values())
    return f"{found.mean:+.3f}" + (f" ({values})" if len(found.by_seed) > 1 else "")


def gap_and_seeds(found: Gap | None) -> str:
    """A gap, with the number of its seeds."""
    return NOT_RUN if found is None else f"{gap_words(found)}, {seeds_of(found)}"


def seeds_of(found: Gap) -> str:
    """The number of a gap's seeds, as in "2 seeds"."""
    seeds = len(found.by_seed)
    return f"{seeds} seed{'s' if seeds > 1 else ''}"
