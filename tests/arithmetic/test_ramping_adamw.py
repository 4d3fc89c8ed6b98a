"""AdamW with Q-Ramping as a torch optimizer: which step a weight takes, and resuming."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from megatron_fp4 import ConfigError
from megatron_fp4.arithmetic.ramping_adamw import COUNT, PERIOD, SUM, RampingAdamW, Snapshot
from testing.low_bit import losses_of_closures, saved
from testing.oracles import normal

OPTIONS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}


def weights() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(normal(shape, i)) for i, shape in enumerate([(9, 17), (33,), (4,)])]


def groups_of(params: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": params[:1]}, {"params": params[1:], "weight_decay": 0.0}]


def train(optimizer: torch.optim.Optimizer, numbers: range) -> None:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for n in numbers:
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + n / 10)
        for i, param in enumerate(params):
            param.grad = normal(tuple(param.shape), 1000 * i + n)
        optimizer.step()


def ramping(params: list[torch.nn.Parameter]) -> RampingAdamW:
    """An optimizer of which the first weight has periods from 1 to 5."""
    optimizer = RampingAdamW(groups_of(params), **OPTIONS)
    optimizer.ramp(params[0])
    optimizer.set_period(params[0], torch.arange(params[0].numel()).view(params[0].shape) % 5 + 1)
    return optimizer


def adamw(params: list[torch.nn.Parameter]) -> torch.optim.AdamW:
    return torch.optim.AdamW(groups_of(params), foreach=False, **OPTIONS)


def test_weights_without_periods_take_adamw_s_step() -> None:
    mine, theirs = weights(), weights()
    train(ramping(mine), range(20))
    train(adamw(theirs), range(20))
    assert torch.equal(mine[1], theirs[1]) and torch.equal(mine[2], theirs[2])
    ones = torch.arange(mine[0].numel()).view(mine[0].shape) % 5 == 0
    assert torch.equal(mine[0][ones], theirs[0][ones])
    assert (mine[0][~ones] != theirs[0][~ones]).all()


def test_the_state_has_the_weight_s_shape() -> None:
    params = weights()
    optimizer = ramping(params)
    train(optimizer, range(3))
    state = optimizer.state[params[0]]
    assert set(state) == {"step", "exp_avg", "exp_avg_sq", SUM, COUNT, PERIOD}
    assert [key for key in state if key.startswith("fp4_")] == [
        "fp4_ramping_sum",
        "fp4_ramping_count",
        "fp4_ramping_period",
    ]
    assert all(state[key].shape == params[0].shape for key in (SUM, COUNT, PERIOD))
    assert [state[key].dtype for key in (SUM, COUNT, PERIOD)] == [torch.float32, *[torch.int16] * 2]
    assert set(optimizer.state[params[1]]) == {"step", "exp_avg", "exp_avg_sq"}


def test_a_calibration_takes_adamw_s_step_and_is_undone() -> None:
    params, undisturbed = weights(), weights()
    optimizer, other = ramping(params), ramping(undisturbed)
    for each in (optimizer, other):
        train(each, range(7))
    aliases = [param.data.view(-1) for param in params]

    snapshot, optimizer.calibrates = Snapshot(optimizer), True
    theirs = weights()
    plain = adamw(theirs)
    plain.load_state_dict(saved(optimizer))
    for param, start in zip(theirs, params, strict=True):
        param.data.copy_(start)
    train(optimizer, range(7, 12))
    train(plain, range(7, 12))
    assert all(map(torch.equal, params, theirs))
    assert not torch.equal(params[0], undisturbed[0])
    snapshot.restore()
    optimizer.calibrates = False
    assert optimizer.param_groups[0]["lr"] == other.param_groups[0]["lr"]

    for each in (optimizer, other):
        train(each, range(7, 30))
    assert all(map(torch.equal, params, undisturbed))
    assert all(torch.equal(p.view(-1), alias) for p, alias in zip(params, aliases, strict=True))
    same_states(optimizer, other)


def same_states(one: RampingAdamW, other: RampingAdamW) -> None:
    """Asserts that two optimizers have the same state, bit for bit."""
    left, right = one.state_dict()["state"], other.state_dict()["state"]
    assert left.keys() == right.keys()
    for number, state in left.items():
        assert state.keys() == right[number].keys()
        for key, value in state.items():
            assert value.dtype == right[number][key].dtype, key
            assert torch.equal(value, right[number][key]), key


def test_a_snapshot_before_the_first_step_leaves_no_state() -> None:
    params = weights()
    optimizer = RampingAdamW(params, **OPTIONS)
    snapshot = Snapshot(optimizer)
    train(optimizer, range(3))
    snapshot.restore()
    assert all(map(torch.equal, params, weights()))
    assert not optimizer.state
    train(optimizer, range(3))
    theirs = weights()
    train(torch.optim.AdamW(theirs, foreach=False, **OPTIONS), range(3))
    assert all(map(torch.equal, params, theirs))


def test_a_snapshot_keeps_what_others_have_in_a_state_and_no_moments_that_came_later() -> None:
    """A weight may have an average before its first step. Its periods are not the snapshot's."""
    params = weights()
    optimizer = RampingAdamW(params, **OPTIONS)
    optimizer.ramp(params[0])
    optimizer.state[params[0]]["fp4_average"] = params[0].detach().clone()
    snapshot = Snapshot(optimizer)
    train(optimizer, range(3))
    optimizer.state[params[0]]["fp4_average"] += 1
    snapshot.restore()
    assert list(optimizer.state) == [params[0]]
    assert set(optimizer.state[params[0]]) == {"fp4_average", SUM, COUNT, PERIOD}
    assert torch.equal(optimizer.state[params[0]]["fp4_average"], weights()[0])


