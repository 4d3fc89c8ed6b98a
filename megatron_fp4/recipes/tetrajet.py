"""TetraJet: "Oscillation-Reduced MXFP4 Training for Vision Transformers" (arXiv 2502.20853).

Truncation-free scales, stochastic rounding in backward, and double quantization: Q4 and Q6
requantize what Q2 and Q1 made, so that the straight-through gradient is that of the forward pass
which really ran.
"""

from typing import Literal

from megatron_fp4.arithmetic.quantizer import Quantizer
from megatron_fp4.recipe import GemmRecipe, Recipe
from megatron_fp4.recipes.registry import register


@register("tetrajet")
def tetrajet(
    *,
    rule: Literal["ceil", "floor"] = "ceil",
    backward_rounding: Literal["stochastic", "nearest"] = "stochastic",
    double_quantization: bool = True,
    bias_gradient: Literal["quantized", "raw"] = "quantized",
) -> Recipe:
    """The three axes of the paper's ablation, and the source of the bias gradient (Q3(dY) in the
    authors' code). Stochastic rounding without double quantization is the worst of the eight."""
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
