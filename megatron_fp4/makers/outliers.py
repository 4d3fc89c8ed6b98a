"""Chooses what splits outliers from X: Triton kernels, or a sort in PyTorch as the fallback."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_fp4.arithmetic.outliers import Residual
from megatron_fp4.plan.setting import Setting
from megatron_fp4.recipe import Recipe
from megatron_fp4.target import kernels_problem


class Clamping(NamedTuple):
    """split: does what `OutlierClamp.split` does to X [tokens, features]; a kernel may store the
    residual's elements in another order. dense: does what `Residual.dense` does."""

    split: Callable[[Tensor], tuple[Tensor, Residual]]
    dense: Callable[[Residual], Tensor]


def choose(recipe: Recipe, setting: Setting) -> Clamping | None:
    """The fastest functions that split outliers off X; None where the recipe clamps nothing."""
    clamp = recipe.outliers
    if clamp is None:
        return None
    shape = setting.shape("x", is_part=setting.has_part("x"))
    if kernels_problem(setting.target) is None and setting.dtype == torch.bfloat16 and all(shape):
        from megatron_fp4.kernels import outliers  # imports Triton

        if clamp.scope == "token" and shape[1] <= outliers.WIDEST and shape[1] % 2 == 0:
            return Clamping(partial(outliers.split, clamp=clamp), outliers.dense)
    return Clamping(clamp.split, Residual.dense)
