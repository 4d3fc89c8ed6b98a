"""TetraJet: "Oscillation-Reduced MXFP4 Training for Vision Transformers" (arXiv 2502.20853).

Scales that never clip ("truncation-free"), stochastic rounding in the backward pass, and double
quantization: Q4 and Q6, the quantizers of W and X in the backward pass, read what Q2 and Q1
quantized in the forward pass. The straight-through gradient is then that of the product which the
forward pass computed. Q3 and Q5 quantize dY, for dgrad and wgrad.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any, Literal

from megatron_fp4.arithmetic.quantizer import Quantizer
from megatron_fp4.recipe import GemmRecipe, Recipe
from megatron_fp4.recipes import averaging, ramping
from megatron_fp4.recipes.registry import register


@register("tetrajet")
def tetrajet(
    *,
    rule: Literal["ceil", "floor"] = "ceil",
    backward_rounding: Literal["stochastic", "nearest"] = "stochastic",
    double_quantization: bool = True,
    bias_gradient: Literal["quantized", "raw"] = "quantized",
) -> Recipe:
    """The recipe of arXiv 2502.20853, section 3.

    rule, backward_rounding, double_quantization: the three choices of the paper's ablation. Of its
        eight combinations, stochastic rounding without double quantization was the worst.
    bias_gradient: the sum of Q3(dY), as in the authors' code, or of dY.
    """
    forward = Quantizer(rule=rule)
    operand = Quantizer(rule=rule, rounding=backward_rounding)
    backward = GemmRecipe(operand, operand)
    return Recipe(
        name="tetrajet",
        paper="arXiv 2502.20853, section 3",
        fprop=GemmRecipe(forward, forward),
        dgrad=backward,
        wgrad=backward,
        backward="forward" if double_quantization else "raw",
        bias_gradient=bias_gradient,
    )


def _variant(function: Callable[..., Recipe]) -> Callable[..., Recipe]:
    """A decorator: the function has the options of `tetrajet`, by name and type."""
    return wraps(tetrajet, assigned=("__annotations__",))(function)


@register("tetrajet-ema")
@_variant
def tetrajet_ema(**options: Any) -> Recipe:
    """TetraJet with Q-EMA, arXiv 2502.20853, section 4.2: Q2 rounds W towards its moving average.

    options: those of `tetrajet`; `averaging.OPTIONS` sets the average.
    """
    found = averaging.averaging(tetrajet(**options), averaging.DEFAULT)
    return replace(found, paper="arXiv 2502.20853, sections 3 and 4.2")


@register("tetrajet-ramping")
@_variant
def tetrajet_ramping(**options: Any) -> Recipe:
    """TetraJet with Q-Ramping, arXiv 2502.20853, section 4.3: AdamW updates elements of W whose
    codes oscillate less often, by more at once.

    options: those of `tetrajet`; `ramping.OPTIONS` sets the periods.
    """
    found = ramping.ramping(tetrajet(**options), ramping.DEFAULT)
    return replace(found, paper="arXiv 2502.20853, sections 3 and 4.3")
