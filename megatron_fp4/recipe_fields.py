"""Checks which fields of a Recipe go together."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from megatron_fp4.errors import ConfigError, check_choices
from megatron_fp4.gemms import GEMMS, OPERANDS

if TYPE_CHECKING:
    from megatron_fp4.recipe import GemmRecipe, Recipe


def check_fields(recipe: Recipe) -> None:
    """Raises ConfigError for fields that contradict each other."""
    check_choices(recipe)
    _check_average(recipe)
    _check_ramping(recipe)
    _check_estimators(recipe)
    _check_x_mean(recipe)
    if recipe.backward == "forward" and _prescale(recipe.fprop) != 1.0:
        raise ConfigError(
            "backward: forward reads fprop's operands, which contain its prescale: set prescale "
            "1 in fprop, or backward: raw"
        )
    _check_bias_gradient(recipe)
    _check_phases(recipe)
    if nested := [each.recipe.name for each in recipe.layers if each.recipe.layers]:
        raise ConfigError(f"recipe {nested[0]} of some layers has layers of its own")
    for gemm in GEMMS:
        _check_correction(recipe, gemm)


def _check_bias_gradient(recipe: Recipe) -> None:
    if recipe.bias_gradient == "raw":
        return
    dy, w = recipe.dgrad.a, recipe.fprop.b
    if dy is None or recipe.dgrad.hadamard or dy.prescale != 1.0:
        raise ConfigError(
            "a quantized bias gradient needs a quantized dY in dgrad without Hadamard or "
            "prescale; use bias_gradient: raw"
        )
    folds = (recipe.backward, recipe.dgrad.b, recipe.fprop.hadamard) == ("forward", None, None)
    if folds and w is not None and w.scales_product:
        raise ConfigError(
            "dgrad multiplies dY by fprop's scales of rows or of the tensor of W before it "
            "quantizes dY, which a quantized bias gradient would sum; use bias_gradient: raw"
        )


def _check_estimators(recipe: Recipe) -> None:
    for letter, estimator in (("w", recipe.estimator), ("x", recipe.x_estimator)):
        if estimator is None:
            continue
        quantizer, name = recipe.quantizer("fprop", letter), letter.upper()
        if quantizer is None or not quantizer.format.packed or quantizer.unit_gain:
            raise ConfigError(
                f"an estimator of {name} needs an E2M1 or E1M2 quantizer of it in fprop, with "
                "no unit_gain"
            )
        outer = quantizer.tensor_max or quantizer.row_max
        if estimator.outer_scale != "straight-through" and not outer:
            raise ConfigError(
                f"outer_scale of the estimator of {name} needs a scale to go through: give its "
                "quantizer in fprop a tensor_max or a row_max"
            )
        if estimator.scale_form != "straight-through" and quantizer.rule != "nearest":
            change = f"give its rule nearest, not {quantizer.rule}"
            raise ConfigError(
                f"scale_form of the estimator of {name} is for scales that its quantizer in fprop "
                f"rounds to nearest: {'leave it out' if quantizer.scale == 'fp32' else change}"
            )
    if recipe.x_estimator is not None and recipe.outliers is not None:
        raise ConfigError(
            "an estimator of X takes no outliers, which pass by X's quantizer: leave one out"
        )


def _check_x_mean(recipe: Recipe) -> None:
    if recipe.x_mean == "kept":
        return
    if recipe.fprop.a is None and recipe.wgrad.b is None:
        raise ConfigError("x_mean: subtracted needs a quantizer of X, in fprop or in wgrad")
    if recipe.x_estimator is not None or recipe.outliers is not None:
        raise ConfigError(
            "x_mean: subtracted takes neither an estimator of X nor outliers, which are of X "
            "with its mean: leave one out"
        )


def _check_average(recipe: Recipe) -> None:
    rounded = {
        (gemm, letter)
        for gemm in GEMMS
        for letter in OPERANDS[gemm]
        if (quantizer := recipe.quantizer(gemm, letter)) and quantizer.rounding == "ema"
    }
    if any(letter != "w" for _, letter in rounded):
        raise ConfigError("rounding ema takes an average, which is kept of W alone")
    if bool(rounded) != (recipe.weight_average is not None):
        raise ConfigError(
            "rounding ema of W and weight_average belong together: give both or neither"
        )
    if any(recipe.gemm(gemm).hadamard is not None for gemm, _ in rounded):
        raise ConfigError("rounding ema takes no Hadamard transform: leave one out")


def _check_ramping(recipe: Recipe) -> None:
    if recipe.ramping is None:
        return
    w = recipe.fprop.b
    form = None if w is None else (w.element, w.scale, w.row_max)
    if w is None or recipe.fprop.hadamard or form != ("e2m1", "e8m0", 0.0):
        raise ConfigError(
            "ramping follows the codes of W in fprop: give W a quantizer of E2M1 with E8M0 "
            "scales there, no row_max and no Hadamard transform"
        )
    if w.rounding != "nearest":
        raise ConfigError(
            f"ramping follows a W that fprop rounds to nearest, not {w.rounding}; leave one out"
        )


def _check_phases(recipe: Recipe) -> None:
    begun = -1.0
    for phase in recipe.phases:
        share, late = phase.after, phase.recipe
        if not (isinstance(share, (int, float)) and 0.0 <= share <= 1.0):
            raise ConfigError(f"a phase begins after a share of training in [0, 1], not {share!r}")
        if share <= begun:
            raise ConfigError(f"a phase after {share:g} does not begin after the one before it")
        begun = share
        if late.phases or late.layers:
            raise ConfigError(
                f"recipe {late.name} of a phase has phases or layers of its own: give one without"
            )
        # Optimizers keep both from the first step on.
        if late.weight_average not in (None, recipe.weight_average):
            raise ConfigError(
                f"recipe {late.name} of a phase has another weight_average: one that is kept "
                "from the first step on may end with a phase, but not begin or change"
            )
        if late.ramping != recipe.ramping:
            raise ConfigError(
                f"recipe {late.name} of a phase has another ramping: the optimizer's is the "
                "same from the first step to the last, so give every phase that, or none any"
            )


def _check_correction(recipe: Recipe, gemm: str) -> None:
    correction, needed = recipe.gemm(gemm).correction, 1 / _prescale(recipe.gemm(gemm))
    if not math.isclose(correction, needed, rel_tol=1e-9):
        raise ConfigError(
            f"{gemm}'s correction is {correction!r} but its operands' prescales need {needed!r}"
        )


def _prescale(gemm: GemmRecipe) -> float:
    return math.prod(q.prescale for q in (gemm.a, gemm.b) if q is not None)
