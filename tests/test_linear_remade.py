"""Linears whose backward pass makes fprop's codes of W again, and that save none of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_fp4 import GemmRecipe, Recipe, get_quantizer, get_recipe
from megatron_fp4.arithmetic.hadamard import Hadamard
from megatron_fp4.arithmetic.philox import Key
from megatron_fp4.execution.backward import Backward
from megatron_fp4.execution.call import Call, Site
from megatron_fp4.linear import quantized_linear
from megatron_fp4.plan.data import Making
from megatron_fp4.recipes import uniform_recipes
from testing.builders.small_recipes import small_recipe
from testing.oracles import normal

TOKENS, IN, OUT = 128, 64, 128
STOCHASTIC = get_quantizer("mxfp4-ceil-sr")
# Recipes whose operand of W in fprop is rounded stochastically, and transformed.
OTHERS = {
    "noise": replace(get_recipe("tetrajet"), fprop=GemmRecipe(STOCHASTIC, STOCHASTIC)),
    "transformed": replace(
        get_recipe("tetrajet"), fprop=GemmRecipe(STOCHASTIC, STOCHASTIC, Hadamard(32))
    ),
}
RECIPES = {name: small_recipe(name) for name in uniform_recipes()} | OTHERS
READ_AGAIN = [name for name, recipe in RECIPES.items() if recipe.backward == "forward"]


def run(recipe: Recipe, keeps_w: Any) -> tuple[list[Tensor], int]:
    """([Y, dX, dW], bytes that are saved of W beside W itself)."""
    x, w = (normal(shape, i).bfloat16() for i, shape in enumerate([(TOKENS, IN), (OUT, IN)]))
    average = None if recipe.weight_average is None else w.float() * 1.01
    leaves = x.requires_grad_(), w.requires_grad_()
    saved = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal saved
        saved += tensor.nbytes if tensor.data_ptr() != w.data_ptr() else 0
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        site = Site("fc1", keeps_w=keeps_w, average=average)
        y = quantized_linear(*leaves, None, recipe, site, Call(Key(1, 2)))
    y.backward(normal(y.shape, 7).bfloat16())
    return [y.detach(), x.grad, w.grad], saved  # type: ignore[list-item]


@pytest.mark.parametrize("name", RECIPES)
def test_codes_that_are_made_again_have_the_same_bits(name: str) -> None:
    (plain, whole), (again, less) = run(RECIPES[name], None), run(RECIPES[name], "remade")
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    if name in READ_AGAIN:
        quantizer = RECIPES[name].fprop.b
        assert quantizer is not None and whole - less >= quantizer.nbytes(OUT, IN)
    else:
        assert whole - less == (OUT * IN // 2 + 4 * OUT if name == "dge-occ" else 0)


def test_other_random_bits_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mistake: the codes that are made again are those of another step."""
    plain, _ = run(RECIPES["noise"], "remade")
    remake = Backward._remake_w

    def in_another_step(backward: Backward, making: Making) -> None:
        call, backward.call = backward.call, Call(Key(1, 3))
        remake(backward, making)
        backward.call = call

    monkeypatch.setattr(Backward, "_remake_w", in_another_step)
    wrong, _ = run(RECIPES["noise"], "remade")
    assert not torch.equal(plain[1], wrong[1])


def test_a_weight_that_changes_between_the_passes_is_an_error() -> None:
    """Its codes of the forward pass cannot be made again."""
    x, w = normal((TOKENS, IN), 1).bfloat16(), normal((OUT, IN), 2).bfloat16().requires_grad_()
    site = Site("fc1", keeps_w="remade")
    y = quantized_linear(x, w, None, get_recipe("tetrajet"), site, Call())
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
