"""Recipes in YAML files: bases, options, phases, and what is wrong in a file."""

from __future__ import annotations

import json
from argparse import Namespace
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
    get_quantizer,
    get_recipe,
)
from megatron_fp4.arithmetic.hadamard import Hadamard
from megatron_fp4.arithmetic.hot_channels import HotChannels
from megatron_fp4.arithmetic.weight_states import WeightAverage
from megatron_fp4.recipe import HIGH_PRECISION
from megatron_fp4.recipes import content
from megatron_fp4.recipes.assignment import recipe_for, recipes_of_layers
from megatron_fp4.recipes.files import recipe_of_fields


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


def test_an_option_may_leave_out_the_phase_of_a_file_s_base(tmp_path: Path) -> None:
    recipe = load(tmp_path, "base: tetrajet-fp8\noptions: {fp8_after: 1}\n")
    assert recipe.phases == () and len(recipe.layers) == 2
    assert load(tmp_path, "phases: [{after: 999/1000, recipe: fp8}]\n").phases[0].after == 0.999


def test_a_recorded_phase_that_never_begins_is_read() -> None:
    late = replace(get_recipe("tetrajet"), phases=(Phase(1.0, Recipe(name="bf16")),))
    assert content.read(content.write(late)) == late


def test_methods_of_options_do_not_reach_phases(tmp_path: Path) -> None:
    text = "base: tetrajet\nphases: [{after: 0.5, recipe: fp8}]\n"
    for option, value in (("ema_beta", 0.9), ("ramping_k1", 8)):
        with pytest.raises(ConfigError, match=f"phases, which the option {option} does not reach"):
            load(tmp_path, text, **{option: value})
    assert load(tmp_path, text, rule="floor").fprop.a == Quantizer(rule="floor")


METHODS = [("ema_beta", 0.9, "weight_average"), ("ramping_k1", 8, "ramping")]


@pytest.mark.parametrize(("option", "value", "field"), METHODS)
@pytest.mark.parametrize("own", ["{wgrad: {}}", "mxfp4", "{phases: [{after: 1/2, recipe: fp8}]}"])
def test_methods_of_options_do_not_reach_layers(
    option: str, value: float, field: str, own: str, tmp_path: Path
) -> None:
    """Refused for layers that could follow the method, as those in BF16 or FP8 cannot."""
    text = f"base: tetrajet\nlayers: [{{last: 1, recipe: bf16}}, {{first: 1, recipe: {own}}}]\n"
    with pytest.raises(ConfigError, match=f"layers that follow .*the option {option} does not rea"):
        load(tmp_path, text, **{option: value})
    (tmp_path / "base.yaml").write_text(text)
    with pytest.raises(ConfigError, match=f"layers that follow .*the option {option} does not rea"):
        load(tmp_path, f"base: base.yaml\noptions: {{{option}: {value}}}\n")
    for other in ("bf16", "fp8"):
        recipe = load(tmp_path, f"base: tetrajet\nlayers: [{{last: 1, recipe: {other}}}]\n",
                      **{option: value})  # fmt: skip
        assert getattr(recipe, field) is not None
        assert getattr(recipe.layers[0].recipe, field) is None


@pytest.mark.parametrize(("option", "value", "field"), METHODS)
def test_a_file_gives_a_method_to_layers(
    option: str, value: float, field: str, tmp_path: Path
) -> None:
    options = f"options: {{{option}: {value}}}"
    own = f"layers: [{{last: 1, recipe: {{base: mxfp4, {options}}}}}]"
    recipe = load(tmp_path, f"base: tetrajet\n{options}\n{own}\n")
    assert getattr(recipe.layers[0].recipe, field) == getattr(recipe, field) is not None


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


