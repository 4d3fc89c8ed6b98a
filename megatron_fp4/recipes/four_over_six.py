"""Four over six: "Four Over Six: More Accurate NVFP4 Quantization with Adaptive Block Scaling"
(arXiv 2512.02010).

E2M1 has nothing between 4 and 6, where the largest magnitudes of a block have their largest errors.
Each block of X and W is scaled so that its largest magnitude becomes 6 or 4, whichever gives the
smaller squared error. A block scale that maps it to 4 is 1.5 times as large. The tensor scale
leaves room for that: the largest block scale is 256 where it maps to 6, and not E4M3's 448.

The backward pass is that of NVIDIA's NVFP4 recipe (`nvfp4-nvidia`), with W and X quantized by the
same rule. dY is rounded stochastically and is always scaled to 6.

Choices of this project, where the authors' training code differs: blocks of 1 x 16 of W (16 x 16
there); dY scaled to 6 (by four over six too there, and since March 2026 with scales that stochastic
rounding does not clip, as `gradient_rule="up"` has them here); and the sum of squared errors (other
errors as well there).
"""

from typing import Literal

from megatron_fp4.arithmetic.quantizer import get_quantizer
from megatron_fp4.recipe import GemmRecipe, Recipe
from megatron_fp4.recipes.nvfp4_nvidia import backward_gemms
from megatron_fp4.recipes.registry import register


@register("four-over-six")
def four_over_six(
    *,
    stochastic: bool = True,
    gradient_rule: Literal["nearest", "up"] = "nearest",
    hadamard: int = 16,
    signs: Literal["fixed", "random", "none"] = "fixed",
) -> Recipe:
    """The recipe of arXiv 2512.02010.

    stochastic, gradient_rule, hadamard, signs: of the backward pass; see
        `nvfp4_nvidia.backward_gemms`.
    """
    operand = get_quantizer("nvfp4-four-over-six")
    dgrad, wgrad = backward_gemms(
        operand,
        operand,
        stochastic=stochastic,
        gradient_rule=gradient_rule,
        hadamard=hadamard,
        signs=signs,
    )
    return Recipe(
        name="four-over-six",
        paper="arXiv 2512.02010",
        fprop=GemmRecipe(operand, operand),
        dgrad=dgrad,
        wgrad=wgrad,
        backward="raw",
    )
