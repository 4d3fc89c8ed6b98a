"""A linear that computes the RMSNorm before it, against one with a norm of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megatron_fp4 import Recipe, get_recipe
from megatron_fp4.arithmetic import rms_norm
from megatron_fp4.arithmetic.philox import Key
from megatron_fp4.arithmetic.rms_norm import RmsNorm
from megatron_fp4.execution.call import Call, Site
from megatron_fp4.execution.norm import before_linear
from megatron_fp4.linear import linear_after_swiglu, linear_before_swiglu, quantized_linear
from megatron_fp4.operands import Normed
from megatron_fp4.recipes import uniform_recipes
from testing.builders.small_recipes import small_recipe

CALL = Call(Key(5, 2), 3)
EPS = 1e-5


class Separate(torch.autograd.Function):
    """(the norm of x, x), as an operation of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, zero_centered: bool) -> tuple[Tensor, Tensor]:
        ctx.norm = RmsNorm(weight, EPS, zero_centered)
        ctx.save_for_backward(x)
        return rms_norm.normed(x, rms_norm.factors(x, EPS), ctx.norm.gain), x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor, residual: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        rows = [t.reshape(-1, t.shape[-1]) for t in (dy, x, residual)]
        dx, dweight = rms_norm.gradients(rows[0], rows[1], ctx.norm, rows[2])
        return dx.view(x.shape), dweight, None


def joined(leaves: list[Tensor], recipe: Recipe, site: Site, zero_centered: bool) -> Tensor:
    x, gain, weight = leaves
    norm = RmsNorm(gain, EPS, zero_centered)
    stand_in, residual = before_linear(x, norm)
    y = quantized_linear(stand_in, weight, None, recipe, replace(site, norm=norm), CALL)
    return y + residual


def apart(leaves: list[Tensor], recipe: Recipe, site: Site, zero_centered: bool) -> Tensor:
    x, gain, weight = leaves
    y, residual = Separate.apply(x, gain, zero_centered)
    return quantized_linear(y, weight, None, recipe, site, CALL) + residual


def results(
    layer: Callable[..., Tensor],
    recipe: Recipe | str,
    dtype: torch.dtype = torch.bfloat16,
    zero_centered: bool = False,
    **site: Any,
) -> list[Tensor]:
    """The layer's output, and the gradients of x, of the norm's weight and of W."""
    generator = torch.Generator().manual_seed(1)
    made = [torch.randn(shape, generator=generator) for shape in ((32, 2, 64), (64,), (64, 64))]
    leaves = [each.to(dtype).requires_grad_() for each in made]
    found = recipe if isinstance(recipe, Recipe) else get_recipe(recipe)
    y = layer(leaves, found, Site("linear", **site), zero_centered)
    y.backward(torch.randn(y.shape, generator=generator).to(dtype))
    return [y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@pytest.mark.parametrize("packs_x", [True, False])
@pytest.mark.parametrize("recipe", [*map(small_recipe, uniform_recipes()), Recipe("bf16")], ids=str)
def test_a_joined_norm_gives_the_bits_of_a_separate_one(recipe: Recipe, packs_x: bool) -> None:
    found, wanted = (results(layer, recipe, packs_x=packs_x) for layer in (joined, apart))
    assert len(found) == 4 and all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_in_other_dtypes_and_with_other_gains_too(dtype: torch.dtype) -> None:
    found, wanted = (results(layer, "tetrajet", dtype, True) for layer in (joined, apart))
    assert all(map(torch.equal, found, wanted))


def test_a_norm_that_is_left_out_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    wanted = results(apart, "tetrajet")
    monkeypatch.setattr(Normed, "computed", lambda self: self.x)
    found = results(joined, "tetrajet")
    assert not torch.equal(found[0], wanted[0]) and not torch.equal(found[3], wanted[3])


def test_x_that_is_not_rounded_to_bf16_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the codes of the float32 numbers are others."""

    def wide(self: Normed) -> Tensor:
        return rms_norm.normed(self.x.float(), rms_norm.factors(self.x, EPS), self.norm.gain)

    wanted = results(apart, "tetrajet")
    monkeypatch.setattr(Normed, "computed", wide)
    found = results(joined, "tetrajet")
    assert not torch.equal(found[0], wanted[0])


def test_a_norm_and_a_swiglu_at_one_linear() -> None:
    """fc1 of a layer: the norm before it, the SwiGLU behind it."""
    generator = torch.Generator().manual_seed(2)
    shapes = ((32, 2, 64), (64,), (256, 64), (64, 128))
    recipe, found = get_recipe("tetrajet"), []
    for is_joined in (True, False):
        generator.manual_seed(2)
        x, gain, first, second = (
            torch.randn(shape, generator=generator).bfloat16().requires_grad_() for shape in shapes
        )
        norm, site = RmsNorm(gain, EPS), Site("fc1")
        if is_joined:
            taken, residual = before_linear(x, norm)
            site = replace(site, norm=norm)
        else:
            taken, residual = Separate.apply(x, gain, False)
        between = linear_before_swiglu(taken, first, recipe, site, CALL, None)
        z = linear_after_swiglu(between, second, recipe, Site("fc2"), CALL, None) + residual
        z.backward(torch.randn(z.shape, generator=generator).bfloat16())
        found.append([z.detach(), x.grad, gain.grad, first.grad, second.grad])
    assert all(map(torch.equal, *found))  # type: ignore[arg-type]


@pytest.mark.parametrize("zero_centered", [False, True])
def test_the_definition_is_torch_s(zero_centered: bool) -> None:
    """In float64, forward and backward, with and without a residual connection."""
    generator = torch.Generator().manual_seed(4)
    x, weight, dy, other = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((9, 24), (24,), (9, 24), (9, 24))
    )
    norm = RmsNorm(weight, EPS, zero_centered)
    leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    y = F.rms_norm(leaves[0], (24,), leaves[1] + zero_centered, EPS)
    dx, dweight = torch.autograd.grad(y, leaves, dy)
    assert torch.allclose(rms_norm.normed(x, rms_norm.factors(x, EPS), norm.gain), y)
    for residual, wanted in ((None, dx), (other, dx + other)):
        found = rms_norm.gradients(dy, x, norm, residual)
        assert torch.allclose(found[0], wanted) and torch.allclose(found[1], dweight)


def test_the_gradient_of_the_residual_alone_is_passed_on() -> None:
    x, gain = (torch.randn(shape).requires_grad_() for shape in ((4, 8), (8,)))
    _, residual = before_linear(x, RmsNorm(gain, EPS))
    residual.backward(torch.ones(4, 8))
    assert x.grad is not None and torch.equal(x.grad, torch.ones(4, 8)) and gain.grad is None


def test_lines_are_those_of_the_matrix() -> None:
    """What metrics sample, without computing the matrix."""
    generator = torch.Generator().manual_seed(3)
    x, weight = torch.randn(8, 24, generator=generator), torch.randn(24, generator=generator)
    matrix = Normed(x, RmsNorm(weight, EPS))
    whole, rows, columns = matrix.computed(), torch.tensor([1, 5]), torch.tensor([0, 3, 23])
    assert whole.shape == matrix.shape
    assert torch.equal(matrix.lines(1, rows), whole[rows])
    assert torch.equal(matrix.lines(0, columns), whole[:, columns].t())