def test_layers_by_place_and_by_name(tmp_path: Path) -> None:
    entries = (
        "{last: 2, recipe: bf16}",
        "{first: 1, recipe: {wgrad: {}, bias_gradient: raw}}",
        "{modules: '*.linear_fc2', recipe: fp8}",
    )
    text = f"base: tetrajet\nlayers: [{', '.join(entries)}]\n"
    recipe = load(tmp_path, text)
    last, first, named = recipe.layers
    plain = replace(recipe, layers=())
    assert (last.last, last.recipe) == (2, Recipe("bf16"))
    own = replace(plain, wgrad=HIGH_PRECISION, bias_gradient="raw", name="mine (layers 2)")
    assert (first.first, first.recipe) == (1, own)
    assert (named.modules, named.recipe) == ("*.linear_fc2", get_recipe("fp8"))
    assert content.read(content.write(recipe)) == recipe  # as checkpoints record it
    assert recipes_of_layers(recipe, 3) == [
        ("decoder.layers.1.*", None),
        ("decoder.layers.2.*", None),
        ("decoder.layers.0.*", own),
        ("*.linear_fc2", get_recipe("fp8")),
    ]
    for count, has in ((1, "1"), (None, "an unknown number of")):
        with pytest.raises(ConfigError, match=f"last: 2 of a decoder with {has} layers"):
            recipes_of_layers(recipe, count)
    (tmp_path / "base.yaml").write_text(f"{text}name: mine\n")
    assert load(tmp_path, "base: base.yaml\nname: mine\n").layers == recipe.layers
    assert load(tmp_path, "base: base.yaml\nlayers: []\n").layers == ()


def test_the_last_glob_that_names_a_linear_decides() -> None:
    """Before the layers that --first-last-layers-bf16 keeps; among globs whatever they ask for."""
    whole, own = get_recipe("tetrajet"), get_recipe("fp8")
    args = Namespace(
        first_last_layers_bf16=True,
        num_layers=6,
        num_layers_at_start_in_bf16=1,
        num_layers_at_end_in_bf16=2,
    )
    modules = [("*.layers.2.*", own), ("*.linear_fc1", None), ("*.layers.[05].mlp.*_fc1", own)]

    def followed(linear: str) -> list[Recipe | None]:
        names = [(f"decoder.layers.{number}.mlp.{linear}", number + 1) for number in range(6)]
        return [recipe_for(name, number, whole, modules, args) for name, number in names]

    assert followed("linear_fc1") == [own, None, None, None, None, own]
    assert followed("linear_fc2") == [None, whole, own, whole, None, None]
    assert recipe_for("output_layer", None, whole, modules, args) == whole


def test_outliers_are_hot_channels_in_their_form(tmp_path: Path) -> None:
    recipe = load(tmp_path, "base: tetrajet\noutliers: {form: channels, group: 64}\n")
    assert recipe.outliers == HotChannels(64, 1)
    assert content.read(content.write(recipe)) == recipe  # as checkpoints record it
    clamped = get_recipe("dge-occ")
    recorded = content.write(clamped).replace(', "form": "quantiles"', "")
    assert recorded != content.write(clamped)
    assert content.read(recorded) == clamped  # as versions without hot channels recorded it


def test_yaml_fractions(tmp_path: Path) -> None:
    operand = "{rounding: stochastic, prescale: 3/4}"
    gemm = f"{{a: {operand}, b: {operand}, hadamard: {{group: 64}}, correction: 16/9}}"
    recipe = load(tmp_path, f"dgrad: {gemm}\nwgrad: {gemm}\n")
    paper = get_recipe("mxfp4-rht-sr")
    assert (recipe.dgrad, recipe.wgrad) == (paper.dgrad, paper.wgrad)


