"""Two linears that compute the SwiGLU between them, against two with a SwiGLU of its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_fp4 import get_recipe
from megatron_fp4.arithmetic.philox import Key
from megatron_fp4.arithmetic.swiglu import swiglu, swiglu_gradient
from megatron_fp4.execution.call import Call, Site
from megatron_fp4.linear import linear_after_swiglu, linear_before_swiglu, quantized_linear
from megatron_fp4.operands import Swiglu, SwigluGradient
from megatron_fp4.recipe import Recipe
from megatron_fp4.recipes import uniform_recipes
from testing.builders.small_recipes import small_recipe

CALL = Call(Key(5, 2), 3)
E4M3 = torch.float8_e4m3fn


class Separate(torch.autograd.Function):
    """SwiGLU as an operation of its own, which keeps y as `rounded` gives it."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, rounded: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(rounded(y))
        return swiglu(y)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (y,) = ctx.saved_tensors
        return swiglu_gradient(gradient, y), None


def itself(y: Tensor) -> Tensor:
    return y


def through_e4m3(y: Tensor) -> Tensor:
    """As Megatron's bias_swiglu_impl with fp8_input_store keeps it, and reads it in backward."""
    return y.to(E4M3).to(y.dtype)


def sites(**fields: Any) -> tuple[Site, Site]:
    return Site("fc1", **fields), Site("fc2", **fields)


def joined(x: Tensor, first: Tensor, second: Tensor, recipe: Recipe, at: Any) -> Tensor:
    between = linear_before_swiglu(x, first, recipe, at[0], CALL, None)
    assert between.result.untyped_storage().nbytes() == x.element_size()  # one element
    y = StorageWeakRef(between.y.untyped_storage())
    z = linear_after_swiglu(between, second, recipe, at[1], CALL, None)
    del between
    assert y.expired() == (at[0].kept_y is not None)  # backward reads Y in E4M3, or Y
    return z


def apart(
    x: Tensor,
    first: Tensor,
    second: Tensor,
    recipe: Recipe,
    at: Any,
    rounded: Callable[[Tensor], Tensor] = itself,
) -> Tensor:
    y = quantized_linear(x, first, None, recipe, at[0], CALL)
    return quantized_linear(Separate.apply(y, rounded), second, None, recipe, at[1], CALL)


def results(
    pair: Callable[..., Tensor],
    recipe: Recipe,
    at: tuple[Site, Site],
    dtype: torch.dtype = torch.bfloat16,
) -> list[Tensor]:
    """Z of two linears, and the gradients of X and both weights."""
    generator = torch.Generator().manual_seed(1)
    shapes = ((32, 2, 64), (256, 64), (64, 128))
    leaves = [
        (torch.randn(shape, generator=generator) / 4).to(dtype).requires_grad_() for shape in shapes
    ]
    z = pair(*leaves, recipe, at)
    z.backward(torch.randn(z.shape, generator=generator).to(dtype))
    return [z.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@pytest.mark.parametrize("packs_x", [True, False])
@pytest.mark.parametrize("recipe", uniform_recipes())
def test_joined_linears_give_the_bits_of_separate_ones(recipe: str, packs_x: bool) -> None:
    found, wanted = (
        results(pair, small_recipe(recipe), sites(packs_x=packs_x)) for pair in (joined, apart)
    )
    assert len(found) == 4 and all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("packs_x", [True, False])
@pytest.mark.parametrize("recipe", uniform_recipes())
def test_y_may_be_kept_in_e4m3(recipe: str, packs_x: bool) -> None:
    at = sites(packs_x=packs_x, kept_y=E4M3)
    found = results(joined, small_recipe(recipe), at)
    wanted = results(partial(apart, rounded=through_e4m3), small_recipe(recipe), at)
    assert all(map(torch.equal, found, wanted))
    # Control: a gradient computed from Y itself.
    exact = results(apart, small_recipe(recipe), at)
    assert torch.equal(found[0], exact[0]) and not torch.equal(found[1], exact[1])


def test_a_result_of_the_rounded_y_would_be_noticed() -> None:
    """Negative control: fc2 computes SwiGLU from what is kept of Y."""

    def wrong(x: Tensor, first: Tensor, second: Tensor, recipe: Recipe, at: Any) -> Tensor:
        between = linear_before_swiglu(x, first, recipe, at[0], CALL, None)
        between = between._replace(y=through_e4m3(between.y))
        return linear_after_swiglu(between, second, recipe, at[1], CALL, None)

    at = sites(kept_y=E4M3)
    wanted = results(partial(apart, rounded=through_e4m3), get_recipe("tetrajet"), at)
    assert not torch.equal(results(wrong, get_recipe("tetrajet"), at)[0], wanted[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_in_other_dtypes_too(dtype: torch.dtype) -> None:
    found, wanted = (
        results(pair, get_recipe("tetrajet"), sites(), dtype) for pair in (joined, apart)
    )
    assert all(map(torch.equal, found, wanted))


def test_another_gradient_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: fc1 takes the gradient of the result for that of its left half."""
    wanted = results(apart, get_recipe("tetrajet"), sites())

    def wrong(self: SwigluGradient) -> Tensor:
        return torch.cat([self.gradient, torch.zeros_like(self.gradient)], 1)

    monkeypatch.setattr(SwigluGradient, "computed", wrong)
    found = results(joined, get_recipe("tetrajet"), sites())
    assert torch.equal(found[0], wanted[0]) and torch.equal(found[3], wanted[3])
    assert not torch.equal(found[1], wanted[1]) and not torch.equal(found[2], wanted[2])


def test_lines_are_those_of_the_matrix() -> None:
    """What metrics sample, without computing the matrix."""
    generator = torch.Generator().manual_seed(3)
    y, gradient = (torch.randn(8, n, generator=generator) for n in (24, 12))
    for matrix in (
        Swiglu(y), SwigluGradient(gradient, y), SwigluGradient(gradient, y.to(E4M3)),
    ):  # fmt: skip
        whole, at = matrix.computed(), torch.tensor([1, 5, 7])
        assert whole.shape == matrix.shape
        assert torch.equal(matrix.lines(1, at), whole[at])
        columns = torch.tensor([0, 3, matrix.shape[1] - 1])
        assert torch.equal(matrix.lines(0, columns), whole[:, columns].t())
