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
    """The baseline: all six operands in MXFP4, rounded to nearest.

    rule: how a block's scale follows from the block's largest magnitude. The scales of floor (that
    of the OCP specification) and nearest can be too small for it, which is then clipped. Those of
    ceil never are. mse takes floor's scale or twice that, whichever gives the smaller squared
    error.
    """
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
