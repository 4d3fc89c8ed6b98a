"""The recipes and their registry: faithful data, options, YAML files, imported objects, errors."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from megatron_fp4 import (
    ConfigError,
    GemmRecipe,
    Phase,
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
from megatron_fp4.recipes.files import recipe_of_fields

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
    assert recipe.name == name and recipe.paper
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


# --- YAML -----------------------------------------------------------------------------------------


def load(tmp_path: Path, text: str, **options: Any) -> Recipe:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return get_recipe(str(path), **options)


def test_yaml_from_a_base(tmp_path: Path) -> None:
    recipe = load(
        tmp_path,
        """
        base: tetrajet
        options: {rule: floor, double_quantization: false}
        wgrad:
          a: mxfp4-ceil-sr
          b: {rule: ceil, rounding: stochastic, block: [1, 32]}
          hadamard: {group: 32, signs: none}
        """,
    )
    base = get_recipe("tetrajet", rule="floor", double_quantization=False)
    operand = Quantizer(rule="ceil", rounding="stochastic")
    assert recipe.name == "mine" and recipe.fprop == base.fprop and recipe.dgrad == base.dgrad
    assert recipe.wgrad == GemmRecipe(operand, operand, Hadamard(32, "none"))
    assert recipe.backward == "raw"


def test_phases_by_name_by_file_and_by_what_differs(tmp_path: Path) -> None:
    (tmp_path / "other.yaml").write_text("base: mxfp4\nphases: []\n")
    recipe = load(
        tmp_path,
        """
        base: tetrajet
        dgrad: {}
        bias_gradient: raw
        phases:
          - {after: 1/4, recipe: {wgrad: {}}}
          - {after: 0.5, recipe: {base: tetrajet, options: {rule: floor}, name: own}}
          - {after: 0.7, recipe: other.yaml}
          - {after: 0.8, recipe: fp8}
          - {after: 0.9, recipe: bf16}
        """,
    )
    floor = replace(get_recipe("tetrajet", rule="floor"), name="own")
    assert [phase.after for phase in recipe.phases] == [0.25, 0.5, 0.7, 0.8, 0.9]
    assert recipe.in_turn[1:] == (
        replace(recipe, wgrad=GemmRecipe(), phases=(), name="mine (phase 1)"),
        floor,
        replace(get_recipe("mxfp4"), name="other"),
        get_recipe("fp8"),
        Recipe("bf16"),
    )
    assert recipe_of_fields(json.loads(json.dumps(asdict(recipe))), "x") == recipe


def test_a_base_s_phases_are_kept_unless_there_are_others(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("base: mxfp4\nphases: [{after: 0.5, recipe: fp8}]\n")
    assert load(tmp_path, "base: base.yaml\n").phases == (Phase(0.5, get_recipe("fp8")),)
    for none in ("[]", "null", ""):
        assert load(tmp_path, f"base: base.yaml\nphases: {none}\n").phases == ()


def test_methods_of_options_do_not_reach_phases(tmp_path: Path) -> None:
    text = "base: tetrajet\nphases: [{after: 0.5, recipe: fp8}]\n"
    for option, value in (("ema_beta", 0.9), ("ramping_k1", 8)):
        with pytest.raises(ConfigError, match=f"phases, which the option {option} does not reach"):
            load(tmp_path, text, **{option: value})
    assert load(tmp_path, text, rule="floor").fprop.a == Quantizer(rule="floor")


def test_yaml_without_a_base_spells_out_dge_occ(tmp_path: Path) -> None:
    recipe = load(
        tmp_path,
        """
        name: dge-occ
        paper: arXiv 2501.17116, section 3
        fprop: {a: vector, b: vector}
        dgrad: {a: {element: e5m2, scale: fp32, block: [1, 0], rule: absmax}}
        wgrad: {a: {element: e5m2, scale: fp32, block: [1, 0], rule: absmax}, b: null}
        backward: forward
        estimator: {k: 5, clip: 3}
        outliers: {alpha: 99/100, scope: token}
        """,
    )
    assert recipe == get_recipe("dge-occ")


def test_yaml_fractions(tmp_path: Path) -> None:
    operand = "{rounding: stochastic, prescale: 3/4}"
    gemm = f"{{a: {operand}, b: {operand}, hadamard: {{group: 64}}, correction: 16/9}}"
    recipe = load(tmp_path, f"dgrad: {gemm}\nwgrad: {gemm}\n")
    paper = get_recipe("mxfp4-rht-sr")
    assert (recipe.dgrad, recipe.wgrad) == (paper.dgrad, paper.wgrad)


def test_options_override_the_files_own(tmp_path: Path) -> None:
    text = "base: mxfp4\noptions: {rule: ceil}\n"
    assert load(tmp_path, text).fprop == get_recipe("mxfp4", rule="ceil").fprop
    assert load(tmp_path, text, rule="floor").fprop == get_recipe("mxfp4").fprop


def test_a_gemm_can_be_returned_to_high_precision(tmp_path: Path) -> None:
    assert load(tmp_path, "base: mxfp4\nwgrad: {}\n").wgrad == HIGH_PRECISION


def test_a_file_can_build_on_a_file(tmp_path: Path) -> None:
    (tmp_path / "first.yaml").write_text("base: mxfp4\nwgrad: {}\n")
    recipe = load(tmp_path, f"base: {tmp_path / 'first.yaml'}\ndgrad: {{}}\n")
    assert not recipe.dgrad.quantized and not recipe.wgrad.quantized and recipe.fprop.quantized


def test_a_file_s_base_lies_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "recipes"
    folder.mkdir()
    (folder / "first.yaml").write_text("base: mxfp4\nwgrad: {}\n")
    monkeypatch.chdir(tmp_path)
    assert not load(folder, "base: first.yaml\n").wgrad.quantized
    (tmp_path / "first.yaml").write_text("base: mxfp4\n")  # beside the caller: another file
    assert not load(folder, "base: first.yaml\n").wgrad.quantized
    with pytest.raises(ConfigError, match="itself"):
        load(folder, "base: ./mine.yaml\n")


def test_files_that_build_on_each_other_are_refused(tmp_path: Path) -> None:
    (tmp_path / "first.yaml").write_text(f"base: {tmp_path / 'mine.yaml'}\n")
    with pytest.raises(ConfigError, match="itself"):
        load(tmp_path, f"base: {tmp_path / 'first.yaml'}\n")


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


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["mapping"]),
        ("- a\n- b\n", ["mapping"]),
        ("a: [1\n", ["not valid YAML"]),
        ("base: tetrajett\n", ["tetrajett", "tetrajet,"]),
        ("base: 5\n", ["5"]),
        ("wgrad: {a: mxfp4}\nwgrad: {}\n", ["'wgrad'", "twice"]),
        ("base: mxfp4\nbf16_after: 0.5\n", ["unknown key 'bf16_after'", "phases"]),
        ("phases: {after: 0.5, recipe: fp8}\n", ["phases", "list"]),
        ("phases: [0.5]\n", ["phases, number 1", "mapping"]),
        ("phases: [{after: 0.5}]\n", ["phases, number 1", "recipe:"]),
        ("phases: [{after: soon, recipe: fp8}]\n", ["phases, number 1", "after", "a number"]),
        ("phases: [{after: 0.5, recipe: fp8, for: 1}]\n", ["'for'", "after, recipe"]),
        ("phases: [{after: 0.5, recipe: fp9}]\n", ["phases, number 1", "'fp9'", "fp8,"]),
        (
            "phases: [{after: 0.5, recipe: off}]\n",
            ["phases, number 1", "bf16, or a mapping", "False"],
        ),
        ("phases: [{after: 0.5, recipe: {base: bf16}}]\n", ["number 1", "give recipe: bf16"]),
        ("phases: [{after: 0, recipe: {dgrat: {}}}]\n", ["phases, number 1", "'dgrat'"]),
        ("phases: [{after: 0, recipe: mine.yaml}]\n", ["number 1", "built on this file itself"]),
        ("wgrad: {a: {prescale: .inf}, correction: 0}\n", ["prescale"]),
        ("bas: tetrajet\n", ["'bas'", "base", "phases"]),
        ("options: {rule: floor}\n", ["base"]),
        ("base: tetrajet\noptions: {rool: floor}\n", ["rool", "rule"]),
        ("wgrad: {c: mxfp4}\n", ["wgrad", "'c'", "hadamard"]),
        ("wgrad: mxfp4\n", ["wgrad", "mapping"]),
        ("wgrad: {a: mxfp5}\n", ["mxfp5", "mxfp4-ceil"]),
        ("wgrad: {a: {round: stochastic}}\n", ["wgrad.a", "'round'", "rounding"]),
        ("wgrad: {a: {rounding: stochastc}}\n", ["wgrad.a", "rounding", "stochastic"]),
        ("wgrad: {a: {block: 32}}\n", ["wgrad.a.block", "list"]),
        ("wgrad: {a: {block: [1, x]}}\n", ["wgrad.a", "block"]),
        ("wgrad: {a: {prescale: high}}\n", ["wgrad.a", "prescale", "a number"]),
        ("wgrad: {hadamard: {group: 48}}\n", ["wgrad.hadamard", "48"]),
        (
            "wgrad: {hadamard: {group: 64, signs: sometimes}}\n",
            ["signs", "random or fixed or none"],
        ),
        ("wgrad: {a: {prescale: 0.75}}\n", ["wgrad", "correction", "1.333"]),
        ("estimator: {k: 5, klip: 3}\n", ["estimator", "klip", "clip"]),
        ("outliers: {alpha: 2}\n", ["outliers", "alpha"]),
        ("outliers: {scope: row}\n", ["outliers", "scope", "token"]),
        ("backward: both\n", ["backward", "forward or raw"]),
        ("name: 5\n", ["name", "a string"]),
    ],
    ids=lambda value: value.strip()[:40] if isinstance(value, str) else "",
)
def test_wrong_files(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, text)
    assert "mine.yaml" in str(error.value) and "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


def test_a_wrong_field_s_place_is_told_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, "fprop: {a: {rule: round}}\n")
    assert str(error.value).count("fprop.a") == 1


def test_a_missing_or_binary_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="absent.yaml"):
        get_recipe(str(tmp_path / "absent.yaml"))
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(ConfigError, match="not valid YAML"):
        get_recipe(str(tmp_path / "binary.yaml"))
