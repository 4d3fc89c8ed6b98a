"""The FP4 flags, through Megatron's own parser: what they mean, and what is refused in one line."""

from pathlib import Path

import pytest

from megatron_fp4 import ConfigError, get_recipe, list_recipes
from megatron_fp4.mcore.launch import fp4_arguments
from megatron_fp4.mcore.launch.refusals.fp4_flags import UPSTREAM_RECIPES
from megatron_fp4.recipe import GEMMS, Phase
from testing.builders.fp4_arguments import parse, recipe, refusal

PLAIN_OBJECT = 4
SOME_RECIPE = get_recipe("tetrajet", rule="floor")


@pytest.mark.parametrize("flags", [(), ("--fp4-recipe", "off"), ("--fp4-recipe", "bf16")])
def test_it_is_off_where_it_is_left_out_or_turned_off(flags: tuple[str, ...]) -> None:
    args = parse(*flags, "--seed", "7")
    assert args.fp4_recipe is None and fp4_arguments.recipe_of(args) is None


def test_a_recipe_that_is_off_takes_no_options() -> None:
    message = refusal("--fp4-recipe", "off", "--fp4-recipe-option", "rule=ceil")
    assert message.startswith("--fp4-recipe-option needs a recipe")


@pytest.mark.parametrize("name", list_recipes())
def test_each_recipe_goes_by_its_name(name: str) -> None:
    assert recipe(name, "--num-layers", "2").name == name


def test_auto_is_another_name_of_a_recipe() -> None:
    options = ("--fp4-recipe-option", "fp8_after=0.5", "--num-layers", "4")
    found = recipe("auto", *options)
    assert found == get_recipe("tetrajet-fp8", fp8_after=0.5)
    assert "first: 5 of a decoder with 4 layers" in refusal(
        "--fp4-recipe", "auto", "--fp4-recipe-option", "fp8_layers=5", "--num-layers", "4"
    )


def test_an_unknown_recipe_is_an_error_that_lists_the_known_ones() -> None:
    message = refusal("--fp4-recipe", "tetrajett")
    assert "'tetrajett'" in message and all(name in message for name in list_recipes())


@pytest.mark.parametrize("flags", [(), ("--fp4-format", "e2m1")])
@pytest.mark.parametrize(("given", "steps"), [(None, 0), ("0", 0), ("5", 5)])
def test_without_a_recipe_metrics_are_off_unless_asked_for(
    flags: tuple[str, ...], given: str | None, steps: int
) -> None:
    interval = () if given is None else ("--fp4-metrics-interval", given)
    args = parse("--save", "runs/a", *flags, *interval)
    assert args.fp4_metrics_interval == steps and fp4_arguments.recipe_of(args) is None


# --- upstream's own FP4 ------------------------------------------------------------------------


@pytest.mark.parametrize("name", UPSTREAM_RECIPES)
def test_upstream_s_recipes_do_nothing_without_fp4_format_and_say_so(name: str) -> None:
    assert "does nothing without --fp4-format e2m1" in refusal("--fp4-recipe", name)


@pytest.mark.parametrize(
    ("flags", "name"),
    [(("--fp4-recipe", "nvfp4"), "nvfp4"), (("--fp4-recipe", "custom"), "custom"), ((), "nvfp4")],
)
def test_with_fp4_format_they_stay_upstream_s(flags: tuple[str, ...], name: str) -> None:
    args = parse("--fp4-format", "e2m1", *flags)
    assert (args.fp4, args.fp4_recipe) == ("e2m1", name)
    assert fp4_arguments.recipe_of(args) is None


@pytest.mark.parametrize("flags", ["--fp4-format e2m1", "--fp8-format hybrid"])
def test_upstream_s_formats_do_nothing_in_local_layers_and_say_so(flags: str) -> None:
    message = refusal(*flags.split(), "--transformer-impl", "local")
    assert message.startswith(f"{flags.split()[0]} acts in Transformer Engine's linears: ")
    assert "add --transformer-impl transformer_engine" in message
    parse(*flags.split(), "--transformer-impl", "transformer_engine")


UPSTREAMS = ("--fp4-format", "e2m1", "--fp4-recipe", "custom", "--fp4-quantizer-factory")


def test_this_package_s_quantizers_in_upstream_s_linears() -> None:
    args = parse(*UPSTREAMS, "megatron_fp4.te.tetrajet", "--disable-bias-linear")
    assert args.fp4_recipe == "custom" and fp4_arguments.recipe_of(args) is None
    parse(*UPSTREAMS, "another.package.factory")  # nothing that this package judges


