"""The recipe of a combination, in the words of the recipes' vocabulary alone."""

from __future__ import annotations

import inspect
from typing import Any

from megatron_fp4 import GemmRecipe, Quantizer, Recipe
from megatron_fp4.arithmetic.estimators import Estimator
from megatron_fp4.arithmetic.hadamard import Hadamard
from megatron_fp4.arithmetic.hot_channels import HotChannels
from tools.sweep.axes import Combination, check, check_of_recipe, estimates

THREE_QUARTERS = 3 / 4  # the prescale of "Training LLMs with MXFP4", arXiv 2502.20586
INFLATED = 17 / 16  # above the largest relative error of a scale of three mantissa bits
UNIT_GAIN = 128  # elements of which MS-EDEN's scales give the gain 1 (arXiv 2601.22813)
UNIT_GAIN_INFLATED = INFLATED * 0.93
# The largest block scale under an outer scale. NVFP4's is 448, E4M3's maximum; inflated
# scales, and scales of which one maps a maximum to 4, need room above it. UE5M3 ends at 61,440.
LARGEST = {"e8m0": 1.0, "e4m3": 448.0, "ue5m3": 32768.0}
LOWER = LARGEST | {"e4m3": 256.0}
_RULES = {"three-quarters": "floor", "inflated": "nearest", "unit-gain": "nearest"}
HOT_CHANNELS = HotChannels(group=32, count=1)
GRADIENT = Quantizer(element="e5m2", scale="fp32", block=(1, 0), rule="absmax")


def recipe_of(combination: Combination) -> Recipe:
    """The recipe of a combination, named by its key.

    Raises ConfigError, with the reason, if the combination contradicts itself.
    """
    c = combination
    check(c)
    prescales = 2 if c.backward == "fp4" and c.backward_rule == "three-quarters" else 0
    correction = THREE_QUARTERS**-prescales
    return Recipe(
        name=c.key,
        fprop=_forward(c),
        dgrad=_backward(c, "dgrad", correction),
        wgrad=_backward(c, "wgrad", correction),
        backward="forward" if c.operands == "forward" else "raw",
        estimator=_estimator(c) if c.estimated != "x" else None,
        x_estimator=_estimator(c) if c.estimated != "w" else None,
        outliers=HOT_CHANNELS if c.outliers == "hot-channels" else None,
        x_mean=c.x_mean,  # type: ignore[arg-type]
    )


def _estimator(c: Combination) -> Estimator | None:
    if not estimates(c):
        return None
    options: dict[str, Any] = {"form": c.estimator, "maximum": c.maximum}
    options["scale_form"] = c.scale_estimator
    if c.outer_gradient == "kept":
        options["outer_scale"] = "vjp"
    return Estimator(**options)


def _forward(c: Combination) -> GemmRecipe:
    if c.forward == "bf16":
        return GemmRecipe()
    stochastic = c.rounding == "all"
    x = _quantizer(c, c.rule, stochastic)
    w = _quantizer(c, c.rule, stochastic, square=c.weight_block == "square")
    return GemmRecipe(x, w, hadamard=_hadamard(c, "fprop"))


def _backward(c: Combination, gemm: str, correction: float) -> GemmRecipe:
    if c.backward == "bf16":
        return GemmRecipe()
    if c.backward == "fp8":
        return GemmRecipe(GRADIENT, None)
    gradient = c.rounding != "nearest"
    other = c.rounding in ("backward", "all") or (
        c.rounding == "gradients-and-x" and gemm == "wgrad"
    )
    dy = _quantizer(c, c.backward_rule, gradient)
    square = c.weight_block == "square" and gemm == "dgrad"
    b = _quantizer(c, c.backward_rule, other, square=square)
    return GemmRecipe(dy, b, hadamard=_hadamard(c, gemm), correction=correction)


def _quantizer(c: Combination, rule: str, stochastic: bool, *, square: bool = False) -> Quantizer:
    block = int(c.block)
    options: dict[str, Any] = {"element": c.element, "scale": c.scale}
    options["block"] = (block if square else 1, block)
    options["rounding"] = "stochastic" if stochastic else "nearest"
    options["rule"] = _RULES.get(rule, rule)
    if rule == "three-quarters":
        options["prescale"] = THREE_QUARTERS
    if rule == "inflated":
        options["inflate"] = INFLATED
    if rule == "unit-gain":
        options |= {"inflate": UNIT_GAIN_INFLATED, "unit_gain": UNIT_GAIN}
        options["scale_rounding"] = "stochastic"
    if c.outer_scale != "none":
        largest = LARGEST if rule in ("nearest", "up") else LOWER
        options[f"{c.outer_scale}_max"] = largest[c.scale]
    return Quantizer(**options)


def _hadamard(c: Combination, gemm: str) -> Hadamard | None:
    gemms = {
        "none": (),
        "forward": ("fprop",),
        "backward": ("dgrad", "wgrad"),
        "wgrad": ("wgrad",),
        "all": ("fprop", "dgrad", "wgrad"),
    }[c.hadamard]
    return Hadamard(int(c.group), c.signs) if gemm in gemms else None  # type: ignore[arg-type]


def combined(**chosen: str) -> Recipe:
    """A combination as a recipe for a launch: --fp4-recipe tools.sweep.building:combined.

    chosen: by axis its value, given by --fp4-recipe-option; other axes have their first value.
    Raises ConfigError if values contradict each other, and for another value than the first of an
    axis that is no part of a recipe (optimizer, loss_scale): the launch has flags for these.
    """
    combination = Combination(**chosen)
    check_of_recipe(combination, "a recipe")
    return recipe_of(combination)


combined.__signature__ = inspect.signature(Combination)  # type: ignore[attr-defined]
