"""`Linear` with a recipe that rounds W towards its moving average, in any PyTorch model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_fp4 import ConfigError, Linear, get_recipe, linear, name_layers, update_averages

RECIPE = get_recipe("tetrajet-ema", ema_beta=0.5, ema_delay=1)


def layer(recipe: Any = RECIPE) -> Linear:
    torch.manual_seed(0)
    return Linear(64, 32, recipe=recipe, name="fc")


def trained(model: nn.Module, steps: int, first: int = 1, total: int = 10) -> list[Tensor]:
    """Trains with SGD, and returns the outputs of each step."""
    optimizer, outputs = torch.optim.SGD(model.parameters(), 0.05), []
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(32, 64, generator=generator)
        y = model(x)
        outputs.append(y.detach())
        optimizer.zero_grad()
        y.square().sum().backward()
        optimizer.step()
        update_averages(model, step, total)
    return outputs


def test_the_average_is_that_of_the_formula() -> None:
    model, weights = layer(), []
    for step in (1, 2, 3):
        trained(model, 1, step)
        weights.append(model.weight.detach().clone())
    assert model.average is not None
    one, two, three = weights  # after step 1 the average is the weight itself
    assert torch.allclose(model.average, 0.5 * (0.5 * one + 0.5 * two) + 0.5 * three, atol=1e-6)


def test_it_starts_as_the_weight_of_the_first_forward_pass() -> None:
    """Not as that of the constructor: models initialize their weights later."""
    model = layer()
    nn.init.normal_(model.weight)
    x = torch.randn(32, 64)
    assert torch.equal(model(x), linear(x, model.weight, model.bias, recipe="tetrajet", name="fc"))
    assert model.average is not None and torch.equal(model.average, model.weight)


def test_an_update_before_the_first_forward_pass_starts_with_the_weight_of_then() -> None:
    """As before a CUDA graph is captured."""
    model = layer()
    nn.init.constant_(model.weight, 3.0)
    update_averages(model, 1000, 2000)
    assert model.average is not None and torch.equal(model.average, model.weight)
    nn.init.constant_(model.weight, 5.0)
    update_averages(model, 1001, 2000)
    assert torch.equal(model.average, torch.full_like(model.average, 4.0))  # beta 0.5


def test_outputs_differ_from_nearest_rounding_once_it_lags() -> None:
    ours, nearest = trained(layer(), 4), trained(layer("tetrajet"), 4)
    same = [torch.equal(a, b) for a, b in zip(ours, nearest, strict=True)]
    assert same == [True, True, False, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_resumed_model_goes_on_bit_for_bit(dtype: torch.dtype) -> None:
    whole = name_layers(nn.Sequential(layer()))
    trained(whole, 3)
    resumed = name_layers(nn.Sequential(layer()))
    resumed.load_state_dict(copy.deepcopy(whole.state_dict()))
    one, other = trained(whole, 3, 4), trained(resumed, 3, 4)
    assert all(map(torch.equal, one, other))
    # The control: without the average it goes on otherwise.
    forgetful = name_layers(nn.Sequential(layer()))
    state = {key: t for key, t in whole.state_dict().items() if not key.endswith("average")}
    forgetful.load_state_dict(state)
    assert not torch.equal(trained(whole, 1, 7)[0], trained(forgetful, 1, 7)[0])


def test_it_stays_in_float32_wherever_the_layer_goes() -> None:
    model = layer()
    trained(model, 2)
    assert model.average is not None
    before = model.average.clone()
    model.bfloat16()
    assert model.weight.dtype == torch.bfloat16 and torch.equal(model.average, before)
    assert model.double().average is model.average and model.average.dtype == torch.float32
    moved = model.to("meta").average
    assert moved is not None and moved.is_meta


def test_it_is_in_float32_after_a_state_dict_of_another_dtype_was_assigned() -> None:
    model, other = layer(), Linear(64, 32, recipe=RECIPE, name="fc", device="meta")
    trained(model, 2)
    state = model.state_dict()
    state = {key: t.half() if t.is_floating_point() else t for key, t in state.items()}
    other.load_state_dict(state, assign=True)
    assert other.average is not None and other.average.dtype == torch.float32
    assert torch.equal(other.average.half(), state["average"])
    other(torch.randn(32, 64).half())


def test_recipes_with_and_without_one_exchange_state_dicts() -> None:
    plain, averaged = layer("tetrajet"), layer()
    trained(averaged, 2)
    plain.load_state_dict(averaged.state_dict())
    averaged.load_state_dict(plain.state_dict())
    averaged.load_state_dict(nn.Linear(64, 32).state_dict())
    x = torch.randn(32, 64)
    wanted = linear(x, averaged.weight, averaged.bias, recipe="tetrajet", name="fc", step=2)
    assert torch.equal(averaged.eval()(x), wanted)
    averaged.recipe = "tetrajet"  # type: ignore[assignment]
    assert averaged.average is None and "average" not in averaged.state_dict()


def test_a_state_dict_before_the_first_update_has_the_weight_as_the_average() -> None:
    """And not what the layer was made with, which a loaded layer would round W towards."""
    pretrained = nn.Linear(64, 32)
    model, other = layer(), layer()
    model.load_state_dict(pretrained.state_dict(), strict=False)
    other.load_state_dict(model.state_dict())
    x = torch.randn(32, 64)
    torch.testing.assert_close(other(x), model(x), rtol=0, atol=0)
    assert torch.equal(other.average, pretrained.weight)  # type: ignore[arg-type]


def test_the_first_average_is_the_weight_in_float32_under_autocast_too() -> None:
    x, weight = torch.randn(32, 64), layer().weight.detach()
    with torch.autocast("cpu", torch.bfloat16):
        found = linear(x, weight, recipe=RECIPE, name="fc")
        assert torch.equal(found, linear(x, weight, recipe=RECIPE, name="fc", average=weight))
        rounded = weight.bfloat16().float()  # the known mistake
        assert not torch.equal(found, linear(x, weight, recipe=RECIPE, name="fc", average=rounded))


def test_an_average_is_not_updated_before_the_first_step() -> None:
    with pytest.raises(ConfigError, match="from 1, not 0"):
        update_averages(layer(), 0, 10)
