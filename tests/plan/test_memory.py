"""The bytes that a plan says are kept are those that a call keeps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_fp4 import Quantizer, get_recipe
from megatron_fp4.arithmetic.estimators import Estimator
from megatron_fp4.arithmetic.hadamard import Hadamard
from megatron_fp4.arithmetic.hot_channels import HotChannels
from megatron_fp4.arithmetic.quantized_tensor import QuantizedTensor
from megatron_fp4.execution.call import Call, Site
from megatron_fp4.execution.weights import HeldWeight
from megatron_fp4.linear import linear_before_swiglu, quantized_linear
from megatron_fp4.operands import Decoded, Made
from megatron_fp4.plan.compiler import compile_plan
from megatron_fp4.plan.memory import held_bytes, saved_bytes, y_bytes
from megatron_fp4.recipe import GemmRecipe, Recipe
from megatron_fp4.recipes import uniform_recipes
from megatron_fp4.setting import Setting, holds
from megatron_fp4.target import target_of
from testing.builders.small_recipes import small_recipe
from testing.oracles import normal

TOKENS, IN, OUT = 64, 128, 192
CEIL = Quantizer(rule="ceil")
TRANSFORMED = GemmRecipe(CEIL, CEIL, Hadamard(32))
RECIPES = {name: small_recipe(name) for name in uniform_recipes()} | {
    # Backward takes what fprop multiplied, and quantizes nothing itself.
    "forward-alone": Recipe("forward-alone", fprop=GemmRecipe(CEIL, CEIL), backward="forward"),
    "transformed": replace(get_recipe("tetrajet"), name="transformed", fprop=TRANSFORMED),
    # Estimators read X and W themselves beside fprop's codes.
    "estimated": replace(get_recipe("tetrajet"), estimator=Estimator(), x_estimator=Estimator()),
    "estimated-raw": replace(get_recipe("mxfp4"), estimator=Estimator(), x_estimator=Estimator()),
    "channels": get_recipe("dge-occ", scope="channel"),
    "hot": replace(get_recipe("tetrajet"), outliers=HotChannels(32, 2)),
    "hot-raw": replace(get_recipe("mxfp4"), outliers=HotChannels()),
    # The mean of X beside codes, or beside X without it, but not beside X itself.
    "centered": replace(get_recipe("tetrajet"), x_mean="subtracted"),
    "centered-raw": replace(get_recipe("mxfp4"), x_mean="subtracted"),
    "centered-fprop": replace(get_recipe("mxfp4"), wgrad=GemmRecipe(), x_mean="subtracted"),
}


def kept(recipe: Recipe, dtype: torch.dtype, keeps_w: Any, packs_x: bool) -> tuple[int, int]:
    """(bytes saved by one call beside W, bytes held of W after forward and backward)."""
    x, w = (normal(shape, i, dtype) for i, shape in enumerate(((TOKENS, IN), (OUT, IN))))
    held = HeldWeight() if holds(keeps_w) else None
    mine = {w.untyped_storage().data_ptr()}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        site = Site(keeps_w=keeps_w, packs_x=packs_x)
        leaves = x.requires_grad_(), w.requires_grad_()
        y = quantized_linear(*leaves, None, recipe, site, held=held)
    y.backward(torch.ones_like(y))
    return total(saved, mine), 0 if held is None else total(storages(held), mine)


def storages(held: HeldWeight) -> dict[int, int]:
    tensors: list[Tensor | None] = []
    for made in held.made.values():
        assert isinstance(made, Made) and made.carriers is None
        operand = made.operand
        if isinstance(operand, QuantizedTensor):
            tensors += [operand.codes, operand.scales, operand.tensor_scale]
        else:
            tensors.append(operand)
    for form in held.forms.values():
        assert isinstance(form, Decoded)
        tensors.append(form.values)  # row factors are a few bytes
    there = [tensor.untyped_storage() for tensor in tensors if tensor is not None]
    return {storage.data_ptr(): storage.nbytes() for storage in there}


def total(storages: dict[int, int], but: set[int]) -> int:
    return sum(size for place, size in storages.items() if place not in but)


@pytest.mark.parametrize("kept_y", [None, torch.float8_e4m3fn], ids=str)
def test_y_before_a_swiglu_is_counted(kept_y: torch.dtype | None) -> None:
    recipe = get_recipe("tetrajet")
    x, w = (normal(shape, i, torch.bfloat16) for i, shape in enumerate(((TOKENS, IN), (OUT, IN))))
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        leaves = x.requires_grad_(), w.requires_grad_()
        linear_before_swiglu(*leaves, recipe, Site(kept_y=kept_y), Call(), None)
    setting = Setting(
        TOKENS, IN, OUT, torch.bfloat16, target_of(torch.device("cpu")), torch.bfloat16,
        swiglu="before", kept_y=kept_y,
    )  # fmt: skip
    plan = compile_plan(recipe, setting)
    assert sum(each.nbytes for each in saved) == saved_bytes(plan)
    assert y_bytes(plan) == TOKENS * OUT * (2 if kept_y is None else 1)
    evaluated = compile_plan(recipe, replace(setting, dx=False, dw=False))
    assert y_bytes(evaluated) == 0


@pytest.mark.parametrize("packs_x", [True, False], ids=["packed", "bf16"])
@pytest.mark.parametrize("keeps_w", [None, "packed", "decoded", "fprop", "remade"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_bytes(name: str, dtype: torch.dtype, keeps_w: Any, packs_x: bool) -> None:
    setting = Setting(
        TOKENS, IN, OUT, dtype, target_of(torch.device("cpu")), dtype,
        keeps_w=keeps_w, packs_x=packs_x,
    )  # fmt: skip
    plan = compile_plan(RECIPES[name], setting)
    saved, held = kept(RECIPES[name], dtype, keeps_w, packs_x)
    assert saved == saved_bytes(plan)
    assert held == held_bytes(plan)
    # The control: something was counted. A forward pass in high precision holds no codes.
    holds_nothing = keeps_w == "fprop" and RECIPES[name].fprop.b is None
    assert saved > 0 and (held > 0) == (holds(keeps_w) and not holds_nothing)
