"""What a checkpoint was trained with against what a launch would go on with: what counts as
another numerics, and what does not."""

import argparse
import json
import re
from pathlib import Path

import pytest

import megatron_fp4
from megatron_fp4.errors import ConfigError
from megatron_fp4.mcore.checkpoints.compare_numerics import compare
from megatron_fp4.recipes.content import read
from testing.builders.fp4_arguments import parse

WAS = "--fp4-recipe tetrajet --seed 5"
YAML = "base: tetrajet\n"


@pytest.mark.parametrize(
    ("flags", "difference"),
    [
        ("--fp4-recipe mxfp4 --seed 5", "--fp4-recipe was tetrajet and is mxfp4 (backward was f"),
        (f"{WAS} --fp4-recipe-option rule=floor", "is tetrajet rule=floor (dgrad.a.rule was ceil"),
        (f"{WAS} --fp4-seed 6", "--fp4-seed was 5 and is 6"),
        (
            f"{WAS} --fp4-bf16-after 0.5",
            "is tetrajet --fp4-bf16-after 0.5 (phases was none and is after 0.5)",
        ),
        (f"{WAS} --micro-batch-size 4", "--micro-batch-size was none and is 4"),
        (f"{WAS} --first-last-layers-bf16", "--first-last-layers-bf16 was off and is on"),
        (f"{WAS} --fp4-module-recipe mlp=mxfp4", "--fp4-module-recipe was none and is mlp=mxfp4"),
        (f"{WAS} --fp4-grad-comm fp8", "--fp4-grad-comm was none and is FP8 (E4M3)"),
    ],
)
def test_other_numerics_are_named_with_what_was_and_what_is(flags: str, difference: str) -> None:
    with pytest.raises(ConfigError) as raised:
        compare(parse(*WAS.split()), parse(*flags.split()))
    message = str(raised.value)
    assert difference in message and "--fp4-load-anyway" in message and "\n" not in message
    compare(parse(*WAS.split()), parse(*flags.split(), "--fp4-load-anyway"))


@pytest.mark.parametrize(
    ("was", "is_", "difference"),
    [
        ("", "last: 1, recipe: bf16", "were none and are decoder.layers.3.*=bf16;"),
        ("last: 1, recipe: bf16", "", "were decoder.layers.3.*=bf16 and are none;"),
        (
            "last: 1, recipe: bf16",
            "first: 1, recipe: fp8",
            "were decoder.layers.3.*=bf16 and are decoder.layers.0.*=fp8 (",
        ),
        (
            "modules: a.*, recipe: {base: mxfp4, name: own}",
            "modules: a.*, recipe: {base: mxfp4, name: own, options: {rule: ceil}}",
            "were a.*=own and are a.*=own (dgrad.a.rule was floor and is ceil,",
        ),
    ],
)
def test_other_layers_of_a_recipe_are_named(
    tmp_path: Path, was: str, is_: str, difference: str
) -> None:
    def launch(entry: str, *more: str) -> argparse.Namespace:
        path = tmp_path / "mine.yaml"
        path.write_text(f"base: tetrajet\nlayers: [{f'{{{entry}}}' if entry else ''}]\n")
        return parse("--fp4-recipe", str(path), "--num-layers", "4", "--seed", "5", *more)

    with pytest.raises(ConfigError) as raised:
        compare(launch(was), launch(is_))
    message = str(raised.value)
    begin = "layers of the recipe, with --fp4-module-recipe, "
    assert f"{begin}{difference}" in message and len(message) < 500
    compare(launch(is_), launch(is_))
    compare(launch(was), launch(is_, "--fp4-load-anyway"))


def test_another_form_of_gradients_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    fp8, bf16 = "--fp4-grad-comm fp8", "--fp4-grad-comm bf16"
    e5m2 = f"{fp8} --fp4-grad-comm-element e5m2"
    for was, is_, difference in (
        (fp8, bf16, "--fp4-grad-comm was FP8 (E4M3) and is BF16"),
        (fp8, e5m2, "--fp4-grad-comm was FP8 (E4M3) and is FP8 (E5M2)"),
        (bf16, "", "--fp4-grad-comm was BF16 and is none"),
    ):
        with pytest.raises(ConfigError, match=re.escape(difference)):
            compare(parse(*f"{WAS} {was}".split()), parse(*f"{WAS} {is_}".split()))
        # Without a recipe nothing is compared by its numerics: a line says that they differ.
        compare(parse(*was.split()), parse(*is_.split()))
        assert difference in capsys.readouterr().out
    saved = parse(*fp8.split())
    compare(saved, parse(*fp8.split()))
    del saved.fp4_grad_comm, saved.fp4_grad_comm_element  # of an older version
    compare(saved, parse())
    assert capsys.readouterr().out == ""


