"""The recipes and their registry: faithful data, options, YAML files, imported objects, errors."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_fp4 import (
    ConfigError,
    GemmRecipe,
    Quantizer,
    Recipe,
    get_recipe,
    list_recipes,
    recipe_options,
)
from megatron_fp4.arithmetic.estimators import Estimator
from megatron_fp4.arithmetic.hadamard import Hadamard
from megatron_fp4.arithmetic.outliers import OutlierClamp
from megatron_fp4.recipe import HIGH_PRECISION
from megatron_fp4.recipes import uniform_recipes

# --- the methods ----------------------------------------------------------------------------------


def test_tetrajet_has_six_quantizers() -> None:
    recipe = get_recipe("tetrajet")
    nearest = Quantizer("e2m1", "e8m0", (1, 32), "ceil", "nearest")
    stochastic = Quantizer("e2m1", "e8m0", (1, 32), "ceil", "stochastic")
    assert recipe.fprop == GemmRecipe(nearest, nearest)
    assert recipe.dgrad == recipe.wgrad == GemmRecipe(stochastic, stochastic)
    assert recipe.backward == "forward" and recipe.bias_gradient == "quantized"
    assert recipe.estimator is None and recipe.outliers is None


def test_training_llms_with_mxfp4() -> None:
    recipe = get_recipe("mxfp4-rht-sr")
    operand = Quantizer("e2m1", "e8m0", (1, 32), "floor", "stochastic", prescale=0.75)
    assert recipe.fprop == HIGH_PRECISION
    assert recipe.dgrad == recipe.wgrad == GemmRecipe(operand, operand, Hadamard(64), 16 / 9)
    assert recipe.backward == "raw" and recipe.bias_gradient == "raw"


def test_naive_mxfp4() -> None:
    recipe, q = get_recipe("mxfp4"), Quantizer("e2m1", "e8m0", (1, 32), "floor", "nearest")
    assert recipe.fprop == recipe.dgrad == recipe.wgrad == GemmRecipe(q, q)
    assert recipe.backward == "raw"


def test_fp8() -> None:
    recipe = get_recipe("fp8")
    operand = Quantizer("e4m3", "fp32", (1, 0), "absmax")
    assert recipe.fprop == GemmRecipe(operand, operand)
    assert recipe.dgrad == recipe.wgrad
    assert recipe.dgrad == GemmRecipe(Quantizer("e5m2", "fp32", (1, 0), "absmax"), operand)
    assert recipe.backward == "raw"


def test_dge_occ() -> None:
    recipe = get_recipe("dge-occ")
    x, w = recipe.fprop.a, recipe.fprop.b
    assert x == w == Quantizer("e2m1", "fp32", (1, 0), "absmax")
    for gemm in (recipe.dgrad, recipe.wgrad):
        assert gemm.a is not None and gemm.a.element == "e5m2" and gemm.b is None
    assert recipe.backward == "forward"
    assert recipe.estimator == Estimator(k=5.0, clip=3.0)
    assert recipe.outliers == OutlierClamp(0.99, "token", True, True)


def test_ue5m3() -> None:
    recipe = get_recipe("ue5m3")
    nearest = Quantizer("e2m1", "ue5m3", (1, 16), "nearest", "nearest", tensor_max=32768.0)
    up = Quantizer("e2m1", "ue5m3", (1, 16), "up", "stochastic", tensor_max=32768.0)
    assert recipe.fprop == GemmRecipe(nearest, nearest)
    assert recipe.dgrad == recipe.wgrad == GemmRecipe(up, up, Hadamard(64))
    assert recipe.backward == "forward" and recipe.bias_gradient == "raw"


@pytest.mark.parametrize("name", list_recipes())
def test_every_recipe_says_what_it_is(name: str) -> None:
    recipe = get_recipe(name)
    assert recipe.name == name
    assert bool(recipe.paper) == (name != "tetrajet-fp8")  # this project's own
    assert get_recipe(name) == recipe == get_recipe(name, **recipe_options(name))
    assert isinstance(hash(recipe), int)


def test_the_promised_recipes_are_there() -> None:
    assert {"mxfp4", "tetrajet", "mxfp4-rht-sr", "dge-occ", "ue5m3"} <= set(list_recipes())


# --- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "check"),
    [
        ("tetrajet", {"rule": "floor"}, lambda r: r.fprop.a.rule == "floor" == r.wgrad.b.rule),
        ("tetrajet", {"backward_rounding": "nearest"}, lambda r: not r.dgrad.a.stochastic),
        ("tetrajet", {"double_quantization": "false"}, lambda r: r.backward == "raw"),
        ("tetrajet", {"double_quantization": False}, lambda r: r.backward == "raw"),
        ("tetrajet", {"bias_gradient": "raw"}, lambda r: r.bias_gradient == "raw"),
        ("mxfp4", {"rule": "mse"}, lambda r: r.fprop.a.rule == "mse" == r.wgrad.b.rule),
        ("mxfp4", {"rule": "nearest"}, lambda r: r.fprop.a.rule == "nearest" == r.wgrad.b.rule),
        ("mxfp4", {"rule": "ceil"}, lambda r: r.dgrad.b.rule == "ceil"),
        ("mxfp4-rht-sr", {"hadamard": "128"}, lambda r: r.wgrad.hadamard.group == 128),
        ("mxfp4-rht-sr", {"hadamard": 0}, lambda r: r.wgrad.hadamard is None),
        ("mxfp4-rht-sr", {"signs": "none"}, lambda r: r.wgrad.hadamard.signs == "none"),
        ("mxfp4-rht-sr", {"signs": "fixed"}, lambda r: r.dgrad.hadamard == Hadamard(64, "fixed")),
        ("mxfp4-rht-sr", {"forward": "fp8"}, lambda r: r.fprop.a.element == "e4m3"),
        (
            "mxfp4-rht-sr",
            {"stochastic": "no"},
            lambda r: (r.wgrad.correction, r.wgrad.a) == (1.0, Quantizer()),
        ),
        ("ue5m3", {"rule": "up"}, lambda r: r.fprop.a.rule == "up" == r.wgrad.b.rule),
        ("ue5m3", {"backward_rule": "nearest"}, lambda r: r.dgrad.a.rule == "nearest"),
        ("ue5m3", {"stochastic": "no"}, lambda r: r.dgrad.b.rounding == "nearest"),
        ("ue5m3", {"hadamard": 16}, lambda r: r.wgrad.hadamard.group == 16),
        ("ue5m3", {"hadamard": 0}, lambda r: r.wgrad.hadamard is None),
        ("ue5m3", {"signs": "none"}, lambda r: r.dgrad.hadamard.signs == "none"),
        ("ue5m3", {"tensor_max": 0}, lambda r: r.fprop.b.tensor_max == 0 == r.wgrad.a.tensor_max),
        ("ue5m3", {"double_quantization": False}, lambda r: r.backward == "raw"),
        ("dge-occ", {"k": "3", "clip": 2}, lambda r: r.estimator == Estimator(k=3.0, clip=2.0)),
        ("dge-occ", {"k": "5/2"}, lambda r: r.estimator.k == 2.5),
        ("dge-occ", {"dge": "0"}, lambda r: r.estimator is None),
        ("dge-occ", {"occ": False}, lambda r: r.outliers is None),
        ("dge-occ", {"alpha": ".999"}, lambda r: r.outliers.alpha == 0.999),
        ("dge-occ", {"scope": "channel"}, lambda r: r.outliers.scope == "channel"),
        ("dge-occ", {"residual_in_wgrad": "No"}, lambda r: not r.outliers.residual_in_wgrad),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_options(name: str, options: dict[str, Any], check: Any) -> None:
    recipe = get_recipe(name, **options)
    assert check(recipe) and recipe != get_recipe(name)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("tetrajet", {"rul": "floor"}, ["rul", "rule", "double_quantization"]),
        ("tetrajet", {"rule": "round"}, ["rule", "ceil or floor", "round"]),
        ("tetrajet", {"double_quantization": "maybe"}, ["true or false", "maybe"]),
        ("mxfp4-rht-sr", {"hadamard": "64.5"}, ["hadamard", "an integer", "64.5"]),
        ("mxfp4-rht-sr", {"hadamard": 64.5}, ["an integer"]),
        ("mxfp4-rht-sr", {"hadamard": True}, ["an integer"]),
        ("mxfp4-rht-sr", {"hadamard": 48}, ["48", "power of two"]),
        ("dge-occ", {"alpha": "high"}, ["alpha", "a number"]),
        ("dge-occ", {"alpha": "1/0"}, ["alpha", "a number"]),
        ("dge-occ", {"alpha": 0.4}, ["alpha", "0.4"]),
        ("dge-occ", {"k": 0}, ["k of dge is 1 or more"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_options(name: str, options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        get_recipe(name, **options)
    assert "\n" not in str(error.value)
    for word in [name, *words]:
        assert word in str(error.value)


@pytest.mark.parametrize("lookup", [get_recipe, recipe_options])
def test_an_unknown_name_lists_the_known(lookup: Any) -> None:
    with pytest.raises(ConfigError) as error:
        lookup("tetrajett")
    assert all(name in str(error.value) for name in list_recipes())


# --- package.module:object ------------------------------------------------------------------------

OBJECT = Recipe("an-object", fprop=GemmRecipe(Quantizer(), Quantizer()))
NUMBER = 7


def factory(*, rule: str = "ceil", group: int = 32, extra=None) -> Recipe:  # type: ignore[no-untyped-def]
    operand = Quantizer(rule=rule)  # type: ignore[arg-type]
    return Recipe("a-function", wgrad=GemmRecipe(operand, operand, Hadamard(group)))


def test_an_imported_object_or_function() -> None:
    assert get_recipe(f"{__name__}:OBJECT") == OBJECT
    assert get_recipe(f"{__name__}:factory") == factory()
    changed = get_recipe(f"{__name__}:factory", group="64", rule="floor", extra=[1])
    assert changed == factory(group=64, rule="floor")


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        (f"{__name__}:MISSING", {}, ["cannot be imported", "MISSING"]),
        ("no_such_package.at_all:r", {}, ["cannot be imported", "no_such_package"]),
        (f"{__name__}:NUMBER", {}, ["int", "Recipe"]),
        (f"{__name__}:OBJECT", {"rule": "floor"}, ["takes no options"]),
        (f"{__name__}:factory", {"size": 3}, ["size", "rule, group, extra"]),
        (f"{__name__}:factory", {"group": "x"}, ["group", "an integer"]),
        (f"{__name__}:factory", {"rule": "round"}, ["rule"]),
    ],
    ids=["attribute", "module", "type", "options", "unknown", "typed", "value"],
)
def test_imports_that_fail(name: str, options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        get_recipe(name, **options)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    "body",
    [
        "raise RuntimeError('no')",
        "def recipe(",
        "recipe = lambda: 1 / 0",
        "import sys; sys.exit('no')",
        "import sys; recipe = sys.exit",
        "def recipe(*, rule: 'Unknown' = 1): ...",
    ],
)
def test_a_users_module_that_fails_is_named(
    body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_recipe.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "broken_recipe", raising=False)
    with pytest.raises(
        ConfigError,
        match="broken_recipe.*(RuntimeError|SyntaxError|ZeroDivision|SystemExit|NameError)",
    ):
        get_recipe("broken_recipe:recipe")


def test_the_own_recipe_is_the_one_that_was_studied() -> None:
    studied = get_recipe("benchmarks/study/candidates/fp8-ends-then-fp8.yaml")
    own = get_recipe("auto")
    assert own == get_recipe("tetrajet-fp8") == replace(studied, name="tetrajet-fp8", paper="")
    assert own != replace(get_recipe("tetrajet"), name=own.name, paper="")
    assert not own.is_uniform and "tetrajet-fp8" not in uniform_recipes()


def test_options_of_the_own_recipe() -> None:
    plain = get_recipe("auto", fp8_layers="0", fp8_after="1")
    assert plain == replace(get_recipe("tetrajet"), name="tetrajet-fp8", paper="")
    assert plain.is_uniform
    half = get_recipe("auto", fp8_layers=2, fp8_after=0.5)
    assert half.at(0.49).name == "tetrajet-fp8" and half.at(0.5).name == "fp8"
    assert [(each.first, each.last) for each in half.layers] == [(2, 0), (0, 2)]
    for options, says in (
        ({"fp8_layers": -1}, "fp8_layers is 0 or more, not -1"),
        ({"fp8_after": 1.5}, "fp8_after is a share of training, from 0 to 1, not 1.5"),
        ({"rule": "floor"}, "no option 'rule'"),
    ):
        with pytest.raises(ConfigError, match=says):
            get_recipe("auto", **options)