def test_a_gemm_may_merge_another_one(tmp_path: Path) -> None:
    """`<<` was once an unknown tag, and a key in place of a merged one a repeated key."""
    recipe = load(
        tmp_path,
        "dgrad: &plain {a: mxfp4-ceil, b: mxfp4-ceil}\n"
        "wgrad: &other {<<: *plain, a: mxfp4}\n"
        "fprop: {<<: *other, b: mxfp4}\n",
    )
    mxfp4, ceil = get_quantizer("mxfp4"), get_quantizer("mxfp4-ceil")
    pairs = [(gemm.a, gemm.b) for gemm in (recipe.dgrad, recipe.wgrad, recipe.fprop)]
    assert pairs == [(ceil, ceil), (mxfp4, ceil), (mxfp4, mxfp4)]


def test_options_override_the_files_own(tmp_path: Path) -> None:
    text = "base: mxfp4\noptions: {rule: ceil}\n"
    assert load(tmp_path, text).fprop == get_recipe("mxfp4", rule="ceil").fprop
    assert load(tmp_path, text, rule="floor").fprop == get_recipe("mxfp4").fprop


def test_a_gemm_can_be_returned_to_high_precision(tmp_path: Path) -> None:
    assert load(tmp_path, "base: mxfp4\nwgrad: {}\n").wgrad == HIGH_PRECISION


def test_an_option_takes_the_place_of_the_one_that_it_contradicts(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("base: tetrajet-ema\noptions: {ema_beta: 0.5}\n")
    mine = str(tmp_path / "mine.yaml")
    assert get_recipe(mine, ema_share=0.1).weight_average == WeightAverage(half_life=0.1, delay=10)
    assert get_recipe(mine, ema_beta=0.6).weight_average == WeightAverage(0.6, delay=10)


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
    ("text", "words"),
    [
        ("", ["mapping"]),
        ("- a\n- b\n", ["mapping"]),
        ("a: [1\n", ["not valid YAML"]),
        ("base: tetrajett\n", ["base: unknown recipe", "tetrajett", "tetrajet,"]),
        ("base: 5\n", ["base: a recipe to start from is a string, not 5"]),
        ("base: {fp8: mxfp4}\n", ["a recipe to start from is a string, not {'fp8': 'mxfp4'}"]),
        ("wgrad: {a: mxfp4}\nwgrad: {}\n", ["'wgrad'", "twice"]),
        ("wgrad: {<<: {a: mxfp4}, b: mxfp4, b: mxfp4}\n", ["the key 'b' stands twice"]),
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
        ("phases: [{after: 1, recipe: fp8}]\n", ["recipe fp8 of a phase never begins"]),
        (
            "layers: [{first: 1, recipe: {phases: [{after: 1, recipe: fp8}]}}]\n",
            ["recipe fp8 of a phase never begins", "give an after below 1"],
        ),
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
        ("layers: [{recipe: fp8}]\n", ["layers, number 1", "give one of the three"]),
        ("layers: [{first: 1, last: 1, recipe: fp8}]\n", ["give one of the three"]),
        ("layers: [{first: -1, recipe: fp8}]\n", ["give one of the three"]),
        ("layers: [{first: 1}]\n", ["layers, number 1 needs recipe:"]),
        ("layers: [{first: 1, recipe: fp7}]\n", ["layers, number 1", "unknown recipe 'fp7'"]),
        (
            "layers: [{first: 1, recipe: {layers: [{first: 1, recipe: fp8}]}}]\n",
            ["mine (layers 1) of some layers has layers of its own"],
        ),
        (
            "phases: [{after: 0.5, recipe: {layers: [{first: 1, recipe: fp8}]}}]\n",
            ["mine (phase 1) of a phase has phases or layers of its own"],
        ),
        ("outliers: {alpha: 2}\n", ["outliers", "alpha"]),
        ("outliers: {scope: row}\n", ["outliers", "scope", "token"]),
        ("outliers: {form: tokens}\n", ["outliers: form is quantiles or channels, not 'tokens'"]),
        ("outliers: {form: channels, alpha: 0.9}\n", ["outliers: unknown key 'alpha'", "count"]),
        ("outliers: {form: channels, count: 32}\n", ["outliers: count 32", "group of 32"]),
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
