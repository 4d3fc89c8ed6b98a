"""FP4 forward with DGE and OCC: "Optimizing LLM Training Using FP4 Quantization" (2501.17116).

Vector-wise E2M1 X (a scale for each token) and W (one for each output channel); X clamped to its
quantiles and compensated; dY in E5M2 against the saved FP4 operands; DGE on the weight gradient.
"""

from typing import Literal

from megatron_fp4.arithmetic.estimators import DGE
from megatron_fp4.arithmetic.outliers import OutlierClamp
from megatron_fp4.arithmetic.quantizer import WHOLE_AXIS, Quantizer
from megatron_fp4.recipe import GemmRecipe, Recipe
from megatron_fp4.recipes.registry import register

VECTOR = Quantizer(scale="fp32", block=(1, WHOLE_AXIS), rule="absmax")
GRADIENT = Quantizer(element="e5m2", scale="fp32", block=(1, WHOLE_AXIS), rule="absmax")


@register("dge-occ")
def dge_occ(
    *,
    dge: bool = True,
    k: float = 5.0,
    clip: float = 3.0,
    occ: bool = True,
    alpha: float = 0.99,
    scope: Literal["token", "channel", "tensor"] = "token",
    compensate: bool = True,
    residual_in_wgrad: bool = True,
) -> Recipe:
    """dge, k, clip: the gradient estimator. occ, alpha, scope, compensate, residual_in_wgrad: the
    outlier clamp (see OutlierClamp). Token-wise quantiles of a row-parallel input are taken over
    the local shard: the one place where this recipe depends on the tensor-parallel size."""
    return Recipe(
        name="dge-occ",
        paper="arXiv 2501.17116, section 3",
        fprop=GemmRecipe(VECTOR, VECTOR),
        dgrad=GemmRecipe(GRADIENT, None),
        wgrad=GemmRecipe(GRADIENT, None),
        backward="forward",
        estimator=DGE(k, clip) if dge else None,
        outliers=OutlierClamp(alpha, scope, compensate, residual_in_wgrad) if occ else None,
    )
