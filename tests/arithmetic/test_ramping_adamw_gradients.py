"""RampingAdamW where weights have no gradient in some steps: with periods of 1 it is torch's AdamW,
to the bit."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import pytest
import torch

from megatron_fp4.arithmetic.ramping_adamw import COUNT, PERIOD, SUM, RampingAdamW, Snapshot
from testing.low_bit import saved
from testing.oracles import normal

OPTIONS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
SHAPES = [(9, 17), (33,), (4,), (5,)]
# The steps, from 0, in which each weight has a gradient. All are in one group.
STEPS = [{3, 4, 6, 7}, {1, 3, 5, 7}, set(range(8)), set[int]()]
LAST = 8
BOTH = list(product([False, True], repeat=2))
MOMENTS = ("step", "exp_avg", "exp_avg_sq")


def weights() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(normal(shape, i)) for i, shape in enumerate(SHAPES)]


def plain(params: list[torch.nn.Parameter]) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, foreach=False, **OPTIONS)


def ramping(params: list[torch.nn.Parameter], ramps: bool) -> RampingAdamW:
    """An optimizer whose weights all have the period 1, or none of them has periods."""
    optimizer = RampingAdamW(params, **OPTIONS)
    for param in params if ramps else ():
        optimizer.ramp(param)
    return optimizer


def train(optimizer: torch.optim.Optimizer, numbers: range) -> None:
    for n in numbers:
        for i, param in enumerate(optimizer.param_groups[0]["params"]):
            param.grad = normal(SHAPES[i], 1000 * i + n) if n in STEPS[i] else None
        optimizer.step()


def keep_beside(optimizer: torch.optim.Optimizer) -> None:
    """Puts an average beside each weight, as its owner does after a first step."""
    for param in optimizer.param_groups[0]["params"]:
        optimizer.state[param].setdefault("fp4_average", param.detach().clone())


def assert_same(mine: torch.optim.Optimizer, theirs: torch.optim.Optimizer) -> None:
    """Asserts that weights and AdamW's own state are equal, bit for bit."""
    left, right = (each.param_groups[0]["params"] for each in (mine, theirs))
    for i, (one, other) in enumerate(zip(left, right, strict=True)):
        assert torch.equal(one, other), i
        own, of_torch = mine.state.get(one, {}), theirs.state.get(other, {})
        for key in MOMENTS:
            if key in of_torch:
                assert torch.equal(own[key], of_torch[key]), (i, key)
            else:  # no step so far
                assert not own.get(key, torch.zeros(())).any(), (i, key)


@pytest.mark.parametrize(("ramps", "beside"), BOTH)
def test_a_weight_rests_until_its_first_gradient(ramps: bool, beside: bool) -> None:
    mine, theirs = ramping(weights(), ramps), plain(weights())
    for n in range(LAST):
        train(mine, range(n, n + 1))
        train(theirs, range(n, n + 1))
        if beside:
            keep_beside(mine)
        assert_same(mine, theirs)
    first, *_, last = mine.param_groups[0]["params"]
    assert int(mine.state[first]["step"]) == len(STEPS[0])
    # What others keep is as they left it.
    averages = {"fp4_average"} if beside else set()
    assert mine.state.get(last, {}).keys() == averages
    own = {SUM, COUNT, PERIOD} if ramps else set()
    assert mine.state[first].keys() == {*MOMENTS, *averages, *own}


@pytest.mark.parametrize(("ramps", "beside"), BOTH)
@pytest.mark.parametrize("after", range(1, 6))
def test_a_state_dict_in_between_changes_nothing(ramps: bool, beside: bool, after: int) -> None:
    """Some weights have had no gradient when it is saved, others fewer than the rest."""
    resumed = []
    for optimizer in (ramping(weights(), ramps), plain(weights())):
        train(optimizer, range(after))
        if beside:
            keep_beside(optimizer)
        params = [copy.deepcopy(param) for param in optimizer.param_groups[0]["params"]]
        is_mine = isinstance(optimizer, RampingAdamW)
        other = ramping(params, ramps) if is_mine else plain(params)
        found = saved(optimizer)
        if beside and not is_mine:  # torch's AdamW does not know an average without moments
            found["state"] = {i: s for i, s in found["state"].items() if "step" in s}
        other.load_state_dict(found)
        train(other, range(after, LAST))
        resumed.append(other)
    assert_same(*resumed)


@pytest.mark.parametrize("after", [1, 4])
def test_a_state_dict_of_torch_s_adamw_is_loaded(after: int) -> None:
    theirs = plain(weights())
    train(theirs, range(after))
    params = [copy.deepcopy(param) for param in theirs.param_groups[0]["params"]]
    mine = ramping(params, ramps=True)
    mine.load_state_dict(saved(theirs))
    for each in (mine, theirs):
        train(each, range(after, LAST))
    assert_same(mine, theirs)


def test_the_oracle_sees_a_count_of_steps_that_is_the_group_s() -> None:
    """The control: the weights have taken different numbers of steps."""
    mine, theirs = ramping(weights(), ramps=False), plain(weights())
    for each in (mine, theirs):
        train(each, range(4))
    found = saved(mine)
    for state in found["state"].values():
        del state["step"]  # the group's is taken
    mine.load_state_dict(found)
    for each in (mine, theirs):
        train(each, range(4, LAST))
    with pytest.raises(AssertionError):
        assert_same(mine, theirs)


def test_a_calibration_before_a_weight_s_first_gradient() -> None:
    """The weight has an average beside it, and no moments."""
    mine, theirs = ramping(weights(), ramps=True), plain(weights())
    train(mine, range(1))
    train(theirs, range(1))
    keep_beside(mine)
    for _ in range(2):
        snapshot, mine.calibrates = Snapshot(mine), True
        train(mine, range(3, 5))
        snapshot.restore()
        mine.calibrates = False
    for each in (mine, theirs):
        train(each, range(1, LAST))
    assert_same(mine, theirs)


@pytest.mark.parametrize("ramps", [False, True])
def test_a_copy_before_a_weight_s_first_gradient(ramps: bool) -> None:
    mine, theirs = ramping(weights(), ramps), plain(weights())
    train(mine, range(1))
    train(theirs, range(1))
    keep_beside(mine)
    copied = copy.deepcopy(mine)
    for each in (copied, theirs):
        train(each, range(1, LAST))
    assert_same(copied, theirs)
