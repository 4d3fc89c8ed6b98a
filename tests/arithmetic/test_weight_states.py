"""Averages of weights: their formula, parts of them, and the linear that reads one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_fp4 import ConfigError, GemmRecipe, Quantizer, Recipe, get_recipe, linear
from megatron_fp4.arithmetic.hadamard import Hadamard
from megatron_fp4.arithmetic.quantize import quantize_matrix
from megatron_fp4.arithmetic.weight_states import OptimizerStep, WeightAverage
from megatron_fp4.execution.call import Site
from megatron_fp4.linear import quantized_linear
from megatron_fp4.recipe import GEMMS
from testing.oracles import normal, relative_error

STEP = OptimizerStep(number=1, total=100)
CEIL = Quantizer(rule="ceil")
EMA = replace(CEIL, rounding="ema")
RECIPE = replace(
    get_recipe("tetrajet"), fprop=GemmRecipe(CEIL, EMA), weight_average=WeightAverage(0.9)
)


def test_the_formula_is_numpys_in_float32() -> None:
    average, beta = WeightAverage(0.9), np.float32(0.9)
    weights = [normal((7, 33), seed) for seed in range(6)]
    state = average.start(weights[0])
    wanted = weights[0].numpy()
    for weight in weights[1:]:
        average.update(state, weight, STEP)
        wanted = beta * wanted + np.float32(1 - 0.9) * weight.numpy()
        assert wanted.dtype == np.float32 and (state.numpy() == wanted).all()
    assert relative_error(state, torch.from_numpy(wanted).double()) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_parts_of_a_weight_have_the_bits_of_the_whole(dtype: torch.dtype) -> None:
    """Wherever a rank's part begins and ends."""
    average = WeightAverage(0.998)
    first, second = (normal((1031,), seed).to(dtype) for seed in (1, 2))
    whole = average.start(first)
    average.update(whole, second, STEP)
    for cut in (1, 3, 8, 17, 500, 1030):
        for part in (slice(0, cut), slice(cut, None)):
            state = average.start(first[part])
            average.update(state, second[part], STEP)
            assert state.dtype == torch.float32 and torch.equal(state, whole[part])


