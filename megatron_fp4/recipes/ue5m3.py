"""UE5M3 scales: "Elucidating the Design Space of FP4 training" (arXiv 2509.17791).

X, W and dY are E2M1 in blocks of 16 with UE5M3 scales, and the tensor has a scale of its own. In
dgrad and wgrad both operands go through a Hadamard transform along the contracted axis and are
rounded stochastically. W and X are quantized again there from the codes of the forward pass, so
that the straight-through gradient is that of the product which the forward pass computed.

The source compares scale formats, rounding of scales, stochastic rounding, Hadamard transforms and
tensor scales. It finds UE5M3 scales better than E8M0 and E4M3 ones, if they come with a tensor
scale and stochastic rounding in the backward pass, and finds that the straight-through estimator
suffices.

Choices of this project: the group of the transform and its random signs, the tensor scale's target,
double quantization, and scales that are rounded up where elements are rounded stochastically. A
scale that is rounded down maps its block's largest magnitude beyond 6. It is clipped then, which
biases the gradient.
"""

from typing import Literal

from megatron_fp4.arithmetic.hadamard import Hadamard
from megatron_fp4.arithmetic.quantizer import Quantizer
from megatron_fp4.recipe import GemmRecipe, Recipe
from megatron_fp4.recipes.registry import register


@register("ue5m3")
def ue5m3(
    *,
    rule: Literal["nearest", "up"] = "nearest",
    backward_rule: Literal["nearest", "up"] = "up",
    stochastic: bool = True,
    hadamard: int = 64,
    signs: Literal["random", "fixed", "none"] = "random",
    tensor_max: float = 32768.0,
    double_quantization: bool = True,
) -> Recipe:
    """The best combination of arXiv 2509.17791.

    rule, backward_rule: how block scales are rounded in fprop, and in dgrad and wgrad. With
        `stochastic`, backward_rule nearest gives a biased gradient.
    stochastic: whether dgrad and wgrad round their operands stochastically.
    hadamard: the group size of the transform in dgrad and wgrad; 0 is no transform.
    signs: see Hadamard.
    tensor_max: the largest block scale, about. It must leave room below UE5M3's maximum of 61,440
        for a scale that is rounded up. 32,768 leaves a factor of 1.875. 0 is no tensor scale.
    double_quantization: false quantizes the operands of dgrad and wgrad from the unquantized W and
        X.
    """
    forward = Quantizer(scale="ue5m3", block=(1, 16), rule=rule, tensor_max=tensor_max)
    operand = Quantizer(
        scale="ue5m3",
        block=(1, 16),
        rule=backward_rule,
        rounding="stochastic" if stochastic else "nearest",
        tensor_max=tensor_max,
    )
    backward = GemmRecipe(operand, operand, Hadamard(hadamard, signs) if hadamard else None)
    return Recipe(
        name="ue5m3",
        paper="arXiv 2509.17791",
        fprop=GemmRecipe(forward, forward),
        dgrad=backward,
        wgrad=backward,
        backward="forward" if double_quantization else "raw",
    )