@pytest.mark.parametrize(
    ("factory", "flags", "word"),
    [
        ("tetrajet", (), "--add-bias-linear"),
        ("tetrajet", ("--disable-bias-linear", "--add-qkv-bias"), "--add-qkv-bias"),
        ("tetrajet", ("--disable-bias-linear", "--tp-comm-overlap"), "--tp-comm-overlap"),
        ("mxfp4", ("--disable-bias-linear", "--cuda-graph-impl", "local"), "--cuda-graph-impl"),
        ("mxfp4", ("--disable-bias-linear", "--enable-cuda-graph"), "--enable-cuda-graph"),
        ("mxfp4", ("--disable-bias-linear", "--external-cuda-graph"), "--external-cuda-graph"),
        ("mxfp4_rht_sr", ("--disable-bias-linear",), "signs that they share"),
        (
            "tetrajett",
            ("--disable-bias-linear",),
            "the recipes: dge_occ, four_over_six, fp8, mxfp4,",
        ),
    ],
)
def test_what_upstream_s_linears_have_no_room_for(
    factory: str, flags: tuple[str, ...], word: str
) -> None:
    assert word in refusal(*UPSTREAMS, f"megatron_fp4.te.{factory}", *flags)


def test_fp4_format_and_a_recipe_of_this_package_contradict_each_other() -> None:
    assert "leave out --fp4-format" in refusal("--fp4-format", "e2m1", "--fp4-recipe", "tetrajet")


# --- a recipe's options, files, objects --------------------------------------------------------


def test_options_are_typed_and_the_last_of_a_key_wins() -> None:
    given = ["double-quantization=no", "rule=ceil", "rule=floor"]
    flags = [word for pair in given for word in ("--fp4-recipe-option", pair)]
    found = recipe("tetrajet", *flags)
    assert found.backward == "raw"
    assert found.fprop.a is not None and found.fprop.a.rule == "floor"


@pytest.mark.parametrize(
    ("option", "names"),
    [
        ("rules=ceil", ("'rules'", "rule, backward_rounding, double_quantization")),
        ("rule=up", ("ceil or floor", "'up'")),
        ("double_quantization=perhaps", ("true or false", "'perhaps'")),
        ("rule", ("KEY=VALUE", "'rule'")),
    ],
)
def test_a_wrong_option_names_what_is_known(option: str, names: tuple[str, ...]) -> None:
    message = refusal("--fp4-recipe", "tetrajet", "--fp4-recipe-option", option)
    assert all(name in message for name in names)


def test_a_recipe_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("base: tetrajet\nfprop: {}\nphases: [{after: 1/2, recipe: fp8}]\n")
    found = recipe(str(path), "--fp4-recipe-option", "rule=floor")
    assert (found.name, found.fprop.quantized) == ("mine", False)
    assert found.phases == (Phase(0.5, get_recipe("fp8")),)
    assert found.wgrad.a is not None and found.wgrad.a.rule == "floor"


