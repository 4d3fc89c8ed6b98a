"""The state of an AdamW with moments in few bits: saved, loaded, taken over, refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from megatron_fp4.arithmetic.low_bit_adamw import LowBitAdamW
from megatron_fp4.arithmetic.moments import Moments
from megatron_fp4.errors import ConfigError
from testing.low_bit import (
    ALL,
    LOW,
    OPTIONS,
    groups_of,
    losses_of_closures,
    low_bit,
    owned,
    parameters,
    saved,
    through,
    train,
    weights,
)
from testing.oracles import normal

# --- loading and saving ---------------------------------------------------------------------------


@pytest.mark.parametrize("moments", ALL, ids=str)
def test_a_resumed_run_is_the_same_bit_for_bit(moments: Moments) -> None:
    whole, first = weights(), weights()
    train(low_bit(whole, moments), range(9))
    optimizer = low_bit(first, moments)
    train(optimizer, range(5))
    file = saved(optimizer)
    assert file["state"][0].keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert {each.dtype for state in file["state"].values() for each in state.values()} == {
        torch.float32
    }
    for drops in (False, True):
        second = [torch.nn.Parameter(param.detach().clone()) for param in first]
        resumed = low_bit(second, moments)
        found = dict(file, param_groups=[dict(group) for group in file["param_groups"]])
        if drops:  # the control: the number of steps, of which bits and bias depend, is not loaded
            found["state"] = {n: state | {"step": 0.0} for n, state in found["state"].items()}
            for group in found["param_groups"]:
                del group["step"]
        resumed.load_state_dict(found)
        for param, key in ((p, key) for p in second for key in moments.forms):
            assert resumed.state[param][key].dtype == moments.forms[key].dtype
        train(resumed, range(5, 9))
        assert all(map(torch.equal, second, whole)) is not drops


@pytest.mark.parametrize("has_group_s", [True, False])
def test_settings_are_loaded_without_moments(has_group_s: bool) -> None:
    """Options and the number of steps are those of the file; moments stay the optimizer's own."""
    other, own = low_bit(weights(), Moments(), lr=0.5), low_bit(weights(), Moments())
    train(other, range(5))
    train(own, range(2))
    file = saved(other)
    file["param_groups"][1]["weight_decay"] = 0.25
    for group in [] if has_group_s else file["param_groups"]:
        del group["step"]  # torch's AdamW has none there
    codes = [own.state[p][key].clone() for p in parameters(own) for key in Moments().forms]
    own.load_settings(file)
    assert [int(own.state[p]["step"]) for p in parameters(own)] == [5] * 4
    assert [group["lr"] for group in own.param_groups] == [1e-2 / 1.4] * 2
    assert [group["weight_decay"] for group in own.param_groups] == [0.1, 0.25]
    kept = [own.state[p][key] for p in parameters(own) for key in Moments().forms]
    assert all(map(torch.equal, kept, codes))


def test_float32_runs_begin_and_end_it() -> None:
    """AdamW's state is rounded once, to nearest; AdamW goes on from what is decoded."""
    params = weights()
    plain = torch.optim.AdamW(groups_of(params), foreach=False, **OPTIONS)
    train(plain, range(5))
    mine = [torch.nn.Parameter(param.detach().clone()) for param in params]
    optimizer = low_bit(mine, Moments())
    optimizer.load_state_dict(saved(plain))
    for key, form in Moments().forms.items():
        for a, b in zip(params, mine, strict=True):
            exact, found = plain.state[a][key], optimizer.state_in_float32(b)[key]
            nearest = through(form, exact.reshape(-1), None).view(exact.shape)
            assert torch.equal(found, nearest)
    assert {float(state["step"]) for state in optimizer.state.values()} == {5.0}
    train(optimizer, range(5, 8))
    after = [torch.nn.Parameter(param.detach().clone()) for param in mine]
    again = torch.optim.AdamW(groups_of(after), foreach=False, **OPTIONS)
    again.load_state_dict(saved(optimizer))
    for a, b in zip(mine, after, strict=True):
        for key, value in optimizer.state_in_float32(a).items():
            assert torch.equal(again.state[b][key], value)
    train(again, range(8, 10))
    assert all(param.isfinite().all() for param in after)


def test_states_of_others_are_kept() -> None:
    params = weights()
    optimizer = low_bit(params, Moments())
    train(optimizer, range(2))
    optimizer.state[params[0]]["fp4_average"] = normal((9, 17), 3)
    resumed = low_bit(weights(), Moments())
    resumed.load_state_dict(saved(optimizer))
    assert torch.equal(resumed.state[parameters(resumed)[0]]["fp4_average"], normal((9, 17), 3))