EMA = "--fp4-recipe tetrajet-ema --seed 5"
RAMPING = "--fp4-recipe tetrajet-ramping --seed 5"


def test_another_multiplier_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    bf16 = parse(*WAS.split(), "--fp4-multiplier", "bf16")
    compare(parse(*WAS.split()), bf16)
    assert "--fp4-multiplier was auto and is bf16: products differ" in capsys.readouterr().out
    compare(bf16, bf16)
    older = parse(*WAS.split())
    del older.fp4_multiplier
    compare(older, parse(*WAS.split()))
    assert capsys.readouterr().out == ""


OF_FC1 = "--fp4-module-recipe *fc1=tetrajet"


@pytest.mark.parametrize(
    ("was", "flags", "says"),
    [
        (WAS, EMA, "with tetrajet, this launch has tetrajet-ema: it goes on with averages of W"),
        (EMA, WAS, "with tetrajet-ema, this launch has tetrajet: it goes on without averages of W"),
        (WAS, RAMPING, "this launch has tetrajet-ramping: it goes on with periods of W"),
        (RAMPING, EMA, "this launch has tetrajet-ema: it goes on without periods of W"),
        (RAMPING, EMA, "this launch has tetrajet-ema: it goes on with averages of W"),
        (
            f"{WAS} {OF_FC1}",
            f"{WAS} {OF_FC1}-ramping",
            "was *fc1=tetrajet and is *fc1=tetrajet-ramping: averages or periods of W come or go",
        ),
    ],
)
def test_averages_and_periods_of_w_come_and_go_without_being_forced(
    was: str, flags: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    compare(parse(*was.split()), parse(*flags.split()))
    assert says in capsys.readouterr().out
    # The control: whatever else differs is refused.
    with pytest.raises(ConfigError, match="dgrad.a.rounding was stochastic and is nearest"):
        compare(
            parse(*was.split()),
            parse(*flags.split(), "--fp4-recipe-option", "backward_rounding=nearest"),
        )


def test_an_average_that_dgrad_alone_reads_comes_and_goes_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def recipe(name: str, rounding: str) -> list[str]:
        path = tmp_path / name
        gemms = "fprop: {a: {}, b: {}}\ndgrad: {a: {}, b: {rounding: " + rounding + "}}\n"
        average = "weight_average: {beta: 0.9}\n" if rounding == "ema" else ""
        path.write_text(gemms + average)
        return ["--fp4-recipe", str(path), "--seed", "5"]

    compare(parse(*recipe("a.yaml", "nearest")), parse(*recipe("b.yaml", "ema")))
    assert "it goes on with averages of W" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="dgrad.b.rounding was stochastic"):  # the control
        compare(parse(*recipe("a.yaml", "stochastic")), parse(*recipe("b.yaml", "ema")))


@pytest.mark.parametrize(
    ("option", "difference"),
    [
        ("ema_beta=0.5", "weight_average.beta was 0.998 and is 0.5"),
        ("ema_share=0.5", "weight_average.half_life was none and is 0.5"),
    ],
)
def test_another_average_of_w_is_another_recipe(option: str, difference: str) -> None:
    with pytest.raises(ConfigError, match=difference):
        compare(parse(*EMA.split()), parse(*EMA.split(), "--fp4-recipe-option", option))


def test_a_half_life_belongs_to_a_number_of_steps() -> None:
    share = "--fp4-recipe-option ema_share=0.01"
    for flags, refused in ((f"{EMA} {share}", True), (EMA, False)):
        saved, launch = (parse(*flags.split(), "--train-iters", n) for n in ("100", "200"))
        if refused:
            with pytest.raises(ConfigError, match="--train-iters was 100 and is 200"):
                compare(saved, launch)
        else:
            compare(saved, launch)


