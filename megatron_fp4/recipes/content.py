"""Recipes as the JSON text that checkpoints record in Megatron's arguments."""

from __future__ import annotations

import json
from dataclasses import asdict

from megatron_fp4.recipe import Recipe
from megatron_fp4.recipes.files import recipe_of_fields


def write(recipe: Recipe) -> str:
    """All fields of a recipe, as JSON."""
    return json.dumps(asdict(recipe), default=repr)


def read(text: str) -> Recipe:
    """The recipe that `write` wrote.

    Raises ConfigError for unknown keys and values, as of another version.
    """
    return recipe_of_fields(json.loads(text), "the recipe that the checkpoint records")
