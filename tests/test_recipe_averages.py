"""Q-EMA as a recipe of its own and as options of others (recipes/averaging.py)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_fp4 import ConfigError, get_recipe, list_recipes
from megatron_fp4.arithmetic.weight_states import WeightAverage

PLAIN: dict[str, Any] = {"name": "", "paper": "", "weight_average": None}


def test_tetrajet_ema_is_tetrajet_but_for_q2() -> None:
    """Q2 alone, the quantizer of W in the forward pass, rounds towards the average."""
    recipe, plain = get_recipe("tetrajet-ema"), get_recipe("tetrajet")
    assert recipe.weight_average == WeightAverage(beta=0.998, delay=10)
    assert recipe.fprop.b == replace(plain.fprop.b, rounding="ema")  # type: ignore[type-var]
    fprop = replace(recipe.fprop, b=plain.fprop.b)
    assert replace(recipe, fprop=fprop, **PLAIN) == replace(plain, **PLAIN)
    assert get_recipe("tetrajet-ema", rule="floor") != recipe


def test_the_options_are_those_of_other_recipes_too() -> None:
    one = get_recipe("tetrajet", ema_beta="0.99", ema_delay="3", ema_warmup=5)
    assert one.name == "tetrajet-ema" and one.weight_average == WeightAverage(
        0.99, None, False, 5, 3
    )
    assert one == replace(get_recipe("tetrajet-ema", ema_beta=0.99, ema_delay=3, ema_warmup=5),
                          paper=one.paper)  # fmt: skip
    other = get_recipe("mxfp4", ema_share="1/200", ema_follows_lr="true")
    assert other.weight_average == WeightAverage(half_life=0.005, follows_lr=True, delay=10)
    assert other.dgrad == get_recipe("mxfp4").dgrad  # W of dgrad has blocks along another axis


def test_a_file_takes_them_and_its_own_average_stays(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("base: tetrajet-ema\nweight_average: {beta: 0.5, warmup: 7}\n")
    assert get_recipe(str(file)).weight_average == WeightAverage(0.5, warmup=7)
    changed = get_recipe(str(file), ema_beta=0.25)
    assert changed.weight_average == WeightAverage(0.25, warmup=7)
    file.write_text("base: tetrajet\noptions: {ema_share: 0.01}\n")
    assert get_recipe(str(file)).weight_average == WeightAverage(half_life=0.01, delay=10)


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("dge-occ", {"ema_beta": 0.9}, "rounding ema takes e2m1 elements, e8m0 scales"),
        ("mxfp4-rht-sr", {"ema_beta": 0.9}, "here it is not quantized"),
        ("tetrajet", {"ema_beta": 1.0}, "beta is in"),
        ("tetrajet", {"ema_beta": "most"}, "ema_beta is a number, not 'most'"),
        ("tetrajet", {"ema_share": 0}, "half_life is a share of training above 0"),
        ("tetrajet", {"ema_beta": 0.9, "ema_share": 0.1}, "ema_beta or ema_share"),
        ("tetrajet-ema", {"ema_betta": 0.9}, "no option 'ema_betta'; .*ema_beta, ema_share"),
    ],
)
def test_what_is_refused(name: str, options: dict[str, Any], says: str) -> None:
    assert name in list_recipes()
    with pytest.raises(ConfigError, match=f"recipe '{name}': .*{says}"):
        get_recipe(name, **options)
