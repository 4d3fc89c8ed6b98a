"""The built-in recipes, with Hadamard groups that divide the sizes of small models."""

from __future__ import annotations

from typing import Any

from megatron_fp4 import Recipe, get_recipe

# The options of recipes whose own groups are larger.
OPTIONS = {"quartet-2": {"hadamard": 32}}
# Flags of a model that leaves a recipe layers of its own beside those that follow another one.
MODEL = {"tetrajet-fp8": ["--num-layers", "3"]}


def small_recipe(name: str, **options: Any) -> Recipe:
    """The recipe of this name, with these options, for sizes that are multiples of 64."""
    return get_recipe(name, **OPTIONS.get(name, {}) | options)


def flags_of(name: str) -> list[str]:
    """The flags of a launch with `small_recipe`, for the end of a command line.

    Some recipes need a larger model: its flags are among them, and override those given before.
    """
    options = [f"--fp4-recipe-option={key}={value}" for key, value in OPTIONS.get(name, {}).items()]
    return ["--fp4-recipe", name, *options, *MODEL.get(name, [])]
