"""The recipe that a linear of a checkpoint followed when it was saved."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import pytest

from megatron_fp4 import Phase, Recipe, get_recipe
from megatron_fp4.convert.keys import address
from megatron_fp4.convert.layers import quantizer_of
from megatron_fp4.convert.trained_recipes import TrainedRecipes
from megatron_fp4.recipes import content

TETRAJET, FP8 = get_recipe("tetrajet"), get_recipe("fp8")
LATE = replace(TETRAJET, phases=(Phase(0.5, FP8), Phase(0.9, Recipe("bf16"))))
EARLY = Recipe("bf16 first", phases=(Phase(0.5, TETRAJET),))


class Saved:
    """A checkpoint of a run of 10 steps."""

    def __init__(self, recipe: Recipe, step: int) -> None:
        self.step = step
        self.found = argparse.Namespace(
            fp4_recipe_content=content.write(recipe),
            train_iters=10,
            first_last_layers_bf16=False,
        )

    def args(self) -> argparse.Namespace:
        return self.found

    def common(self) -> dict[str, Any]:
        return {"iteration": self.step}


@pytest.mark.parametrize(
    ("recipe", "step", "expected"),
    [
        (TETRAJET, 10, TETRAJET),
        (LATE, 5, LATE),  # the last of these steps is number 4, from 0
        (LATE, 6, FP8),
        (LATE, 9, FP8),
        (LATE, 10, Recipe("bf16")),
        (EARLY, 5, EARLY),
        (EARLY, 6, TETRAJET),
    ],
)
def test_the_phase_of_the_last_step_counts(recipe: Recipe, step: int, expected: Recipe) -> None:
    recipes = TrainedRecipes(Saved(recipe, step))  # type: ignore[arg-type]
    assert recipes.of("decoder.layers.1.mlp.linear_fc1") == expected
    before = recipe.in_turn[: recipe.in_turn.index(expected) + 1]
    assert recipes.until_the_save("decoder.layers.1.mlp.linear_fc1") == before[::-1]
    at = address("decoder.layers.mlp.linear_fc1.weight")
    assert quantizer_of(recipes, at, 1, None) == expected.fprop.b