def test_a_wrong_recipe_file_is_named_with_its_mistake(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    message = refusal("--fp4-recipe", str(path))
    assert str(path) in message and "No such file" in message
    path.write_text("base: tetrajet\nforward: {}\n")
    message = refusal("--fp4-recipe", str(path))
    assert f"recipe file {path}: unknown key 'forward'; known: name" in message


def test_a_recipe_that_quantizes_nothing_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "idle.yaml"
    path.write_text("fprop: {}\n")
    assert "idle.yaml quantizes nothing" in refusal("--fp4-recipe", str(path))
    path.write_text("fprop: {b: mxfp4}\n")
    assert recipe(str(path)).fprop.quantized


def test_a_recipe_may_quantize_in_layers_alone(tmp_path: Path) -> None:
    path = tmp_path / "layers.yaml"
    path.write_text('layers: [{modules: "*.linear_fc1", recipe: tetrajet}]\n')
    assert recipe(str(path)).layers
    path.write_text('layers: [{modules: "*.linear_fc1", recipe: {fprop: {}}}]\n')
    assert "quantizes nothing" in refusal("--fp4-recipe", str(path))


def test_single_modules_take_no_recipe_that_has_layers() -> None:
    flags = ("--fp4-recipe", "tetrajet", "--fp4-module-recipe")
    assert "recipe auto has layers with recipes of their own" in refusal(*flags, "*.fc1=auto")
    assert recipe("tetrajet", "--fp4-module-recipe", "*.fc1=auto,fp8_layers=0")


def test_the_first_and_last_layers_have_one_precision() -> None:
    flag = "--first-last-layers-bf16"
    says = "recipe auto has recipes for its first or last layers, which --first-last-layers-bf16"
    assert says in refusal("--fp4-recipe", "auto", flag, "--num-layers", "4")
    assert recipe("auto", "--fp4-recipe-option", "fp8_layers=0", flag, "--num-layers", "4")


def test_an_object_of_a_python_module() -> None:
    assert recipe(f"{__name__}:SOME_RECIPE") is SOME_RECIPE
    assert "is a int, not a" in refusal("--fp4-recipe", f"{__name__}:PLAIN_OBJECT")
    assert "cannot be imported" in refusal("--fp4-recipe", f"{__name__}:nothing")
    assert "cannot be imported" in refusal("--fp4-recipe", "no.such.module:recipe")


# --- phases, seed, evaluation ------------------------------------------------------------------


def test_all_gemms_or_the_named_ones_return_to_bf16() -> None:
    plain = recipe("tetrajet")
    assert plain.phases == ()
    whole = recipe("tetrajet", "--fp4-bf16-after", "0.9")
    assert whole.phases == (Phase(0.9, plain.without(GEMMS)),)
    part = recipe("tetrajet", "--fp4-bf16-after", "0", "--fp4-bf16-gemms", "dgrad", "wgrad")
    assert part.phases == (Phase(0.0, plain.without(("dgrad", "wgrad"))),)


def test_modules_recipes_return_to_bf16_too() -> None:
    modules = ("--fp4-module-recipe", "a=mxfp4", "--fp4-module-recipe", "b=bf16")
    args = parse("--fp4-recipe", "tetrajet", "--fp4-bf16-after", "0.9", *modules)
    (_, own), (_, none) = fp4_arguments.module_recipes(args)
    assert own is not None and own.phases[0].after == 0.9 and none is None


def test_layers_of_the_recipe_come_before_the_flag_s(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "base: tetrajet\nlayers:\n- {last: 1, recipe: bf16}\n- {first: 1, recipe: fp8}\n"
    )
    flags = ("--fp4-recipe", str(path), "--num-layers", "4")
    args = parse(*flags, "--fp4-bf16-after", "0.9", "--fp4-module-recipe", "a=mxfp4")
    (last, none), (first, fp8), (glob, own) = fp4_arguments.module_recipes(args)
    names = ("decoder.layers.3.*", "decoder.layers.0.*", "a")
    assert (last, first, glob) == names and none is None
    assert fp8 is not None and (fp8.fprop, fp8.phases[0].after) == (get_recipe("fp8").fprop, 0.9)
    assert own is not None and own.name == "mxfp4"
    path.write_text("base: tetrajet\nlayers: [{last: 99, recipe: bf16}]\n")
    with pytest.raises(ConfigError, match="last: 99 of a decoder with"):
        fp4_arguments.module_recipes(parse(*flags))


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--fp4-bf16-gemms dgrad", "needs --fp4-bf16-after"),
        ("--fp4-bf16-after 1.5", "a share of training in [0, 1]"),
        ("--fp4-bf16-after -0.1", "a share of training in [0, 1]"),
        ("--fp4-bf16-after nan", "a share of training in [0, 1]"),
        ("--fp4-bf16-after 0", "quantizes nothing"),
        ("--fp4-seed 18446744073709551616", "--fp4-seed"),
        ("--fp4-seed -1", "--fp4-seed"),
    ],
)
def test_what_contradicts_itself_or_does_nothing(flags: str, says: str) -> None:
    assert says in refusal("--fp4-recipe", "tetrajet", *flags.split())


def test_a_recipe_with_phases_takes_none_from_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("base: tetrajet\nphases: [{after: 0.5, recipe: fp8}]\n")
    for flags in (("--fp4-bf16-after", "0.9"), ("--fp4-bf16-gemms", "dgrad")):
        assert "recipe mine has phases of its own" in refusal("--fp4-recipe", str(path), *flags)
    options = ("--fp4-recipe-option", "ema_beta=0.9")
    assert "phases, which the option ema_beta does" in refusal("--fp4-recipe", str(path), *options)


def test_ramping_keeps_fprop_in_fp4() -> None:
    after = ("--fp4-recipe", "tetrajet-ramping", "--fp4-bf16-after", "0.9")
    assert "has ramping, which needs fprop in FP4: add --fp4-bf16-gemms dgrad" in refusal(*after)
    assert recipe("tetrajet-ramping", *after[2:], "--fp4-bf16-gemms", "dgrad", "wgrad").phases


def test_fp4_may_begin_after_bf16(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("phases: [{after: 0.1, recipe: tetrajet}]\n")
    found = recipe(str(path))
    assert not found.at(0.0).fprop.quantized and found.at(0.1).fprop.quantized


def test_the_seed_of_the_random_bits_is_the_run_s_unless_given() -> None:
    assert parse("--fp4-recipe", "tetrajet", "--seed", "7").fp4_seed == 7
    own = parse("--fp4-recipe", "tetrajet", "--seed", "7", "--fp4-seed", str(2**40))
    assert (own.fp4_seed, own.seed) == (2**40, 7)


@pytest.mark.parametrize(
    "flags",
    [
        "--fp4-recipe-option rule=floor",
        "--fp4-seed 0",
        "--fp4-bf16-after 0",  # falsy values are values
        "--fp4-bf16-after 0.5",
        "--fp4-bf16-gemms wgrad",
        "--fp4-eval-forward bf16",
    ],
)
def test_a_flag_that_needs_a_recipe_is_refused_without_one(flags: str) -> None:
    message = refusal(*flags.split())
    assert flags.split()[0] in message and "add --fp4-recipe" in message
