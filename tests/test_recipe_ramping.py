"""Q-Ramping as a recipe of its own and as options of others (recipes/ramping.py)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_fp4 import ConfigError, Linear, Phase, get_recipe, linear
from megatron_fp4.arithmetic.ramping import Ramping
from megatron_fp4.description import describe
from megatron_fp4.recipe import GEMMS
from megatron_fp4.recipes.ramping import moments_refusal
from testing.oracles import normal


def test_tetrajet_ramping_is_tetrajet_but_for_the_updates() -> None:
    recipe, plain = get_recipe("tetrajet-ramping"), get_recipe("tetrajet")
    assert recipe.ramping == Ramping(k1=16, k2=5, calibration=30)
    assert replace(recipe, ramping=None, name=plain.name, paper=plain.paper) == plain
    assert get_recipe("tetrajet-ramping", rule="floor") != recipe
    assert set(recipe.kept_dtypes) == {"ramping_sum", "ramping_count", "ramping_period"}
    assert not recipe.weight_states and not plain.kept_dtypes
    [line] = [line for line in describe(recipe) if "updates of W" in line]
    assert "every 5 * floor(R / 16) + 1 steps" in line and "over 30 steps every 1251 steps" in line


def test_the_options_are_those_of_other_recipes_too(tmp_path: Path) -> None:
    one = get_recipe("mxfp4", ramping_k1="8", ramping_most="1e2", ramping_interval_share="1/50")
    assert one.name == "mxfp4-ramping"
    assert one.ramping == Ramping(k1=8, most=100, interval_share=0.02)
    file = tmp_path / "mine.yaml"
    file.write_text("base: tetrajet\nramping: {interval_share: 0.1, k2: 3}\n")
    assert get_recipe(str(file)).ramping == Ramping(interval_share=0.1, k2=3)
    changed = get_recipe(str(file), ramping_interval=50).ramping
    assert changed == Ramping(interval=50, k2=3)


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("dge-occ", {"ramping_k1": 8}, "give W a quantizer of E2M1 with E8M0 scales"),
        ("mxfp4-rht-sr", {"ramping_k1": 8}, "give W a quantizer of E2M1 with E8M0 scales"),
        ("tetrajet-ema", {"ramping_k1": 8}, "rounds to nearest, not ema; leave one out"),
        ("mxfp4", {"ramping_k1": 0}, "k1 is a ratio above 0"),
        ("mxfp4", {"ramping_k2": 1.5}, "ramping_k2 is an integer, not 1.5"),
        ("mxfp4", {"ramping_interval": 9}, "choose a longer interval"),
        ("mxfp4", {"ramping_interval": 90, "ramping_interval_share": 0.1}, "give one of"),
        ("mxfp4", {"ramping_k3": 1}, "no option 'ramping_k3'; .*ramping_k1, ramping_k2"),
    ],
)
def test_what_is_refused(name: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=f"recipe '{name}': .*{says}"):
        get_recipe(name, **options)


def test_the_codes_of_w_may_not_end_before_ramping() -> None:
    recipe = get_recipe("tetrajet-ramping")
    with pytest.raises(ConfigError, match="recipe tetrajet-ramping has ramping.*keep fprop"):
        recipe.without(GEMMS)
    late = recipe.without(("dgrad", "wgrad"))
    assert late.ramping == recipe.ramping
    assert replace(recipe, phases=(Phase(0.9, late),)).at(0.95) is late


def test_linears_without_an_optimizer_warn_of_it() -> None:
    says = "recipe tetrajet-ramping updates weights at periods of their own"
    with pytest.warns(UserWarning, match=says):
        Linear(32, 32, recipe="tetrajet-ramping")
    x = normal((32, 32), 1)
    with pytest.warns(UserWarning, match=says):
        y = linear(x, x, recipe="tetrajet-ramping")
    assert torch.equal(y, linear(x, x, recipe="tetrajet"))


@pytest.mark.parametrize(
    ("total", "before"),
    [(10, []), (14, []), (15, [10]), (44, [10, 20, 30]), (45, [10, 20, 30, 40])],
)
def test_calibrations_precede_the_multiples_of_the_interval(total: int, before: list[int]) -> None:
    """But for step 0, and where too few steps are left."""
    ramping = Ramping(interval=10, calibration=5)
    assert [step for step in range(total) if ramping.calibrates_before(step, total)] == before
    assert ramping.calibrations_in(total) == len(before)


def test_moments_in_few_bits_are_refused_by_the_name_of_the_recipe_with_ramping() -> None:
    plain, ramped = get_recipe("tetrajet"), get_recipe("tetrajet-ramping")
    assert moments_refusal([plain], "--flag") is None
    said = moments_refusal([plain, ramped], "--flag")
    assert said is not None and said.startswith("--flag is not defined for recipe tetrajet-ramping")
