"""Which linear of a model follows which recipe."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from fnmatch import fnmatchcase

from megatron_fp4.recipe import Recipe

Modules = Sequence[tuple[str, Recipe | None]]  # glob for global module names, recipe or None: BF16


def recipes_of_layers(recipe: Recipe, count: int | None) -> list[tuple[str, Recipe | None]]:
    """`Recipe.layers` as (glob, recipe or None for BF16), for a decoder with `count` layers. Raises
    ConfigError as `Layers.globs`."""
    return [
        (glob, own if own.ever_quantized else None)
        for layers in recipe.layers
        for own in (layers.recipe,)
        for glob in layers.globs(count)
    ]


def recipe_for(
    name: str,
    number: int | None,
    recipe: Recipe | None,
    modules: Modules,
    args: argparse.Namespace,
) -> Recipe | None:
    """The recipe of a linear, or None for BF16.

    The last of `modules` that matches the name decides; if none does, it is the launch's recipe, or
    BF16 in the layers that --first-last-layers-bf16 keeps.

    name: the linear's global module name. number: of its decoder layer, from 1; None in no layer.
    recipe: the launch's. modules: those of its layers, then those of --fp4-module-recipe. args:
    Megatron's arguments.
    """
    for glob, own in reversed(modules):
        if fnmatchcase(name, glob):
            return own
    return None if _kept_in_bf16(number, args) else recipe


def _kept_in_bf16(number: int | None, args: argparse.Namespace) -> bool:
    """Whether --first-last-layers-bf16 keeps this decoder layer in BF16.

    Upstream implements that flag only for Transformer Engine's linears.
    """
    if number is None or not args.first_last_layers_bf16:
        return False
    last = args.num_layers - args.num_layers_at_end_in_bf16
    return number <= args.num_layers_at_start_in_bf16 or number > last