def test_it_does_not_share_memory_with_the_weight() -> None:
    weight = normal((4, 4), 3)
    state = WeightAverage().start(weight)
    WeightAverage().update(state, weight + 1, STEP)
    assert torch.equal(weight, normal((4, 4), 3)) and not torch.equal(state, weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_linear_multiplies_w_rounded_towards_its_average(dtype: torch.dtype) -> None:
    x, w, average = (
        normal(shape, seed) for seed, shape in enumerate(((32, 64), (96, 64), (96, 64)))
    )
    x, w = x.to(dtype), w.to(dtype)
    y = quantized_linear(x, w, None, RECIPE, Site(average=average))
    a = quantize_matrix(x, CEIL, axis=1).dequantize(torch.float64)
    b = quantize_matrix(w, EMA, axis=1, average=average).dequantize(torch.float64)
    assert relative_error(y, a @ b.t()) < (2e-3 if dtype == torch.bfloat16 else 1e-6)
    nearest = quantize_matrix(w, CEIL, axis=1).dequantize(torch.float64)
    assert relative_error(y, a @ nearest.t()) > 0.05  # the control
    # It is read where it lies, whenever the linear runs.
    average.copy_(w.float())
    y = quantized_linear(x, w, None, RECIPE, Site(average=average))
    assert relative_error(y, a @ nearest.t()) < (2e-3 if dtype == torch.bfloat16 else 1e-6)


def test_without_an_average_the_weight_is_rounded_towards_itself() -> None:
    x, w, average = (normal(shape, i) for i, shape in enumerate(((32, 64), (96, 64), (96, 64))))
    alone = linear(x, w, recipe=RECIPE)
    assert torch.equal(alone, linear(x, w, recipe="tetrajet"))
    assert torch.equal(alone, linear(x, w, recipe=RECIPE, average=w))
    assert not torch.equal(alone, linear(x, w, recipe=RECIPE, average=average))


def test_an_average_that_does_not_fit_is_refused() -> None:
    x, w = normal((32, 64), 1), normal((96, 64), 2)
    for average in (w.double(), w.t().contiguous(), w[:32]):
        with pytest.raises(ConfigError, match=r"fc: an average is float32 \[96, 64\] on cpu, not"):
            linear(x, w, recipe=RECIPE, name="fc", average=average)
    with pytest.raises(ConfigError, match="recipe tetrajet reads no average"):
        linear(x, w, recipe="tetrajet", average=w)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"weight_average": None}, "belong together"),
        ({"fprop": GemmRecipe(CEIL, CEIL)}, "belong together"),
        ({"fprop": GemmRecipe(EMA, EMA)}, "kept of W alone"),
        (
            {"fprop": GemmRecipe(CEIL, EMA, Hadamard(32)), "backward": "raw"},
            "ema takes no Hadamard transform",
        ),
    ],
    ids=["no-average", "no-rounding", "x", "hadamard"],
)
def test_what_a_recipe_refuses(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        replace(RECIPE, **fields)


def test_beta_lies_between_0_and_1() -> None:
    for beta in (-0.1, 1.0, 2.0, float("nan")):
        with pytest.raises(ConfigError, match="beta is in"):
            WeightAverage(beta)


def betas(average: WeightAverage, rates: list[float] | None = None, total: int = 40) -> list[float]:
    rates = rates or [1.0] * total
    return [average.beta_at(OptimizerStep(i + 1, total, rate)) for i, rate in enumerate(rates)]


def test_the_average_is_the_weight_until_its_delay_is_over() -> None:
    assert betas(WeightAverage(0.9, delay=10)) == [0.0] * 10 + [0.9] * 30
    average, weight = WeightAverage(0.9, delay=10), normal((5, 7), 1)
    state = average.start(normal((5, 7), 2))
    average.update(state, weight, OptimizerStep(10, 40))
    assert torch.equal(state, weight)
    average.update(state, 2 * weight, OptimizerStep(11, 40))
    assert not torch.equal(state, 2 * weight)


def test_a_half_life_is_a_share_of_training() -> None:
    """What the weights of a step contribute has halved after that share."""
    for total in (40, 4000):
        found = betas(WeightAverage(half_life=0.1), total=total)
        assert np.prod(found[: total // 10]) == pytest.approx(0.5)
    assert max(betas(WeightAverage(half_life=1e-9))) < 1e-30  # far shorter than a step


def test_the_window_grows_while_it_warms_up() -> None:
    found = betas(WeightAverage(0.9, warmup=9, delay=2))
    windows = [1 / (1 - beta) for beta in found]
    assert windows == pytest.approx([1, 1, *range(2, 10), *[10] * 30])


def test_the_average_stays_as_far_behind_whatever_the_learning_rate() -> None:
    """A weight that moves by `rate` a step: how far the average lags behind it, after a while."""
    average = WeightAverage(0.9, follows_lr=True)
    for follows, wanted in ((True, [9.0, 9.5, 9.75]), (False, [9.0, 4.5, 2.25])):
        lags = []
        for rate in (1.0, 0.5, 0.25):
            weight, state = torch.zeros(1), torch.zeros(1)
            for number in range(1, 400):
                weight = weight + rate
                kept = replace(average, follows_lr=follows)
                kept.update(state, weight, OptimizerStep(number, 400, rate))
            lags.append(float(weight - state))
        assert lags == pytest.approx(wanted, rel=1e-3)
    # The average does not stop for good where the learning rate is 0.
    assert average.beta_at(OptimizerStep(5, 40, 0.0)) == pytest.approx(0.999)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"half_life": 0.0}, "half_life is a share of training above 0"),
        ({"half_life": float("nan")}, "half_life is a share"),
        ({"warmup": -1}, "warmup is a number of steps"),
        ({"delay": -1}, "delay is a number of steps"),
    ],
)
def test_fields_of_an_average_that_are_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        WeightAverage(**fields)


def test_the_average_ends_with_the_rounding() -> None:
    assert RECIPE.without(GEMMS).weight_states == {}
    assert RECIPE.without(("dgrad",)).weight_states == RECIPE.weight_states
    assert Recipe("none").weight_states == {}
