"""Chooses what multiplies dW by the factor of a gradient estimator: a Triton kernel, or PyTorch as
the fallback."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from megatron_fp4.arithmetic.estimators import DGE
from megatron_fp4.arithmetic.quantizer import QuantizedTensor
from megatron_fp4.plan.setting import Setting
from megatron_fp4.recipe import Recipe
from megatron_fp4.target import kernels_problem

# (dw [out, in] in float32 or float64, fprop's operand of W, W in the model's dtype, into) -> dw,
# which is multiplied in place; or into, a contiguous matrix of dw's dtype to which the product is
# added, where that is not None.
Estimate = Callable[[Tensor, QuantizedTensor, Tensor, Tensor | None], Tensor]


def choose(recipe: Recipe, setting: Setting) -> Estimate | None:
    """The function that multiplies dW by the estimator's factor, see `Estimate`.

    None where the recipe has no estimator.
    """
    if recipe.estimator is None:
        return None
    quantizer = recipe.fprop.b
    assert quantizer is not None
    scale_a_row = (quantizer.scale, quantizer.block) == ("fp32", (1, 0))
    if scale_a_row and quantizer.prescale == 1.0 and setting.dtype == torch.bfloat16:
        if kernels_problem(setting.target) is None and setting.outputs * setting.inputs:
            from megatron_fp4.kernels import estimator  # imports Triton

            return partial(estimator.scale, recipe.estimator)
    return partial(_scaled, recipe.estimator)


def _scaled(
    estimator: DGE, dw: Tensor, w: QuantizedTensor, weight: Tensor, into: Tensor | None
) -> Tensor:
    dw = dw.mul_(estimator.factor(w.grid_coordinates(weight)))
    return dw if into is None else into.add_(dw)
