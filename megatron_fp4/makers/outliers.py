"""Chooses what splits outliers from X: a Triton kernel, or a sort in PyTorch as the fallback."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from megatron_fp4.arithmetic.outliers import Residual
from megatron_fp4.plan.setting import Setting
from megatron_fp4.recipe import Recipe
from megatron_fp4.target import kernels_problem

Split = Callable[[Tensor], tuple[Tensor, Residual]]


def choose(recipe: Recipe, setting: Setting) -> Split | None:
    """The fastest function that does what `recipe.outliers.split` does to X [tokens, features].

    The kernel may store the residual's elements in another order. None where the recipe clamps
    nothing.
    """
    clamp = recipe.outliers
    if clamp is None:
        return None
    shape = setting.shape("x", is_part=setting.has_part("x"))
    if kernels_problem(setting.target) is None and setting.dtype == torch.bfloat16 and all(shape):
        from megatron_fp4.kernels import outliers  # imports Triton

        if clamp.scope == "token" and shape[1] <= outliers.WIDEST:
            return partial(outliers.split, clamp=clamp)
    return clamp.split
