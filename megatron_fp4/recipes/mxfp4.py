"""The baseline: OCP MXFP4 with nearest rounding in all GEMMs, the backward operands quantized from
the original X and W.

Source: "Microscaling Data Formats for Deep Learning" (arXiv 2310.10537).
"""

from typing import Literal

from megatron_fp4.arithmetic.quantizer import Quantizer
from megatron_fp4.recipe import GemmRecipe, Recipe
from megatron_fp4.recipes.registry import register


@register("mxfp4")
def mxfp4(*, rule: Literal["floor", "ceil", "nearest", "mse"] = "floor") -> Recipe:
    """The baseline. rule: of the block scales: floor (OCP) and nearest may clip a block's maximum,
    ceil never does, and mse takes floor's scale or twice that, by the smaller squared error."""
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
