"""Quartet II: "Accurate LLM Pre-Training in NVFP4 by Improved Unbiased Gradient Estimation"
(arXiv 2601.22813).

In fprop X and W are NVFP4 in blocks of 1 x 16, scaled by four over six and rounded to nearest.
dgrad and wgrad quantize all their operands by MS-EDEN: dY, and W and X from the codes of fprop.
MS-EDEN is a Hadamard transform with random signs in groups of 128, nearest rounding, and then
scales that give each group a gain of 1, rounded stochastically (`Quantizer.unit_gain`). Its squared
error is less than half of that of stochastic rounding.

Scales are multiplied by 17/16 times 0.93 before elements are rounded, by which the error is about
the smallest; a few magnitudes are clipped then, and the gain makes up for it. The tensor scale is
for 256, so that no scale exceeds E4M3's 448 when it is multiplied for the gain.

Each operand is unbiased over rotations, as far as a Hadamard transform is a random rotation. The
two operands of a product share their rotation, and so have errors in common where they resemble
each other: a product of a matrix with itself keeps a bias.

The authors' code multiplies the tensor scale by 17/16 times 0.93, and not the block scales. Its
kernels give each block of 16 a gain of 1, and not each group of 128 as its training code does. It
has the same signs in dgrad and wgrad, which have their own here.
"""

from megatron_fp4.arithmetic.hadamard import Hadamard
from megatron_fp4.arithmetic.quantizer import NVFP4, Quantizer, get_quantizer
from megatron_fp4.errors import ConfigError
from megatron_fp4.recipe import GemmRecipe, Recipe
from megatron_fp4.recipes.registry import register

INFLATED = 17 / 16 * 0.93


@register("quartet-2")
def quartet_2(*, four_over_six: bool = True, hadamard: int = 128, unit_gain: bool = True) -> Recipe:
    """The recipe of arXiv 2601.22813: section 3.3 and Algorithm 1 have MS-EDEN.

    four_over_six: whether fprop chooses between 6 and 4 for the largest magnitude of a block; false
        is plain NVFP4.
    hadamard: the group size of the transform in dgrad and wgrad, and of the groups with a gain of
        1: 16 or more. Raises ConfigError for a smaller one.
    unit_gain: false leaves the scales as they are, which makes the gradient about 1.6% too small.
    """
    if hadamard < 16:
        raise ConfigError(f"hadamard is a group of 16 or more, not {hadamard}")
    forward = get_quantizer("nvfp4-four-over-six") if four_over_six else NVFP4
    operand = Quantizer(
        scale="e4m3",
        block=(1, 16),
        rule="nearest",
        tensor_max=256.0,
        inflate=INFLATED,
        unit_gain=hadamard if unit_gain else 0,
        scale_rounding="stochastic" if unit_gain else "nearest",
    )
    backward = GemmRecipe(operand, operand, Hadamard(hadamard))
    return Recipe(
        name="quartet-2",
        paper="arXiv 2601.22813",
        fprop=GemmRecipe(forward, forward),
        dgrad=backward,
        wgrad=backward,
        backward="forward",
    )