def test_a_resumed_run_is_the_same_bit_for_bit() -> None:
    whole, first = weights(), weights()
    straight, optimizer = ramping(whole), ramping(first)
    train(straight, range(31))
    train(optimizer, range(13))
    assert optimizer.state[first[0]][COUNT].any()  # in the middle of periods

    second = [torch.nn.Parameter(param.detach().clone()) for param in first]
    groups = [{"params": second[:1]}, {"params": second[1:]}]
    resumed = RampingAdamW(groups, **OPTIONS)
    resumed.ramp(second[0])
    resumed.load_state_dict(saved(optimizer))
    train(resumed, range(13, 31))
    assert all(map(torch.equal, second, whole))
    same_states(resumed, straight)


def test_without_its_sums_a_resumed_run_differs() -> None:
    """The control, and torch's own loading: it makes counts and periods float32."""
    first = weights()
    optimizer = ramping(first)
    train(optimizer, range(13))
    found = saved(optimizer)
    resumed = ramping(weights())
    torch.optim.AdamW.load_state_dict(resumed, found)
    state = resumed.state[resumed.param_groups[0]["params"][0]]
    assert state[COUNT].dtype == state[PERIOD].dtype == torch.float32

    whole = weights()
    train(ramping(whole), range(31))
    del found["state"][0][SUM]
    second = [torch.nn.Parameter(param.detach().clone()) for param in first]
    resumed = ramping(second)
    resumed.load_state_dict(found)  # sums of zeros
    train(resumed, range(13, 31))
    assert not torch.equal(second[0], whole[0]) and torch.equal(second[1], whole[1])


def test_hooks_are_called_once_a_step() -> None:
    torch.optim.AdamW(weights())  # torch now wraps AdamW.step, see ramping_adamw.py
    optimizer = ramping(weights())
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    train(optimizer, range(2))
    assert calls == ["before", "after"] * 2


