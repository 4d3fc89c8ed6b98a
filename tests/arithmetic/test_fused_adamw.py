"""The fused AdamW against torch's, whose fused kernel runs on a CPU too."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_fp4.arithmetic.fused_adamw import FusedAdamW

OPTIONS: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def weights() -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(size)) for size in (3, 70, 257)]


def train(optimizer: torch.optim.Optimizer, first: int, last: int) -> list[Tensor]:
    """The weights after the steps from `first` on, before `last`."""
    found = [weight for group in optimizer.param_groups for weight in group["params"]]
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        for weight in found:
            weight.grad = torch.randn(weight.shape, generator=generator)
        optimizer.step()
    return [weight.detach().clone() for weight in found]


def taken_over(**options: Any) -> FusedAdamW:
    return FusedAdamW.in_place_of(torch.optim.AdamW(weights(), **OPTIONS | options))


@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"maximize": True}], ids=str)
def test_weights_are_those_of_torch_s_fused_kernel(options: dict[str, Any]) -> None:
    fused = torch.optim.AdamW(weights(), **OPTIONS | options, fused=True)
    wanted, found = train(fused, 0, 5), train(taken_over(**options), 0, 5)
    assert all(map(torch.equal, found, wanted))
    # Negative control: one step more.
    assert not any(map(torch.equal, train(fused, 5, 6), wanted))


def test_the_state_is_that_of_the_plain_optimizer() -> None:
    plain, fused = torch.optim.AdamW(weights(), **OPTIONS), taken_over()
    train(plain, 0, 3)
    train(fused, 0, 3)
    wanted, found = plain.state_dict(), fused.state_dict()
    assert found["param_groups"] == wanted["param_groups"]
    for number, state in wanted["state"].items():
        assert list(found["state"][number]) == list(state)
        for name, value in state.items():
            torch.testing.assert_close(found["state"][number][name], value)
        assert float(state["step"]) == 3 and found["state"][number]["step"].device.type == "cpu"


@pytest.mark.parametrize("saves_fused", [False, True])
def test_either_optimizer_goes_on_from_the_other(saves_fused: bool) -> None:
    whole = train(torch.optim.AdamW(weights(), **OPTIONS), 0, 6)
    first, second = torch.optim.AdamW(weights(), **OPTIONS), torch.optim.AdamW([torch.zeros(1)])
    if saves_fused:
        first = FusedAdamW.in_place_of(first)
    halfway, state = train(first, 0, 3), copy.deepcopy(first.state_dict())
    second = torch.optim.AdamW([torch.nn.Parameter(each) for each in halfway])
    if not saves_fused:
        second = FusedAdamW.in_place_of(second)
    second.load_state_dict(state)
    for found, wanted in zip(train(second, 3, 6), whole, strict=True):
        torch.testing.assert_close(found, wanted)


def test_hooks_are_called_once() -> None:
    optimizer, calls = taken_over(), []
    optimizer.register_step_post_hook(lambda *told: calls.append(1))
    train(optimizer, 0, 2)
    assert len(calls) == 2
