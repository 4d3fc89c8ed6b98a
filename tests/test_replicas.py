"""Data-parallel replicas draw bits of their own, and what a layer counts is kept in its state."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_fp4 import ConfigError, Linear, linear, name_layers, quantize
from megatron_fp4.arithmetic.philox import Key, Noise, Placement, random_bits16
from megatron_fp4.replicas import ROWS, own_replica, replica_placements
from testing.oracles import element_bits, normal
from testing.worlds.launch import SCRIPTS, spawn

SIZE = 64
X, DY = normal((SIZE, SIZE), 1), normal((SIZE, SIZE), 2)


def layer(recipe: str = "tetrajet", **options: Any) -> Linear:
    torch.manual_seed(0)
    return Linear(SIZE, SIZE, recipe=recipe, seed=5, **options)


def gradient(module: nn.Module, step: int | None = None) -> Tensor:
    """Of the first weight, in the next step or in that one."""
    module.zero_grad()
    if step is not None:
        module.steps = step  # type: ignore[assignment]
    module(X).backward(DY)
    weight = next(module.parameters()).grad
    assert weight is not None
    return weight.clone()


def test_two_ranks(tmp_path: Path) -> None:
    run = spawn(2, SCRIPTS / "data_parallel.py", str(tmp_path))
    assert run.returncode == 0, run.stdout[-3000:]


# --- random bits ----------------------------------------------------------------------------------


@pytest.mark.parametrize("replica", [0, 3, 2**16 - 1])
def test_a_replica_s_rows_begin_at_its_multiple_of_2_to_the_32(replica: int) -> None:
    rows, columns, groups = 3, 40, 5
    for operand in ("x", "dy"):
        placement = replica_placements(replica)[operand]
        found = random_bits16(rows, columns, Key(7, 9), 11, placement)
        for row in range(rows):
            for c in range(columns):
                group = (replica * 2**32 + row) * groups + c // 8
                assert found[row, c] == element_bits(7, 9, 11, group, c % 8)


def test_no_two_replicas_share_a_group() -> None:
    """Of the last replica with the widest rows the last group's index is below 2^64, where the
    counter ends."""
    last = replica_placements(2**16 - 1)["x"].first_row + ROWS - 1
    assert last * 2**16 + 2**16 - 1 == 2**64 - 1
    starts = [replica_placements(replica)["x"].first_row for replica in (0, 1, 2**16 - 1)]
    assert starts == [0, ROWS, (2**16 - 1) * ROWS]


def test_averaged_errors_fall_with_the_number_of_replicas() -> None:
    """Squared errors, over draws. Negative control: under one replica's bits they do not fall."""
    replicas, draws = 4, 6

    def ratios(replica_of: Callable[[int], int]) -> Tensor:
        gradients = [gradient(layer(replica=replica_of(i % replicas)), step=i // replicas)
                     for i in range(replicas * draws)]  # fmt: skip
        found = torch.stack(gradients).view(draws, replicas, SIZE, SIZE).double()
        error = found - expected
        averaged, alone = (e.square().sum((1, 2)) for e in (error.mean(1), error[:, 0]))
        return averaged / alone

    forward = quantize(X, "mxfp4-ceil", axis=-1).dequantize(torch.float64)
    expected = DY.double().t() @ forward  # what tetrajet's dW estimates
    found = ratios(lambda replica: replica)
    assert abs(found.mean() - 1 / replicas) < 5 * found.std() / draws**0.5 < 0.1
    assert torch.allclose(ratios(lambda replica: 0), torch.ones(draws).double())


def test_replicas_differ_in_x_and_dy_and_agree_in_w() -> None:
    """And in the signs of wgrad, which a microbatch has of its own."""
    found = {}
    for replica in (0, 1):
        x, w = X.clone().requires_grad_(), normal((SIZE, SIZE), 3).requires_grad_()
        linear(x, w, recipe="mxfp4-rht-sr", replica=replica).backward(DY)
        found[replica] = x.grad, w.grad
    assert not any(torch.equal(a, b) for a, b in zip(found[0], found[1], strict=True))  # type: ignore
    w_noise = Noise(Key(1), 2, replica_placements(1).get("w", Placement()))
    assert torch.equal(w_noise.bits16(X), Noise(Key(1), 2).bits16(X))


@pytest.mark.parametrize("replica", [-1, 2**16, 1.5, "0"])
def test_a_replica_is_a_small_integer(replica: Any) -> None:
    with pytest.raises(ConfigError, match="a replica is an integer from 0 to 65535, not "):
        layer(replica=replica)
    with pytest.raises(ConfigError, match="a replica is an integer"):
        linear(X, X, recipe="mxfp4", replica=replica)


def test_without_torch_distributed_a_process_is_replica_0() -> None:
    assert own_replica() == 0
    assert torch.equal(gradient(layer()), gradient(layer(replica=0)))
    assert not torch.equal(gradient(layer()), gradient(layer(replica=1)))


# --- steps in the state ---------------------------------------------------------------------------


@pytest.mark.parametrize("in_memory", [False, True])
def test_the_state_restores_the_count(in_memory: bool) -> None:
    trained, resumed = layer(), layer()
    if in_memory:
        resumed.steps = torch.tensor(0)
    place = resumed.steps
    gradient(trained)
    resumed.load_state_dict(trained.state_dict())
    assert (resumed.steps is place) == in_memory and int(resumed.steps) == 1
    assert torch.equal(gradient(resumed), gradient(trained))
    assert not torch.equal(gradient(layer()), gradient(trained))  # negative control


def test_a_count_that_was_converted_to_floating_point_is_not_loaded() -> None:
    """It is rounded, to Inf in float16 from 65,520 on, which was once a traceback."""
    trained, resumed = layer(), layer()
    trained.steps, resumed.steps = 70_000, 3
    state = {key: tensor.half() for key, tensor in trained.state_dict().items()}
    with pytest.warns(UserWarning, match="count of steps in torch.float16.* keeps its own"):
        resumed.load_state_dict(state)
    assert resumed.steps == 3 and torch.equal(resumed.weight.half(), trained.weight.half())


def test_an_nn_linear_s_state_loads_strictly_and_leaves_the_count() -> None:
    plain, module = nn.Sequential(nn.Linear(SIZE, SIZE)), nn.Sequential(layer())
    gradient(module)
    assert not any(module.load_state_dict(plain.state_dict(), strict=True))
    assert module[0].steps == 1 and torch.equal(module[0].weight, plain[0].weight)  # type: ignore
    with pytest.raises(RuntimeError, match="Missing key.*0.bias"):
        module.load_state_dict({"0.weight": plain[0].weight})


@pytest.mark.parametrize("convert", ["bfloat16", "half", "double"])
def test_conversions_leave_the_count_alone(convert: str) -> None:
    module = layer()
    module.steps = 2**31 + 1  # no integer of these dtypes
    assert int(getattr(module, convert)().state_dict()["_extra_state"]) == 2**31 + 1


def test_copies_and_pickles_go_on_alike() -> None:
    module = layer(replica=3)
    gradient(module)
    copies = [copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
    following = gradient(module)
    assert all(torch.equal(gradient(other), following) for other in copies)


def test_data_parallel_is_refused() -> None:
    """Its replicas are copies that count for themselves and are thrown away."""
    with pytest.raises(ConfigError, match="fc: nn.DataParallel .* DistributedDataParallel"):
        layer(name="fc")._replicate_for_data_parallel()


# --- names ----------------------------------------------------------------------------------------


def warned(model: nn.Module) -> list[str]:
    gc.collect()  # layers of other tests
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gradient(model)
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("copied", [False, True])
def test_layers_of_one_name_are_told(copied: bool) -> None:
    first = layer()
    second = copy.deepcopy(first) if copied else layer()
    [told] = warned(nn.Sequential(first, second))
    assert (
        "two layers are called 'linear' and draw the same random bits" in told and "\n" not in told
    )


def test_layers_that_share_nothing_are_not_told() -> None:
    assert not warned(nn.Sequential(layer(name="a"), layer(name="b")))
    assert not warned(nn.Sequential(layer("mxfp4"), layer("mxfp4")))  # draws nothing
    assert not warned(nn.Sequential(*[layer(name="c")] * 2))  # each call is a step
    other_seed = Linear(SIZE, SIZE, recipe="tetrajet", seed=6)
    assert not warned(nn.Sequential(layer(), other_seed))
    warned(layer(name="gone"))
    assert not warned(layer(name="gone"))


def test_name_layers_names_by_place() -> None:
    block = nn.ModuleDict({"fc1": layer(), "fc2": layer()})
    model = nn.Sequential(*(copy.deepcopy(block["fc1"]) for _ in range(2)), nn.Linear(SIZE, SIZE))
    assert name_layers(model) is model
    assert [model[0].name, model[1].name] == ["0", "1"] and not warned(model)
    name_layers(block)
    assert [module.name for module in block.values()] == ["fc1", "fc2"]  # type: ignore[union-attr]
    assert name_layers(layer(name="alone")).name == "alone"
