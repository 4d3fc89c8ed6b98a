"""Chooses what splits outliers from X: Triton kernels, or PyTorch as the fallback."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_fp4.arithmetic.hot_channels import HotChannels, Outliers
from megatron_fp4.arithmetic.outliers import Residual
from megatron_fp4.recipe import Recipe
from megatron_fp4.setting import Setting
from megatron_fp4.target import kernels_problem


class Splitting(NamedTuple):
    """split: does to X [tokens, features] what `split` of `Recipe.outliers` does; a kernel may
    store a residual's elements in another order. dense: what is split off as a matrix, [tokens,
    features], or [tokens, k] of `Columns`. takes_total: whether `split` takes, as `total`, the sum
    over the ranks that share the tokens."""

    split: Callable[..., tuple[Tensor, Outliers]]
    dense: Callable[[Any], Tensor]
    takes_total: bool = False


def choose(recipe: Recipe, setting: Setting) -> Splitting | None:
    """The fastest functions that split outliers off X; None where the recipe splits none off."""
    outliers = recipe.outliers
    if outliers is None:
        return None
    if isinstance(outliers, HotChannels):
        return Splitting(outliers.split, lambda columns: columns.values, setting.has_part("x"))
    shape = setting.shape("x", is_part=setting.has_part("x"))
    if kernels_problem(setting.target) is None and setting.dtype == torch.bfloat16 and all(shape):
        from megatron_fp4.kernels import outliers as kernels  # imports Triton

        if outliers.scope == "token" and shape[1] <= kernels.WIDEST and shape[1] % 2 == 0:
            return Splitting(partial(kernels.split, clamp=outliers), kernels.dense)
    return Splitting(outliers.split, Residual.dense)
