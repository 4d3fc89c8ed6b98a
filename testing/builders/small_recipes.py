"""The built-in recipes, with Hadamard groups that divide the sizes of small models."""

from __future__ import annotations

from typing import Any

from megatron_fp4 import Recipe, get_recipe

# The options of recipes whose own groups are larger.
OPTIONS = {"quartet-2": {"hadamard": 32}}


def small_recipe(name: str, **options: Any) -> Recipe:
    """The recipe of this name, with these options, for sizes that are multiples of 64."""
    return get_recipe(name, **OPTIONS.get(name, {}) | options)


def flags_of(name: str) -> list[str]:
    """The flags of a launch with `small_recipe`."""
    options = [f"{key}={value}" for key, value in OPTIONS.get(name, {}).items()]
    return ["--fp4-recipe", name, *(f"--fp4-recipe-option={option}" for option in options)]
