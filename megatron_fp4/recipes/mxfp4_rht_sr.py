"""MXFP4 in the backward pass only: "Training LLMs with MXFP4" (arXiv 2502.20586).

The forward pass stays in BF16 or FP8. In dgrad and wgrad both operands go through a random Hadamard
transform, are multiplied by 3/4 so that nothing is clipped, and are rounded stochastically. Each
product is then an unbiased estimate of 9/16 of the exact one, and is multiplied by 16/9.
"""

from typing import Literal

from megatron_fp4.arithmetic.hadamard import Hadamard
from megatron_fp4.arithmetic.quantizer import WHOLE_AXIS, Quantizer
from megatron_fp4.errors import ConfigError
from megatron_fp4.recipe import HIGH_PRECISION, GemmRecipe, Recipe
from megatron_fp4.recipes.registry import register

# One scale for the tensor, as in the FP8 forward pass of the framework that the paper used.
FP8 = Quantizer(element="e4m3", scale="fp32", block=(WHOLE_AXIS, WHOLE_AXIS), rule="absmax")


@register("mxfp4-rht-sr")
def mxfp4_rht_sr(
    *,
    forward: Literal["bf16", "fp8"] = "bf16",
    hadamard: int = 64,
    signs: Literal["random", "fixed", "none"] = "random",
    stochastic: bool = True,
) -> Recipe:
    """The recipe of arXiv 2502.20586, algorithm 3.

    forward: the precision of fprop.
    hadamard: the group size of the transform; 0 is no transform. The paper uses 32 to 256.
    signs: see Hadamard.
    stochastic: false rounds to nearest, without the factor 3/4.
    Raises ConfigError for signs without a transform.
    """
    if not hadamard and signs != "random":
        raise ConfigError("hadamard=0 leaves out the transform, which signs belong to")
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
