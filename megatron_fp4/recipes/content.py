"""Recipes as the JSON text that checkpoints record in Megatron's arguments."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from megatron_fp4.errors import ConfigError
from megatron_fp4.recipe import GEMMS, Recipe
from megatron_fp4.recipes.assignment import Modules
from megatron_fp4.recipes.files import recipe_of_fields

_WHERE = "the recipe that the checkpoint records"


def write(recipe: Recipe) -> str:
    """All fields of a recipe, as JSON."""
    return json.dumps(asdict(recipe), default=repr)


def read(text: str) -> Recipe:
    """The recipe that `write` wrote, in this version or an earlier one.

    Raises ConfigError for text that is no recipe, and for unknown keys and values, as of a later
    version.
    """
    return recipe_of_fields(fields_of(text), _WHERE)


def recorded(args: argparse.Namespace) -> tuple[Recipe | None, Modules]:
    """The recipe and the modules, for `recipe_for`, of the run whose arguments a checkpoint
    records. Raises ConfigError as `read`."""

    def recipe(text: str | None) -> Recipe | None:
        return read(text) if text else None

    modules = getattr(args, "fp4_module_contents", [])
    own = recipe(getattr(args, "fp4_recipe_content", None))
    return own, [(glob, recipe(text)) for glob, text in modules]


def fields_of(text: str) -> dict[str, Any]:
    """The fields that `write` wrote, by the names of this version.

    In place of `phases` earlier versions had `bf16_after`, a share of training, and `bf16_gemms`,
    which returned to BF16 after it. Raises ConfigError for other text.
    """
    try:
        found = dict(json.loads(text))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{_WHERE} cannot be read: {error}") from error
    found.pop("description", None)  # which recipes once carried
    after, gemms = found.pop("bf16_after", None), found.pop("bf16_gemms", GEMMS)
    if after is not None:
        late = recipe_of_fields(found, _WHERE).without(gemms)
        found["phases"] = [{"after": after, "recipe": json.loads(write(late))}]
    return found
