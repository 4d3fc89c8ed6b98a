"""A cache of plans: each is compiled once in a process."""

from __future__ import annotations

import math
from functools import cache, lru_cache

import torch

from megatron_fp4.plan.compiler import compile_plan
from megatron_fp4.plan.data import LinearPlan
from megatron_fp4.plan.sizes import token_multiple
from megatron_fp4.recipe import Recipe
from megatron_fp4.setting import KeepsW, Setting, Sharding, SwigluPlace
from megatron_fp4.target import target_of

_SIDES = 128  # every multiple of tokens that a multiplier or maker requires divides this


@lru_cache(4096)
def plan_for(
    recipe: Recipe,
    tokens: int,
    weight: torch.Size,
    dtype: torch.dtype,
    device: torch.device,
    weight_dtype: torch.dtype,
    sharding: Sharding,
    main_grad: torch.dtype | None,
    dx: bool,
    dw: bool,
    has_bias: bool,
    keeps_w: KeepsW | None,
    packs_x: bool,
    swiglu: SwigluPlace = "",
    normed: bool = False,
    kept_y: torch.dtype | None = None,
    sent_w: bool = False,
    fastest: str | None = None,
) -> LinearPlan:
    """The plan of a linear on `device`. weight: the shape [out, in]; the others are as in Setting.

    Pass all arguments by position, which is the cheapest in host time.
    """
    outputs, inputs = weight
    setting = Setting(
        tokens, inputs, outputs, dtype, target_of(device), weight_dtype, sharding, main_grad,
        dx, dw, has_bias, keeps_w, packs_x, swiglu, normed, kept_y, sent_w,
        fastest,
    )  # fmt: skip
    return compile_plan(recipe, setting)


def tokens_of_plan(recipe: Recipe, tokens: int) -> int:
    """The `Setting.tokens` of the plan that serves `tokens` tokens.

    A plan depends only on which block sizes and alignments divide the number of tokens. A few plans
    therefore serve all numbers of tokens that a router may send to an expert.
    """
    return math.gcd(tokens, _multiple(recipe)) if tokens else 0


@cache
def _multiple(recipe: Recipe) -> int:
    return math.lcm(token_multiple(recipe), _SIDES)
