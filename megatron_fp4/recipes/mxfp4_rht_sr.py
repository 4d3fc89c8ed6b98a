"""MXFP4 in the backward pass only: "Training LLMs with MXFP4" (arXiv 2502.20586).

The forward pass stays BF16 or FP8. dgrad and wgrad quantize SR(3/4 V / 2^e), which cannot clip,
after a random Hadamard transform, so each product estimates 9/16 of the true one without bias.
"""

from typing import Literal

from megatron_fp4.arithmetic.hadamard import Hadamard
from megatron_fp4.arithmetic.quantizer import WHOLE_AXIS, Quantizer
from megatron_fp4.recipe import HIGH_PRECISION, GemmRecipe, Recipe
from megatron_fp4.recipes.registry import register

# One scale for the tensor, as the FP8 forward pass of the paper's framework has it.
FP8 = Quantizer(element="e4m3", scale="fp32", block=(WHOLE_AXIS, WHOLE_AXIS), rule="absmax")


@register("mxfp4-rht-sr")
def mxfp4_rht_sr(
    *,
    forward: Literal["bf16", "fp8"] = "bf16",
    hadamard: int = 64,
    signs: Literal["random", "none"] = "random",
    stochastic: bool = True,
) -> Recipe:
    """forward: precision of fprop. hadamard: the transform's group, 0 for none (the paper takes
    32 to 256). stochastic: off leaves nearest rounding without the 3/4 prescale."""
    if stochastic:
        operand, correction = Quantizer(prescale=3 / 4, rounding="stochastic"), 16 / 9
    else:
        operand, correction = Quantizer(), 1.0
    transform = Hadamard(hadamard, signs) if hadamard else None
    backward = GemmRecipe(operand, operand, transform, correction)
    return Recipe(
        name="mxfp4-rht-sr",
        paper="arXiv 2502.20586, algorithm 3",
        fprop=HIGH_PRECISION if forward == "bf16" else GemmRecipe(FP8, FP8),
        dgrad=backward,
        wgrad=backward,
        backward="raw",
    )
