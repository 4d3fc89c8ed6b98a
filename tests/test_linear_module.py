"""megatron_fp4.Linear: steps, recomputation, what is saved for backward, errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_fp4 import ConfigError, Linear, linear, list_recipes
from tests.oracles import normal

TOKENS, SIZE = 128, 64
ALL = list_recipes()


def layer(recipe: str = "tetrajet", **options: Any) -> Linear:
    torch.manual_seed(0)
    return Linear(SIZE, SIZE, recipe=recipe, seed=5, **options)


def x_and_dy(seed: int = 0) -> tuple[Tensor, Tensor]:
    return normal((TOKENS, SIZE), seed), normal((TOKENS, SIZE), seed + 100)


def gradients(module: nn.Module) -> list[Tensor]:
    found = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    module.zero_grad()
    return found


def test_it_is_an_nn_linear() -> None:
    module = layer()
    assert isinstance(module, nn.Linear) and "recipe=tetrajet" in repr(module)
    x, _ = x_and_dy()
    expected = linear(x, module.weight, module.bias, recipe="tetrajet", seed=5, step=0)
    assert torch.equal(module(x), expected)
    assert list(module.state_dict()) == ["weight", "bias"]


def test_each_training_step_has_its_own_number() -> None:
    module, (x, dy) = layer(), x_and_dy()
    found = []
    for step in range(3):
        assert module.steps == step
        module(x).backward(dy)
        found.append(gradients(module)[0])
        weight = module.weight.detach().clone().requires_grad_()
        linear(x, weight, recipe="tetrajet", seed=5, step=step).backward(dy)
        assert torch.equal(found[-1], weight.grad)  # type: ignore[arg-type]
    assert not torch.equal(found[0], found[1])
    module.steps = 1  # resume
    module(x).backward(dy)
    assert torch.equal(gradients(module)[0], found[1])


def test_evaluation_does_not_count() -> None:
    module, (x, _) = layer().eval(), x_and_dy()
    module(x)
    with torch.no_grad():
        module(x)
    assert module.steps == 0


@pytest.mark.parametrize("recipe", ALL)
def test_evaluation_takes_any_number_of_tokens(recipe: str) -> None:
    """wgrad's blocks run along tokens; without gradients there are none."""
    module, (x, _) = layer(recipe).eval(), x_and_dy()
    with torch.no_grad():
        expected = linear(x, module.weight, module.bias, recipe=recipe)[:7]
        torch.testing.assert_close(module(x[:7]), expected, rtol=1e-5, atol=1e-5)


# --- recomputation --------------------------------------------------------------------------------


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


def test_a_recomputation_with_other_noise_is_told_apart() -> None:
    """Negative control: the same check where the recomputed pass counts as a step of its own."""
    plain, recomputed = Block("tetrajet"), Block("tetrajet")

    for module in (recomputed.first, recomputed.second):
        module._replay.take = lambda fresh, training: fresh()  # type: ignore[method-assign]
    expected = train(plain, plain, False)
    found = train(recomputed, lambda x: checkpoint(recomputed, x, use_reentrant=True), False)
    assert not all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


# --- memory ---------------------------------------------------------------------------------------


def saved_bytes(recipe: str, dtype: torch.dtype) -> tuple[int, int]:
    """(bytes saved for backward beside the parameters, those of x alone in full)."""
    module = layer(recipe).to(dtype)
    x = x_and_dy()[0].to(dtype)
    kept: dict[int, int] = {}
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(x)
    return sum(kept.values()), x.numel() * x.element_size()


def test_tetrajet_saves_codes_and_scales_alone() -> None:
    """Q1(X) and Q2(W): 4 bits an element, and 8 for each block of 32."""
    found, full = saved_bytes("tetrajet", torch.bfloat16)
    elements = TOKENS * SIZE + SIZE * SIZE
    assert found == elements // 2 + elements // 32
    assert found < full


def test_raw_operands_are_saved_in_full() -> None:
    """Negative control: a recipe that needs the raw X keeps all of it."""
    found, full = saved_bytes("mxfp4", torch.bfloat16)
    assert found == full


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: Linear(48, 64, recipe="tetrajet", name="fc"), ["fc", "48", "32"]),
        (lambda: Linear(64, 48, recipe="mxfp4-rht-sr"), ["48", "64"]),
        (lambda: Linear(64, 64, recipe="fp4"), ["fp4", "tetrajet"]),
        (lambda: layer()(torch.zeros(33, SIZE)), ["33 tokens", "wgrad"]),
        (lambda: linear(torch.zeros(2, 3, SIZE), torch.zeros(SIZE, SIZE, requires_grad=True),
                        recipe="mxfp4"), ["6 tokens"]),
    ],
    ids=["inputs", "outputs", "recipe", "tokens", "tokens-of-linear"],
)  # fmt: skip
def test_errors(build: Callable[[], Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        build()
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


def test_a_nan_shows_in_the_loss() -> None:
    module, (x, _) = layer(), x_and_dy()
    x[3, 5] = float("nan")
    y = module(x)
    assert y[3].isnan().all() and not y[4:].isnan().any()
