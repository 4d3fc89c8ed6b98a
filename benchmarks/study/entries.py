"""Entries of a matrix: what a run trains, as in "tetrajet-ema,ema_share=0.02 --fp4-seed 1"."""

from __future__ import annotations

from typing import NamedTuple

from megatron_fp4 import Recipe
from megatron_fp4.estimate.plans import recipe_named
from megatron_fp4.recipes import read_options
from megatron_fp4.recipes.registry import SUFFIXES

BF16 = "bf16"  # the entry of a run without a recipe


class Entry(NamedTuple):
    """An entry in its parts.

    name: of a recipe, the path of a recipe file, or BF16. options: of the recipe, as KEY=VALUE.
    flags: the further flags of the launch.
    """

    name: str
    options: tuple[str, ...]
    flags: tuple[str, ...]

    @property
    def is_bf16(self) -> bool:
        """Whether the run trains without a recipe."""
        return self.name == BF16

    @property
    def is_file(self) -> bool:
        """Whether the recipe is a file, whose content may change under its name."""
        return self.name.endswith(SUFFIXES)


def read_entry(text: str) -> Entry:
    """The parts of an entry, which has at least one word."""
    recipe, *flags = text.split()
    name, *options = recipe.split(",")
    return Entry(name, tuple(options), tuple(flags))


def is_bf16(text: str) -> bool:
    """Whether an entry trains without a recipe."""
    return read_entry(text).is_bf16


def recipe_of(text: str) -> Recipe:
    """The recipe of an entry; that of BF16 quantizes nothing. Raises ConfigError if there is no
    such recipe or option."""
    entry = read_entry(text)
    return recipe_named(entry.name, **read_options(entry.options))
