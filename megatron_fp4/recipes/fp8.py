"""FP8 with a scale for each row: what a Hopper GPU trains in today, to compare FP4 with.

X and W are E4M3 and dY is E5M2, as in "FP8 Formats for Deep Learning" (arXiv 2209.05433). Each row
along the contracted axis has a float32 scale, from its largest magnitude. All operands of dgrad and
wgrad are quantized from the original dY, W and X, each along its own contracted axis.
"""

from megatron_fp4.arithmetic.quantizer import WHOLE_AXIS, Quantizer
from megatron_fp4.recipe import GemmRecipe, Recipe
from megatron_fp4.recipes.registry import register

FORWARD = Quantizer(element="e4m3", scale="fp32", block=(1, WHOLE_AXIS), rule="absmax")
GRADIENT = Quantizer(element="e5m2", scale="fp32", block=(1, WHOLE_AXIS), rule="absmax")


@register("fp8")
def fp8() -> Recipe:
    """E4M3 for X and W, E5M2 for dY, a scale for each row."""
    backward = GemmRecipe(GRADIENT, FORWARD)
    return Recipe(
        name="fp8",
        paper="arXiv 2209.05433",
        fprop=GemmRecipe(FORWARD, FORWARD),
        dgrad=backward,
        wgrad=backward,
        backward="raw",
    )