def test_a_closure_is_called_once_and_with_gradients() -> None:
    params = weights()
    optimizer = ramping(params)
    losses = losses_of_closures(optimizer, params, 40)
    assert losses[-1] < 0.9 * losses[0]
    assert optimizer.state[params[0]]["step"] == optimizer.state[params[1]]["step"] == 40


def test_a_weight_without_a_gradient_rests() -> None:
    params = weights()
    optimizer = ramping(params)
    optimizer.step()
    assert torch.equal(params[0], weights()[0]) and optimizer.state[params[0]]["step"] == 0
    assert list(optimizer.state) == params[:1]  # Megatron expects a count of steps in each state


def test_without_a_period_of_its_own_a_weight_is_updated_in_each_step() -> None:
    mine, theirs = weights(), weights()
    optimizer = RampingAdamW(groups_of(mine), **OPTIONS)
    optimizer.ramp(mine[0])
    assert not optimizer.state  # Megatron allocates state when it loads a checkpoint into none
    train(optimizer, range(9))
    train(adamw(theirs), range(9))
    assert all(map(torch.equal, mine, theirs))
    assert (optimizer.state[mine[0]][PERIOD] == 1).all()


def test_the_number_of_steps_is_in_the_groups_too() -> None:
    """Where Transformer Engine is installed, Megatron saves and loads that one alone."""
    params = weights()
    optimizer = ramping(params)
    train(optimizer, range(7))
    assert [group["step"] for group in optimizer.param_groups] == [7, 7]
    found = saved(optimizer)
    for state in found["state"].values():
        del state["step"]
    resumed = ramping(weights())
    resumed.load_state_dict(found)
    train(resumed, range(7, 9))
    assert {float(state["step"]) for state in resumed.state.values()} == {9.0}


def test_a_weight_that_had_no_gradient_at_first_does_not_hold_the_groups_number_back() -> None:
    params = weights()
    optimizer = ramping(params)
    train(optimizer, range(7))
    params[1].grad = normal((33,), 1)
    params[2].grad = None
    optimizer.step()
    assert [int(optimizer.state[p]["step"]) for p in params[1:]] == [8, 7]
    assert optimizer.param_groups[1]["step"] == 8


def test_what_is_refused() -> None:
    weight = torch.nn.Parameter(normal((3, 4), 1))
    ones = torch.ones(3, 4, dtype=torch.int16)
    plain = RampingAdamW([weight], **OPTIONS)
    with pytest.raises(ConfigError, match="this is none of them"):
        plain.ramp(torch.nn.Parameter(normal((3, 4), 1)))
    with pytest.raises(ConfigError, match="has no periods: call ramp with it first"):
        plain.set_period(weight, ones)
    plain.ramp(weight)
    with pytest.raises(ConfigError, match=r"periods is \[4, 3\], and the weight's \[3, 4\]"):
        plain.set_period(weight, ones.t())
    for wrong in (0 * ones, 16384 * ones.int()):
        with pytest.raises(ConfigError, match=r"a number of steps in \[1, 16383\]"):
            plain.set_period(weight, wrong)
    half = torch.nn.Parameter(weight.detach().bfloat16())
    with pytest.raises(ConfigError, match=r"float32 weights, not torch.bfloat16"):
        RampingAdamW([half]).ramp(half)
    for option in ("amsgrad", "maximize", "capturable", "differentiable"):
        with pytest.raises(ConfigError, match=f"not defined with AdamW's {option}; leave it out"):
            options: dict[str, Any] = {option: True}
            RampingAdamW([weight], **options).ramp(weight)
    assert not plain.state


def test_a_copy_takes_the_same_steps() -> None:
    weight = torch.nn.Parameter(torch.randn(64))
    optimizer = RampingAdamW([weight])
    optimizer.ramp(weight)
    copied = copy.deepcopy(optimizer)
    [same] = copied.param_groups[0]["params"]
    for one in (weight, same):
        one.grad = torch.ones(64)
    optimizer.step()
    copied.step()
    assert torch.equal(weight, same)
