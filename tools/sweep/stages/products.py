"""Stage `products`: how far the products of the three GEMMs, and their quantized operands, are from
those in BF16, on tensors that were recorded in a training. Stochastic rounding is drawn once. A
combination takes less than a second."""

from __future__ import annotations

import math
import statistics

from torch import Tensor

from megatron_fp4 import Recipe, linear, quantize
from megatron_fp4.arithmetic.hadamard import transform
from megatron_fp4.metrics.operands import operand_metrics, operand_sums
from tools.sweep.axes import Combination
from tools.sweep.building import recipe_of
from tools.sweep.stages.stage import Figures, Stage
from tools.sweep.tensors import Recorded

GRADIENTS = 0.1  # the weight of the errors of dX and dW in the score


def evaluate(combination: Combination, recorded: list[Recorded], seed: int) -> Figures:
    """For each product the mean over the linears of its relative squared error ("y error") and of
    its gain less 1 ("y gain"), those of `operand_figures`, and "score".

    The reference is the product of the BF16 tensors in float64. The gain is ⟨found, reference⟩ /
    ⟨reference, reference⟩: a gradient whose gain is 1 has the right length in its own direction.

    The score is the error of Y plus GRADIENTS times the errors of dX and dW. These count less
    because their random part averages out over steps; every step repeats the error of Y.
    """
    recipe = recipe_of(combination)
    figures: dict[str, list[float]] = {}
    for each in recorded:
        found = multiplied(recipe, each, seed)
        for name, reference in each.products().items():
            figures.setdefault(f"{name} error", []).append(error(found[name], reference))
            figures.setdefault(f"{name} gain", []).append(gain(found[name], reference) - 1)
        for name, figure in operand_figures(recipe, each, seed).items():
            figures.setdefault(name, []).append(figure)
    means = {name: statistics.mean(values) for name, values in figures.items()}
    return means | {"score": _score(means)}


def _score(means: Figures) -> float:
    return means["y error"] + GRADIENTS * (means["dx error"] + means["dw error"])


def multiplied(recipe: Recipe, each: Recorded, seed: int, step: int = 0) -> dict[str, Tensor]:
    """The products of the recorded tensors under a recipe, in float64, by name."""
    x, weight = each.x.clone().requires_grad_(), each.weight.clone().requires_grad_()
    y = linear(x, weight, recipe=recipe, seed=seed, step=step, name=each.name)
    y.backward(each.gradient)
    assert x.grad is not None and weight.grad is not None
    return {"y": y.detach().double(), "dx": x.grad.double(), "dw": weight.grad.double()}


def operand_figures(recipe: Recipe, each: Recorded, seed: int) -> Figures:
    """For fprop's X and W and dgrad's dY ("x", "w", "dy"), blocked along the axis that the GEMM
    contracts, the relative squared error ("x error"), and the shares of elements that became zero
    ("x zeros", of those that were not) and that were clipped ("x clipped"). 0 of what is not
    quantized. Where a GEMM transforms its operands they are of the transformed matrix, without
    random signs.
    """
    x = each.x - each.x.mean(0) if recipe.x_mean == "subtracted" else each.x
    operands = {
        "x": (x, recipe.fprop.a, recipe.fprop),
        "w": (each.weight, recipe.fprop.b, recipe.fprop),
        "dy": (each.gradient, recipe.dgrad.a, recipe.dgrad),
    }
    figures: Figures = {}
    for name, (matrix, quantizer, gemm) in operands.items():
        found = {"error": 0.0, "zeros": 0.0, "clipped": 0.0}
        if quantizer is not None:
            if gemm.hadamard is not None:
                matrix = transform(matrix, gemm.hadamard.group)
            quantized = quantize(matrix, quantizer, seed=seed)
            exact = matrix.double() * quantizer.prescale
            metrics = operand_metrics(operand_sums(matrix, quantized).tolist())
            found = {"error": error(quantized.dequantize(exact.dtype), exact)}
            found |= {key: metrics[key] for key in ("zeros", "clipped")}
        figures |= {f"{name} {key}": value for key, value in found.items()}
    return figures


def error(found: Tensor, reference: Tensor) -> float:
    """The squared error relative to the reference's squares."""
    return finite((found - reference).square().sum() / reference.square().sum())


def gain(found: Tensor, reference: Tensor) -> float:
    """⟨found, reference⟩ / ⟨reference, reference⟩."""
    return finite((found * reference).sum() / reference.square().sum())


def finite(value: Tensor) -> float:
    """The value as a number. Raises ArithmeticError for NaN and Inf."""
    number = float(value)
    if not math.isfinite(number):
        raise ArithmeticError("a product is not finite")
    return number


STAGE = Stage(
    name="products",
    what="errors of Y, dX and dW of recorded linears, one draw",
    evaluate=evaluate,
    seeds=1,
    score="score",
    settings={"gradients": GRADIENTS},
    recorded=True,
)