def test_another_version_of_the_numerics_is_named() -> None:
    saved, launch = parse(*WAS.split()), parse(*WAS.split())
    saved.fp4_numerics_version = 0
    with pytest.raises(ConfigError, match="numerics version was 0 and is "):
        compare(saved, launch)


def test_another_rounding_of_dw_is_named() -> None:
    saved, launch = parse(*WAS.split()), parse(*WAS.split())
    saved.fp4_wgrad_fusion, launch.fp4_wgrad_fusion = True, False
    with pytest.raises(ConfigError, match="accumulation-fusion. was on and is off"):
        compare(saved, launch)


def test_what_counts_of_a_recipe_is_its_content(tmp_path: Path) -> None:
    paths = [tmp_path / "one.yaml", tmp_path / "two.yaml"]
    for path in paths:
        path.write_text(YAML)
    one, two = (parse("--fp4-recipe", str(path), "--seed", "5") for path in paths)
    compare(one, two)
    compare(parse(*WAS.split()), two)
    paths[1].write_text(YAML + "wgrad: {a: mxfp4, b: mxfp4}\n")
    with pytest.raises(ConfigError, match="two.yaml and is .*two.yaml .wgrad.a.ro.* was stoch"):
        compare(two, parse("--fp4-recipe", str(paths[1]), "--seed", "5"))


def test_what_counts_of_a_modules_recipe_is_its_content(tmp_path: Path) -> None:
    def launched(recipe: str) -> argparse.Namespace:
        return parse(*WAS.split(), "--fp4-module-recipe", f"*.linear_fc1={recipe}")

    path = tmp_path / "own.yaml"
    path.write_text("base: mxfp4\n")
    saved = launched(str(path))
    compare(saved, launched("mxfp4"))
    for other in ("bf16", "tetrajet"):
        with pytest.raises(ConfigError, match=rf"own.yaml and is .*_fc1={other} \("):
            compare(saved, launched(other))
    path.write_text("base: mxfp4\nwgrad: {a: mxfp4-ceil-sr, b: mxfp4-ceil-sr}\n")
    with pytest.raises(ConfigError, match=r"own.yaml and is .*own.yaml \(wgrad.a.rounding was ne"):
        compare(saved, launched(str(path)))


def test_another_version_of_the_plugin_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    saved = parse(*WAS.split())
    saved.fp4_plugin_version = "0.0.1"
    difference = f"plugin version was 0.0.1 and is {megatron_fp4.__version__}"
    with pytest.raises(ConfigError, match=re.escape(difference)):
        compare(saved, parse(*WAS.split()))
    compare(saved, parse(*WAS.split(), "--fp4-load-anyway"))
    assert difference in capsys.readouterr().out


def test_the_length_of_training_counts_where_a_schedule_is_a_share_of_it(tmp_path: Path) -> None:
    longer = ("--train-iters", "8")
    compare(parse(*WAS.split(), "--train-iters", "4"), parse(*WAS.split(), *longer))
    path = tmp_path / "own.yaml"
    path.write_text(YAML + "phases: [{after: 0.5, recipe: bf16}]\n")
    for schedule in (["--fp4-bf16-after", "0.5"], ["--fp4-module-recipe", f"mlp={path}"]):
        saved = parse(*WAS.split(), *schedule, "--train-iters", "4")
        with pytest.raises(ConfigError, match="--train-iters was 4 and is 8"):
            compare(saved, parse(*WAS.split(), *schedule, *longer))
        samples = ("--train-samples", "32", "--global-batch-size", "4")
        in_samples = parse(*WAS.split(), *schedule, *samples)
        in_samples.train_iters = None  # the builder's launch has it; it excludes --train-samples
        said = "of --train-samples and --global-batch-size, was 4 and is 8"
        with pytest.raises(ConfigError, match=said):
            compare(saved, in_samples)


# --- what older versions saved -----------------------------------------------------------------


