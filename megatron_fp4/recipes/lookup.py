"""Finds a recipe by its name, or in a file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from megatron_fp4.errors import ConfigError
from megatron_fp4.recipe import Recipe
from megatron_fp4.recipes.registry import SUFFIXES, find_recipe, shared, with_options


def get_recipe(name: str | os.PathLike[str], **options: Any) -> Recipe:
    """The recipe called `name`: a built-in, a YAML file, or `package.module:object`.

    "auto" is another name of the built-in recipe that this project recommends (`registry.ALIASES`).

    options: options of the recipe, by keyword. A string is converted to the type of its option.
        Beside a recipe's own options there are those of `averaging.OPTIONS` and `ramping.OPTIONS`.
    Raises ConfigError for an unknown name, option or value; the message lists the known ones.
    """
    if not isinstance(name, str | os.PathLike):
        raise ConfigError(f"a recipe goes by a name or a path, not by {name!r}")
    name = os.fspath(name)
    if not name.endswith(SUFFIXES):
        return find_recipe(name, options)
    from megatron_fp4.recipes.files import load_recipe_file  # imports yaml

    return shared(with_options(name, options, lambda own: load_recipe_file(Path(name), own)))
