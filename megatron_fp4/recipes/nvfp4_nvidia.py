"""NVIDIA's NVFP4 recipe: "Pretraining Large Language Models with NVFP4" (arXiv 2509.25149).

All operands are NVFP4: E2M1 in blocks of 16 with E4M3 scales, and a scale for the tensor. W has
blocks of 16 x 16, so that fprop and dgrad, which contract different axes of it, multiply the same
numbers. Both operands of wgrad go through a Hadamard transform in groups of 16, with the same signs
in all of the training. dY is rounded stochastically, all else to nearest.

The paper also keeps about 15% of the linears in BF16, most of them in the last layers. Which ones
are is chosen by the launch: `--first-last-layers-bf16` or `--fp4-module-recipe`.

Block scales are rounded to nearest. One that is rounded down maps its block's largest magnitude
beyond 6, where it is clipped, which makes the gradient about 0.4% too small on Gaussian data.
`gradient_rule="up"` clips nothing; it is this project's. The vector of signs is this project's too.
"""

from typing import Literal

from megatron_fp4.arithmetic.hadamard import Hadamard
from megatron_fp4.arithmetic.quantizer import NVFP4, Quantizer
from megatron_fp4.recipe import GemmRecipe, Recipe
from megatron_fp4.recipes.registry import register


@register("nvfp4-nvidia")
def nvfp4_nvidia(
    *,
    square_weights: bool = True,
    stochastic: bool = True,
    gradient_rule: Literal["nearest", "up"] = "nearest",
    hadamard: int = 16,
    signs: Literal["fixed", "random", "none"] = "fixed",
) -> Recipe:
    """The recipe of arXiv 2509.25149, section 4.

    square_weights: false takes blocks of 1 x 16 of W, along the axis that is contracted.
    stochastic, gradient_rule, hadamard, signs: see `backward_gemms`.
    """
    w = Quantizer(
        scale="e4m3",
        block=(16, 16) if square_weights else (1, 16),
        rule="nearest",
        tensor_max=448.0,
    )
    dgrad, wgrad = backward_gemms(
        w,
        NVFP4,
        stochastic=stochastic,
        gradient_rule=gradient_rule,
        hadamard=hadamard,
        signs=signs,
    )
    return Recipe(
        name="nvfp4-nvidia",
        paper="arXiv 2509.25149, section 4",
        fprop=GemmRecipe(NVFP4, w),
        dgrad=dgrad,
        wgrad=wgrad,
        backward="raw",
    )


def backward_gemms(
    w: Quantizer,
    x: Quantizer,
    *,
    stochastic: bool,
    gradient_rule: Literal["nearest", "up"],
    hadamard: int,
    signs: Literal["fixed", "random", "none"],
) -> tuple[GemmRecipe, GemmRecipe]:
    """dgrad and wgrad of the recipe, of the unquantized W and X with these quantizers.

    stochastic: whether dY is rounded stochastically. gradient_rule: how its block scales are
    rounded. hadamard: the group size of the transform in wgrad; 0 is no transform. signs: see
    Hadamard.
    """
    dy = Quantizer(
        scale="e4m3",
        block=(1, 16),
        rule=gradient_rule,
        rounding="stochastic" if stochastic else "nearest",
        tensor_max=448.0,
    )
    transform = Hadamard(hadamard, signs) if hadamard else None
    return GemmRecipe(dy, w), GemmRecipe(dy, x, transform)