# --- as a torch optimizer -------------------------------------------------------------------------


def test_in_place_of_another_optimizer() -> None:
    whole, mine = weights(), weights()
    train(low_bit(whole, Moments()), range(4))
    plain = torch.optim.AdamW(groups_of(mine), **OPTIONS)
    optimizer = LowBitAdamW.in_place_of(plain, seed=7)
    for i, param in enumerate(mine):
        optimizer.place(param, owned(f"layer.{i}"))
    calls: list[int] = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    assert optimizer.param_groups is plain.param_groups
    train(optimizer, range(4))
    assert all(map(torch.equal, whole, mine)) and len(calls) == 4
    assert [group["step"] for group in optimizer.param_groups] == [4, 4]


def test_a_closure_is_called_once_and_with_gradients() -> None:
    params = weights()
    optimizer = low_bit(params, Moments())
    losses = losses_of_closures(optimizer, params, 40)
    assert losses[-1] < 0.9 * losses[0]


def test_what_is_refused() -> None:
    weight = torch.nn.Parameter(normal((3, 4), 1))
    for option in ("amsgrad", "maximize", "capturable", "differentiable", "foreach", "fused"):
        with pytest.raises(ConfigError, match=f"with AdamW's {option}; leave it out"):
            options: dict[str, Any] = {option: True}
            LowBitAdamW([weight], **options)
        plain = torch.optim.AdamW([weight])
        plain.param_groups[0][option] = True
        with pytest.raises(ConfigError, match=f"with AdamW's {option}; leave it out"):
            LowBitAdamW.in_place_of(plain)
    with pytest.raises(ConfigError, match="not of Adam; use AdamW"):
        LowBitAdamW.in_place_of(torch.optim.Adam([weight]))
    with pytest.raises(ConfigError, match=r"float32 weights, not torch.bfloat16; give the opt"):
        LowBitAdamW([torch.nn.Parameter(weight.detach().bfloat16())])
    with pytest.raises(ConfigError, match="a seed is an integer"):
        LowBitAdamW([weight], seed=-1)
    for given in ({"m": "fp16"}, {"v": "int8"}):
        with pytest.raises(ConfigError, match="is stored in one of fp32, bf16"):
            Moments(**given)

    optimizer = LowBitAdamW([weight])
    weight.grad = normal((3, 4), 2)
    with pytest.raises(ConfigError, match="has no place: call place with it"):
        optimizer.step()
    with pytest.raises(ConfigError, match="w is no parameter of this optimizer"):
        optimizer.place(torch.nn.Parameter(normal((3, 4), 1)), owned("w"))
    optimizer.place(weight, owned("w"))
    with pytest.raises(ConfigError, match="no state yet: call init_state"):
        optimizer.state_in_float32(weight)
    optimizer.step()
    found = optimizer.state_dict()
    found["param_groups"][0]["amsgrad"] = True
    with pytest.raises(ConfigError, match="with AdamW's amsgrad; leave it out"):
        LowBitAdamW([weight]).load_state_dict(found)
    codes = torch.optim.Optimizer.state_dict(optimizer)  # without decoding
    with pytest.raises(ConfigError, match=r"float32 \[3, 4\], not torch.uint8 \[3, 4\]; save it"):
        optimizer.load_state_dict(codes)
    with pytest.raises(ConfigError, match=r"exp_avg is loaded as float32 \[3, 4\], not none"):
        optimizer.set_state_in_float32(weight, {"step": 1})


def test_a_parameter_without_elements_or_gradient() -> None:
    empty, resting = torch.nn.Parameter(torch.zeros(0)), torch.nn.Parameter(torch.ones(3))
    optimizer = low_bit([empty, resting], Moments())
    empty.grad = torch.zeros(0)
    optimizer.step()
    assert list(optimizer.state) == [empty] and optimizer.state[empty]["exp_avg"].numel() == 0


def test_a_copy_takes_the_same_steps() -> None:
    optimizer = low_bit(weights(), LOW[0])
    train(optimizer, range(3))
    copied = copy.deepcopy(optimizer)
    train(optimizer, range(3, 6))
    train(copied, range(3, 6))
    for own, same in zip(parameters(optimizer), parameters(copied), strict=True):
        assert torch.equal(own, same)
