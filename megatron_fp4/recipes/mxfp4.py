"""The naive baseline: OCP MXFP4 everywhere, with raw operands in the backward pass.

"Microscaling Data Formats for Deep Learning" (arXiv 2310.10537).
"""

from typing import Literal

from megatron_fp4.arithmetic.quantizer import Quantizer
from megatron_fp4.recipe import GemmRecipe, Recipe
from megatron_fp4.recipes.registry import register


@register("mxfp4")
def mxfp4(*, rule: Literal["floor", "ceil"] = "floor") -> Recipe:
    """rule: the block scale's rule, OCP floor or truncation-free ceil."""
    q = Quantizer(rule=rule)
    gemm = GemmRecipe(q, q)
    return Recipe(
        name="mxfp4",
        paper="arXiv 2310.10537",
        fprop=gemm,
        dgrad=gemm,
        wgrad=gemm,
        backward="raw",
    )
