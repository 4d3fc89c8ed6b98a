"""Averages of weights: their formula, parts of them, and the linear that reads one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_fp4 import ConfigError, GemmRecipe, Quantizer, Recipe, get_recipe, linear
from megatron_fp4.arithmetic.hadamard import Hadamard
from megatron_fp4.arithmetic.quantizer import quantize_matrix
from megatron_fp4.arithmetic.weight_states import WeightAverage
from megatron_fp4.execution.call import Site
from megatron_fp4.linear import quantized_linear
from testing.oracles import normal, relative_error

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
        average.update(state, weight)
        wanted = beta * wanted + np.float32(1 - 0.9) * weight.numpy()
        assert wanted.dtype == np.float32 and (state.numpy() == wanted).all()
    assert relative_error(state, torch.from_numpy(wanted).double()) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_parts_of_a_weight_have_the_bits_of_the_whole(dtype: torch.dtype) -> None:
    """Wherever a rank's part begins and ends."""
    average = WeightAverage(0.998)
    first, second = (normal((1031,), seed).to(dtype) for seed in (1, 2))
    whole = average.start(first)
    average.update(whole, second)
    for cut in (1, 3, 8, 17, 500, 1030):
        for part in (slice(0, cut), slice(cut, None)):
            state = average.start(first[part])
            average.update(state, second[part])
            assert state.dtype == torch.float32 and torch.equal(state, whole[part])


def test_it_does_not_share_memory_with_the_weight() -> None:
    weight = normal((4, 4), 3)
    state = WeightAverage().start(weight)
    WeightAverage().update(state, weight + 1)
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


def test_a_linear_without_one_says_who_keeps_it() -> None:
    with pytest.raises(ConfigError, match="fc: its recipe keeps an average.*train under Megatron"):
        linear(normal((32, 64), 1), normal((64, 64), 2), recipe=RECIPE, name="fc")


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


def test_a_schedule_that_ends_the_rounding_ends_the_average() -> None:
    late = replace(RECIPE, bf16_after=0.5)
    assert late.at(0.4).weight_states == RECIPE.weight_states
    assert late.at(0.6).weight_states == {}
    dgrad = replace(RECIPE, bf16_after=0.5, bf16_gemms=("dgrad",))
    assert dgrad.at(0.6).weight_states == RECIPE.weight_states
    assert Recipe("none").weight_states == {}
