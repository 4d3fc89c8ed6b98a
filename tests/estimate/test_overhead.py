"""The time of a linear by its costs, with kernels for all techniques and as it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from megatron_fp4 import get_recipe
from megatron_fp4.estimate.costs_text import text
from megatron_fp4.estimate.gpus import MEASURED, Gpu
from megatron_fp4.estimate.overhead import (
    DEVICES,
    Overhead,
    as_it_runs,
    setting_of,
    with_kernels,
)
from megatron_fp4.estimate.rates import RATES
from tests.estimate.test_costs import RECIPES
from tools.sweep.axes import settled, with_values
from tools.sweep.building import recipe_of
from tools.sweep.sampling import sample


@pytest.mark.parametrize("name", RECIPES)
def test_as_it_runs_is_never_faster_on_hopper(name: str) -> None:
    setting = setting_of(MEASURED, 4096, 4096, 8192)
    needs, runs = (each(RECIPES[name], setting, MEASURED) for each in (with_kernels, as_it_runs))
    assert runs.total >= needs.total * (1 - 1e-3)
    assert runs.bf16 == needs.bf16
    if name == "bf16":
        assert needs.times_bf16 == needs.times_products == 1


def test_an_estimator_in_pytorch_takes_pytorch_s_time() -> None:
    """No kernel applies DGE under UE5M3 scales; one does under E8M0 scales."""
    setting = setting_of(MEASURED, 4096, 4096, 8192)

    def of_estimator(chosen: dict[str, str], figure: Callable[..., Overhead]) -> float:
        combinations = with_values(chosen | {"estimator": "dge"}), with_values(chosen)
        found, without = (figure(recipe_of(each), setting, MEASURED).total for each in combinations)
        return found - without

    slow = {"scale": "ue5m3", "rule": "nearest", "backward_rule": "inflated"}
    fast = {"rule": "ceil", "backward_rule": "ceil"}
    by_pytorch = RATES.seconds["element by PyTorch"] * 4096 * 4096
    assert of_estimator(slow, as_it_runs) == pytest.approx(by_pytorch)
    assert of_estimator(slow, with_kernels) < by_pytorch / 2
    assert of_estimator(fast, as_it_runs) == pytest.approx(of_estimator(fast, with_kernels))


def test_the_text_says_what_was_never_measured() -> None:
    recipe, setting = get_recipe("mxfp4-rht-sr"), setting_of(MEASURED, 4096, 14336, 8192)
    hopper, blackwell = (text(recipe, setting, gpu) for gpu in DEVICES.values())
    assert "never measured" in blackwell and "never measured" not in hopper
    assert "Hadamard transform in bf16" in hopper and "product in fp8" in hopper
    for each, gpu in ((hopper, MEASURED), (blackwell, DEVICES["blackwell"])):
        for what, found in (
            ("with a kernel for each technique", with_kernels(recipe, setting, gpu)),
            ("as it runs today", as_it_runs(recipe, setting, gpu)),
        ):
            assert f"{what}: {1e3 * found.total:.2f} ms, {found.times_bf16:.2f} of a" in each
    assert "sm100: torch's MXFP4 GEMMs" in blackwell  # why it is not used


@pytest.mark.parametrize("gpu", DEVICES.values())
def test_every_recipe_of_the_sweep_is_costed(gpu: Gpu) -> None:
    """Those of a sample. Each axis that adds a technique adds its time."""
    drawn = sample(120, seed=2)
    setting = setting_of(gpu, 4096, 4096, 8192)
    for combination in drawn:
        found = with_kernels(recipe_of(combination), setting, gpu)
        assert found.total > found.products > 0
        for axis, more, less in (
            ("outer_scale", "tensor", "none"),
            ("outer_scale", "row", "none"),
            ("maximum", "vjp", "straight-through"),
            ("group", "128", "64"),
        ):
            other = replace(combination, **{axis: less})
            if getattr(combination, axis) == more and settled(other) == other:
                assert with_kernels(recipe_of(other), setting, gpu).total < found.total
