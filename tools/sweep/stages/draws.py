"""Stage `draws`: bias and variance of the products over many draws, on recorded tensors."""

from __future__ import annotations

import statistics

from torch import Tensor

from megatron_fp4 import Recipe
from tools.sweep.axes import Combination
from tools.sweep.building import recipe_of
from tools.sweep.stages.products import error, finite, multiplied
from tools.sweep.stages.stage import Figures, Stage
from tools.sweep.tensors import Recorded

DRAWS = 16


def evaluate(combination: Combination, recorded: list[Recorded], seed: int) -> Figures:
    """For Y, dX and dW the relative squared bias and the variance of one draw ("y bias", "dx
    variance"), each as the mean over the linears, and "score".

    A bias is the squared error of the mean over all draws, less the variance of that mean; it may
    be a little below 0. The reference is the product of the BF16 tensors.

    The score is the expected squared error of Y in one draw, which is the sum of its bias and its
    variance, plus the biases of dX and dW, whose variance averages out over steps.
    """
    recipe = recipe_of(combination)
    found = [_of_linear(recipe, each, seed) for each in recorded]
    means = {name: statistics.mean(each[name] for each in found) for name in found[0]}
    score = means["y bias"] + means["y variance"] + means["dx bias"] + means["dw bias"]
    return means | {"score": score}


def _of_linear(recipe: Recipe, each: Recorded, seed: int) -> Figures:
    reference = each.products()
    # Without random bits all draws are equal.
    draws = DRAWS if recipe.draws else 1
    sums: dict[str, Tensor] = {}
    squares: dict[str, Tensor] = {}
    for step in range(draws):
        for name, product in multiplied(recipe, each, seed, step).items():
            sums[name] = sums.get(name, 0) + product
            squares[name] = squares.get(name, 0) + product.square()
    figures = {}
    for name, exact in reference.items():
        mean = sums[name] / draws
        spread = (squares[name] / draws - mean.square()).sum() * draws / max(draws - 1, 1)
        variance = finite(spread / exact.square().sum())
        figures[f"{name} bias"] = error(mean, exact) - variance / draws
        figures[f"{name} variance"] = variance
    return figures


STAGE = Stage(
    name="draws",
    what=f"bias and variance of Y, dX and dW of recorded linears, {DRAWS} draws",
    evaluate=evaluate,
    seeds=1,
    score="score",
    settings={"draws": DRAWS},
    recorded=True,
)
