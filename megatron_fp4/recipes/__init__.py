"""The built-in recipes, one file for each method.

Each is a function of keyword options with defaults that returns a Recipe; `register` gives it its
name. `get_recipe` finds a recipe by name, and also takes a YAML file and `package.module:object`.
"""

from megatron_fp4.recipes import (  # noqa: F401  (register)
    dge_occ,
    four_over_six,
    fp8,
    mxfp4,
    mxfp4_rht_sr,
    nvfp4_nvidia,
    quartet_2,
    tetrajet,
    tetrajet_fp8,
    ue5m3,
)
from megatron_fp4.recipes.lookup import get_recipe
from megatron_fp4.recipes.registry import (
    ALIASES,
    list_recipes,
    read_options,
    recipe_options,
    uniform_recipes,
)

__all__ = [
    "ALIASES",
    "get_recipe",
    "list_recipes",
    "read_options",
    "recipe_options",
    "uniform_recipes",
]
