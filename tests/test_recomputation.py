"""A recomputed forward pass of megatron_fp4.Linear repeats its first pass (replay.py)."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_fp4 import replay
from testing.builders.small_linear import ALL, gradients, layer, x_and_dy


class Block(nn.Module):
    """Two linears with something between them."""

    def __init__(self, recipe: str) -> None:
        super().__init__()
        self.first, self.second = layer(recipe, name="first"), layer(recipe, name="second")

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.nn.functional.gelu(self.first(x)))


def train(block: Block, forward: Callable[[Tensor], Tensor], overlap: bool) -> list[Tensor]:
    """Gradients of two microbatches and both inputs'; overlap: both forward passes come first."""
    batches = [x_and_dy(1), x_and_dy(2)]
    inputs = [x.clone().requires_grad_() for x, _ in batches]
    if overlap:
        outputs = [forward(x) for x in inputs]
        for y, (_, dy) in zip(outputs, batches, strict=True):
            y.backward(dy)
    else:
        for x, (_, dy) in zip(inputs, batches, strict=True):
            forward(x).backward(dy)
    return gradients(block) + [x.grad for x in inputs]  # type: ignore[misc]


@pytest.mark.parametrize("overlap", [False, True], ids=["one-by-one", "two-in-flight"])
@pytest.mark.parametrize("recipe", ALL)
def test_recomputation_repeats_exactly(recipe: str, overlap: bool) -> None:
    plain, recomputed = Block(recipe), Block(recipe)
    expected = train(plain, plain, overlap)
    found = train(recomputed, lambda x: checkpoint(recomputed, x, use_reentrant=True), overlap)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert recomputed.first.steps == plain.first.steps == 2
    # Next steps go on from there.
    assert all(
        torch.equal(a, b)
        for a, b in zip(
            train(recomputed, recomputed, False), train(plain, plain, False), strict=True
        )
    )


@pytest.mark.parametrize("recipe", ALL)
def test_a_look_without_gradients_is_no_recomputation_s_first_pass(recipe: str) -> None:
    """A probe in training mode is never run again; what is recomputed later gets its own bits."""
    plain, recomputed = Block(recipe), Block(recipe)
    for block in (plain, recomputed):
        with torch.no_grad():
            block(x_and_dy()[0])
    expected = train(plain, plain, False)
    found = train(recomputed, lambda x: checkpoint(recomputed, x, use_reentrant=True), False)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_recomputation_with_other_bits_is_told_apart() -> None:
    """Negative control: the same check where the recomputed pass counts as a step of its own."""
    plain, recomputed = Block("tetrajet"), Block("tetrajet")

    for module in (recomputed.first, recomputed.second):
        module._replay.take = lambda fresh: fresh()  # type: ignore
    expected = train(plain, plain, False)
    found = train(recomputed, lambda x: checkpoint(recomputed, x, use_reentrant=True), False)
    assert not all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def apart(block: Block, forward: Callable[[Tensor], Tensor], order: int) -> list[Tensor]:
    """Gradients of two microbatches, each through the block twice, backward in either order, or
    (0) of their sum."""
    inputs = [x_and_dy(i)[0].requires_grad_() for i in (1, 2)]
    losses = [forward(x).square().sum() for x in inputs]
    for loss in losses[::order] if order else [losses[0] + losses[1]]:
        loss.backward()
    return gradients(block) + [x.grad for x in inputs]  # type: ignore[misc]


def repeats(order: int, **options: Any) -> bool:
    """Whether gradients of a recipe that keeps for backward what it drew in forward are those of a
    run that recomputes nothing."""
    plain, block = Block("mxfp4-rht-sr"), Block("mxfp4-rht-sr")
    expected = apart(plain, lambda x: plain(plain(x)), order)
    found = apart(block, lambda x: checkpoint(lambda t: block(block(t)), x, **options), order)
    return equal(found, expected, sums_alike=order != 0)


def equal(found: list[Tensor], expected: list[Tensor], sums_alike: bool) -> bool:
    """Bit for bit; but where checkpoints add up dW's parts in another order, to that rounding."""
    same = torch.equal if sums_alike else partial(torch.allclose, rtol=1e-4, atol=1e-5)
    return all(same(a, b) for a, b in zip(found, expected, strict=True))


ORDERS = pytest.mark.parametrize(
    "order", [1, -1, 0], ids=["first-in-first-out", "last-in-first-out", "one-sum"]
)


@ORDERS
def test_checkpoints_with_reentry_repeat_exactly(order: int) -> None:
    assert repeats(order, use_reentrant=True)


@ORDERS
def test_checkpoints_without_reentry_repeat_exactly(
    order: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert repeats(order, use_reentrant=False)
    torchs_own = replay._Hook.__base__  # negative control
    monkeypatch.setattr(torch.utils.checkpoint, "_checkpoint_hook", torchs_own)
    with pytest.warns(UserWarning, match="belongs to no checkpoint"):
        assert not repeats(order, use_reentrant=False)


@pytest.mark.parametrize("inner", [True, False])
@pytest.mark.parametrize("outer", [True, False])
def test_checkpoints_within_a_checkpoint_repeat_exactly(outer: bool, inner: bool) -> None:
    plain, block = Block("mxfp4-rht-sr"), Block("mxfp4-rht-sr")

    def forward(x: Tensor) -> Tensor:
        return checkpoint(block, checkpoint(block, x, use_reentrant=inner), use_reentrant=inner)

    expected = apart(plain, lambda x: plain(plain(x)), -1)
    found = apart(block, lambda x: checkpoint(forward, x, use_reentrant=outer), -1)
    assert equal(found, expected, sums_alike=not inner)


class Recomputed(torch.autograd.Function):
    """A user's own recomputation, which is no checkpoint of PyTorch's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.x, ctx.function = x.detach(), function
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x = ctx.x.requires_grad_()
        with torch.enable_grad():
            y = ctx.function(x)
        torch.autograd.backward(y, dy)
        return x.grad, None


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_within_an_unknown_recomputation_repeats_its_values(reentrant: bool) -> None:
    plain, block = Block("mxfp4-rht-sr"), Block("mxfp4-rht-sr")
    x, other = (x_and_dy()[0].requires_grad_() for _ in range(2))
    plain(x).square().sum().backward()
    with pytest.warns(UserWarning, match="belongs to no checkpoint"):
        y = Recomputed.apply(other, partial(checkpoint, block, use_reentrant=reentrant))
        y.square().sum().backward()
    assert other.grad is not None and x.grad is not None
    assert equal([*gradients(block), other.grad], [*gradients(plain), x.grad], sums_alike=True)


def test_what_a_checkpoint_took_goes_with_it() -> None:
    def kept() -> int:
        gc.collect()
        return sum(isinstance(thing, replay.Checkpoint) for thing in gc.get_objects())

    block, before = Block("tetrajet"), kept()
    for reentrant in (True, False):
        y = checkpoint(block, x_and_dy()[0].requires_grad_(), use_reentrant=reentrant)
        assert kept() == before + 1
        y.sum().backward()
        del y
    assert kept() == before


def test_a_recomputation_that_does_more_is_told() -> None:
    block, calls = Block("tetrajet"), iter([1, 2])

    def uneven(x: Tensor) -> Tensor:
        for _ in range(next(calls)):
            x = block(x)
        return x

    y = checkpoint(uneven, x_and_dy()[0].requires_grad_(), use_reentrant=True)
    with pytest.raises(RuntimeError, match="more often than its first pass"):
        y.sum().backward()
