"""FP4 with DGE and OCC: "Optimizing LLM Training Using FP4 Quantization" (arXiv 2501.17116).

X and W are E2M1 with a float32 scale for each row: a token of X, an output channel of W. X is
clamped to two quantiles, and what was clamped off is multiplied in high precision (OCC). dY is in
FP8 (E5M2) and is multiplied by the FP4 operands of the forward pass. dW is multiplied by the factor
of the gradient estimator DGE.

This follows the paper. The authors' code (MS-AMP) differs from it: scales of X and W are powers of
two, W has one for each input channel, dY has one for the tensor, and what was clamped off is not
added in its layer. Its quantiles are elements, not interpolated between two, and ties of E2M1 are
rounded up, not to even.
"""

from typing import Literal

from megatron_fp4.arithmetic.estimators import Estimator
from megatron_fp4.arithmetic.outliers import OutlierClamp
from megatron_fp4.arithmetic.quantizer import WHOLE_AXIS, Quantizer
from megatron_fp4.errors import ConfigError
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
    """The recipe of arXiv 2501.17116, section 3.

    dge: whether to use the gradient estimator; k, clip: its parameters, see Estimator.
    occ: whether to clamp outliers; alpha, scope, compensate, residual_in_wgrad: see OutlierClamp.
    Quantiles are taken over the rank's shard. Those of tokens therefore depend on the
    tensor-parallel size in a row-parallel linear, whose features are sharded. Raises ConfigError
    for an option of a part that is left out.
    """
    estimator = Estimator(k=k, clip=clip)
    clamp = OutlierClamp(alpha, scope, compensate, residual_in_wgrad)
    if not dge and estimator != Estimator():
        raise ConfigError("dge=false leaves out the estimator, which k and clip belong to")
    if not occ and clamp != OutlierClamp():
        raise ConfigError(
            "occ=false leaves out the clamp, which alpha, scope, compensate and residual_in_wgrad "
            "belong to"
        )
    return Recipe(
        name="dge-occ",
        paper="arXiv 2501.17116, section 3",
        fprop=GemmRecipe(VECTOR, VECTOR),
        dgrad=GemmRecipe(GRADIENT, None),
        wgrad=GemmRecipe(GRADIENT, None),
        backward="forward",
        estimator=estimator if dge else None,
        outliers=clamp if occ else None,
    )
