"""Stage `draws`: bias and variance of the gradients over many draws, on recorded tensors."""

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
    """The error of Y, and for dX and dW the relative squared bias and variance of one draw, each
    as the mean over the linears; "score": the error of Y plus both biases.

    A bias is the squared error of the mean over all draws, less the variance of that mean; it may
    be a little below 0. The reference is the product of the BF16 tensors.
    """
    recipe = recipe_of(combination)
    found = [_of(recipe, each, seed) for each in recorded]
    means = {name: statistics.mean(each[name] for each in found) for name in found[0]}
    return means | {"score": means["y error"] + means["dx bias"] + means["dw bias"]}


def _of(recipe: Recipe, each: Recorded, seed: int) -> Figures:
    reference = each.products()
    # Without random bits all draws are equal.
    draws = DRAWS if recipe.draws else 1
    sums: dict[str, Tensor] = {}
    squares: dict[str, Tensor] = {}
    for step in range(draws):
        for name, product in multiplied(recipe, each, seed, step).items():
            sums[name] = sums.get(name, 0) + product
            squares[name] = squares.get(name, 0) + product.square()
    figures = {"y error": error(sums["y"] / draws, reference["y"])}
    for name in ("dx", "dw"):
        mean, scale = sums[name] / draws, reference[name].square().sum()
        spread = (squares[name] / draws - mean.square()).sum() * draws / max(draws - 1, 1)
        variance = finite(spread / scale)
        figures[f"{name} bias"] = error(mean, reference[name]) - variance / draws
        figures[f"{name} variance"] = variance
    return figures


STAGE = Stage(
    name="draws",
    what=f"bias and variance of dX and dW of recorded linears, {DRAWS} draws",
    evaluate=evaluate,
    seeds=1,
    score="score",
    settings={"draws": DRAWS},
    recorded=True,
)