def test_without_their_contents_the_texts_of_modules_recipes_count() -> None:
    own = ("--fp4-module-recipe", "*=mxfp4")
    saved = parse(*WAS.split(), *own)
    del saved.fp4_module_contents
    compare(saved, parse(*WAS.split(), *own))
    with pytest.raises(ConfigError, match=re.escape("-recipe was *=mxfp4 and is *=bf16")):
        compare(saved, parse(*WAS.split(), "--fp4-module-recipe", "*=bf16"))
    with pytest.raises(ConfigError, match=re.escape("-recipe was *=mxfp4 and is none")):
        compare(saved, parse(*WAS.split()))


@pytest.mark.parametrize("field", ["estimator", "phases", "dgrad.correction"])
def test_a_field_that_its_version_had_not_got_had_its_default(field: str) -> None:
    saved = parse(*WAS.split())
    content = json.loads(saved.fp4_recipe_content)
    *outer, name = field.split(".")
    del (content[outer[0]] if outer else content)[name]
    saved.fp4_recipe_content = json.dumps(content)
    compare(saved, parse(*WAS.split()))


LATE = "--fp4-bf16-after 0.75"


@pytest.mark.parametrize(
    ("was", "flags", "difference"),
    [
        ({"bf16_after": None, "bf16_gemms": ["fprop", "dgrad", "wgrad"]}, "", None),
        (
            {"bf16_after": None, "bf16_gemms": ["fprop", "dgrad", "wgrad"]},
            LATE,
            "phases was none and is after 0.75",
        ),
        ({"bf16_after": 0.75, "bf16_gemms": ["fprop", "dgrad", "wgrad"]}, LATE, None),
        ({"bf16_after": 0.75, "bf16_gemms": ["dgrad"]}, f"{LATE} --fp4-bf16-gemms dgrad", None),
        ({"bf16_after": 0.75, "bf16_gemms": ["dgrad"]}, LATE, "phases.1.recipe.fprop.a"),
    ],
)
def test_an_older_version_s_return_to_bf16_is_a_phase(
    was: dict[str, object], flags: str, difference: str | None
) -> None:
    saved, launch = parse(*WAS.split()), parse(*WAS.split(), *flags.split())
    content = json.loads(saved.fp4_recipe_content)
    del content["phases"]
    saved.fp4_recipe_content = json.dumps(content | was | {"description": "of old"})
    if difference is None:
        compare(saved, launch)
        assert read(saved.fp4_recipe_content) == read(launch.fp4_recipe_content)
    else:
        with pytest.raises(ConfigError, match=re.escape(difference)):
            compare(saved, launch)


@pytest.mark.parametrize("method", ["tetrajet-ema", "tetrajet-ramping"])
def test_methods_come_and_go_beside_phases(method: str) -> None:
    late = f"{LATE} --fp4-bf16-gemms dgrad wgrad"
    saved, launch = (
        parse(*f"--fp4-recipe {r} --seed 5 {late}".split()) for r in ("tetrajet", method)
    )
    compare(saved, launch)
    with pytest.raises(ConfigError, match="phases was after 0.75 and is none"):
        compare(saved, parse(*f"--fp4-recipe {method} --seed 5".split()))


def test_the_words_that_recipes_once_carried_do_not_count() -> None:
    saved = parse(*WAS.split(), "--fp4-module-recipe", "*=mxfp4")
    launch = parse(*WAS.split(), "--fp4-module-recipe", "*=mxfp4")
    old = {"description": "truncation-free scales, stochastic backward, double quantization"}
    [(glob, own)] = saved.fp4_module_contents
    saved.fp4_module_contents = [(glob, json.dumps(json.loads(own) | old))]
    saved.fp4_recipe_content = json.dumps(json.loads(saved.fp4_recipe_content) | old)
    assert "description" not in launch.fp4_recipe_content
    compare(saved, launch)


def test_a_default_that_the_launch_does_not_have_is_a_difference() -> None:
    saved = parse(*WAS.split())
    content = json.loads(saved.fp4_recipe_content)
    del content["backward"]
    saved.fp4_recipe_content = json.dumps(content)
    with pytest.raises(ConfigError, match="backward was raw and is forward"):
        compare(saved, parse(*WAS.split()))


# --- without a recipe --------------------------------------------------------------------------


def test_a_run_without_a_recipe_compares_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    compare(parse("--seed", "5"), parse("--seed", "6"))
    assert not capsys.readouterr().out
