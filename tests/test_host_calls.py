"""How many Python calls one linear takes, as a measure of its host overhead."""

import cProfile
import pstats
from collections.abc import Callable, Iterator

import pytest
import torch

from megatron_fp4 import get_recipe, linear
from megatron_fp4.arithmetic.philox import Key
from megatron_fp4.execution.call import Call, Site
from megatron_fp4.linear import quantized_linear
from testing.builders.pretended_hopper import pretended_hopper

MOST = 400  # calls of Python functions and of C functions, by cProfile
SIZE = 256


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with pretended_hopper(monkeypatch):
        yield


def of_megatron(name: str) -> Callable[[], None]:
    """A forward and a backward pass of one linear, as Megatron's layers call it."""
    x, w = (torch.zeros(SIZE, SIZE).bfloat16().requires_grad_() for _ in range(2))
    dy = torch.zeros(SIZE, SIZE).bfloat16()
    w.main_grad = torch.zeros(SIZE, SIZE)  # type: ignore[attr-defined]
    recipe, site = get_recipe(name), Site("fc1", fuses=True)

    def step() -> None:
        y = quantized_linear(x, w, None, recipe, site, Call(Key(1, 2)))
        torch.autograd.backward(y, dy)

    return step


def calls(step: Callable[[], None]) -> int:
    with torch.autograd.set_multithreading_enabled(False):  # else backward is not profiled
        profile = cProfile.Profile()
        profile.enable()
        step()
        profile.disable()
    return pstats.Stats(profile).total_calls  # type: ignore[attr-defined]


def public(name: str) -> Callable[[], None]:
    """The same of the public function, which checks its arguments."""
    x, w = (torch.zeros(SIZE, SIZE).bfloat16().requires_grad_() for _ in range(2))
    dy, recipe = torch.zeros(SIZE, SIZE).bfloat16(), get_recipe(name)
    return lambda: torch.autograd.backward(linear(x, w, recipe=recipe), dy)


@pytest.mark.parametrize("recipe", ["tetrajet", "mxfp4"])
@pytest.mark.parametrize("make", [of_megatron, public])
def test_a_linear_on_a_warm_plan_takes_few_calls(
    make: Callable[[str], Callable[[], None]], recipe: str
) -> None:
    step = make(recipe)
    cold = calls(step)  # the negative control: it plans, and makes the launches
    step()
    assert calls(step) <= MOST < cold
