"""A small megatron_fp4.Linear, its inputs, and its gradients, for several files of tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megatron_fp4 import Linear, list_recipes
from testing.builders.small_recipes import small_recipe
from testing.oracles import normal

TOKENS, SIZE = 128, 64
ALL = list_recipes()


def layer(recipe: str = "tetrajet", **options: Any) -> Linear:
    torch.manual_seed(0)
    return Linear(SIZE, SIZE, recipe=small_recipe(recipe), seed=5, **options)


def x_and_dy(seed: int = 0) -> tuple[Tensor, Tensor]:
    return normal((TOKENS, SIZE), seed), normal((TOKENS, SIZE), seed + 100)


def gradients(module: nn.Module) -> list[Tensor]:
    found = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    module.zero_grad()
    return found
