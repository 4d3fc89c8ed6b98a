"""Plans by what they are compiled from: each is compiled once in a process."""

from __future__ import annotations

import math
from functools import cache, lru_cache
from typing import Literal

import torch

from megatron_fp4.plan.compiler import compile_plan
from megatron_fp4.plan.data import LinearPlan
from megatron_fp4.plan.setting import Setting, Sharding
from megatron_fp4.plan.sizes import token_multiple
from megatron_fp4.recipe import Recipe
from megatron_fp4.target import target_of

_SIDES = 128  # what multipliers and makers ask of a number of tokens divides this


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
    keeps_w: Literal["packed", "decoded"] | None,
    packs_x: bool,
) -> LinearPlan:
    """The plan of a linear on `device`; the other arguments are those of Setting. Give them by
    position and in this order, which costs the least host time."""
    outputs, inputs = weight
    setting = Setting(
        tokens, inputs, outputs, dtype, target_of(device), weight_dtype, sharding, main_grad,
        dx, dw, has_bias, keeps_w, packs_x,
    )  # fmt: skip
    return compile_plan(recipe, setting)


def tokens_of_plan(recipe: Recipe, tokens: int) -> int:
    """`Setting.tokens` of the plan for so many tokens. Plans depend on which multiples a number of
    tokens is, so that a few plans serve all the numbers that a router sends to an expert."""
    return math.gcd(tokens, _multiple(recipe)) if tokens else 0


@cache
def _multiple(recipe: Recipe) -> int:
    return math.lcm(token_multiple(recipe), _SIDES)
