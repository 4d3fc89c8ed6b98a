"""On a GPU: a linear's forward and backward pass never waits for it, nor does a loss's check."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from megatron_fp4 import get_recipe, linear
from megatron_fp4.arithmetic.quantizer import get_quantizer
from megatron_fp4.mcore.loop import loss_check
from megatron_fp4.recipe import GemmRecipe, Recipe
from megatron_fp4.recipes import uniform_recipes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
NVFP4 = GemmRecipe(get_quantizer("nvfp4"), get_quantizer("nvfp4"))
RECIPES = [get_recipe(name) for name in uniform_recipes()]
RECIPES.append(replace(get_recipe("mxfp4"), name="nvfp4", fprop=NVFP4, dgrad=NVFP4, wgrad=NVFP4))


@pytest.fixture
def waiting_is_an_error() -> Iterator[None]:
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode(mode)


def step(recipe: Recipe, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor, step: int) -> None:
    linear(x, w, bias, recipe=recipe, step=step).backward(torch.ones_like(x))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_a_linear_never_waits_for_the_gpu(recipe: Recipe, request: pytest.FixtureRequest) -> None:
    x, w = (torch.randn(256, 256, device="cuda").bfloat16().requires_grad_() for _ in range(2))
    bias = torch.zeros(256, device="cuda").bfloat16().requires_grad_()
    step(recipe, x, w, bias, 0)  # tables go to the device once
    request.getfixturevalue("waiting_is_an_error")
    step(recipe, x, w, bias, 1)
    with pytest.raises(RuntimeError, match="synchroniz"):  # the control: a copy from the host
        torch.tensor([1.0], device="cuda")


def test_a_check_waits_for_the_loss_alone(waiting_is_an_error: None) -> None:
    x = torch.ones(2, device="cuda", requires_grad=True)
    x.register_hook(lambda gradient: torch.cuda._sleep(1_000_000_000))  # some half a second
    losses, found = x * 2, []
    copy = loss_check.on_host(losses.detach().sum())

    def check() -> None:
        found.append((copy().item(), torch.cuda.default_stream().query()))

    loss_check.after_backward(losses, check)
    losses.sum().backward()
    assert found == [(4.0, False)]  # the backward pass is still running
    torch.cuda._sleep(1_000_000_000)
    late = loss_check.on_host(losses.detach().sum())  # the control: after work that takes long
    assert not torch.cuda.default_stream().query() and late().item() == 4
    assert torch.cuda.default_stream().query()


def test_what_a_check_raises_leaves_the_backward_pass() -> None:
    """The check runs in a thread of autograd's."""

    def check() -> None:
        raise RuntimeError("found NaN in the loss")

    losses = torch.ones(2, device="cuda", requires_grad=True) * 2
    loss_check.after_backward(losses, check)
    with pytest.raises(RuntimeError, match="found NaN in the loss"):
        losses.sum().backward()
