"""The FP4 flags, through Megatron's own parser: what they mean, and what is refused in one line."""

import argparse
import functools
import re
from pathlib import Path

import pytest
from megatron.training.arguments import add_megatron_arguments

from megatron_fp4 import get_recipe, list_recipes
from megatron_fp4.errors import ConfigError
from megatron_fp4.mcore.launch import cuda_graphs, flags, fp4_arguments
from megatron_fp4.mcore.launch.refusals.fp4_flags import NOT_WITH_A_RECIPE, UPSTREAM_RECIPES
from megatron_fp4.recipe import GEMMS, Recipe

PLAIN_OBJECT = 4
SOME_RECIPE = get_recipe("tetrajet", rule="floor")


@functools.cache
def parser() -> argparse.ArgumentParser:
    return flags.add_flags(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))


def parse(*flags: str) -> argparse.Namespace:
    """What Megatron's parser makes of the flags, settled."""
    args = parser().parse_args(list(flags))
    fp4_arguments.settle(args)
    args.fp4_metrics_interval = fp4_arguments.metrics_interval(args)
    return args


def recipe(*flags: str) -> Recipe:
    found = fp4_arguments.recipe_of(parse("--fp4-recipe", *flags))
    assert found is not None
    return found


def refusal(*flags: str) -> str:
    with pytest.raises(ConfigError) as raised:
        parse(*flags)
    message = str(raised.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("flags", [(), ("--fp4-recipe", "off"), ("--fp4-recipe", "bf16")])
def test_it_is_off_where_it_is_left_out_or_turned_off(flags: tuple[str, ...]) -> None:
    args = parse(*flags, "--seed", "7")
    assert args.fp4_recipe is None and fp4_arguments.recipe_of(args) is None


def test_a_recipe_that_is_off_takes_no_options() -> None:
    message = refusal("--fp4-recipe", "off", "--fp4-recipe-option", "rule=ceil")
    assert message.startswith("--fp4-recipe-option needs a recipe")


@pytest.mark.parametrize("name", list_recipes())
def test_each_recipe_goes_by_its_name(name: str) -> None:
    assert recipe(name).name == name


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
        ("tetrajett", ("--disable-bias-linear",), "the recipes: dge_occ, fp8, mxfp4,"),
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
    path.write_text("base: tetrajet\nfprop: {}\nbf16_after: 1/2\n")
    found = recipe(str(path), "--fp4-recipe-option", "rule=floor")
    assert (found.name, found.fprop.quantized, found.bf16_after) == ("mine", False, 0.5)
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


def test_an_object_of_a_python_module() -> None:
    assert recipe(f"{__name__}:SOME_RECIPE") is SOME_RECIPE
    assert "is a int, not a" in refusal("--fp4-recipe", f"{__name__}:PLAIN_OBJECT")
    assert "cannot be imported" in refusal("--fp4-recipe", f"{__name__}:nothing")
    assert "cannot be imported" in refusal("--fp4-recipe", "no.such.module:recipe")


# --- schedule, seed, evaluation ----------------------------------------------------------------


def test_a_schedule_returns_all_gemms_or_the_named_ones() -> None:
    assert recipe("tetrajet").bf16_after is None
    whole = recipe("tetrajet", "--fp4-bf16-after", "0.9")
    assert (whole.bf16_after, whole.bf16_gemms) == (0.9, GEMMS)
    part = recipe("tetrajet", "--fp4-bf16-after", "0", "--fp4-bf16-gemms", "dgrad", "wgrad")
    assert (part.bf16_after, part.bf16_gemms) == (0.0, ("dgrad", "wgrad"))


def test_a_schedule_is_that_of_the_modules_recipes_too() -> None:
    modules = ("--fp4-module-recipe", "a=mxfp4", "--fp4-module-recipe", "b=bf16")
    args = parse("--fp4-recipe", "tetrajet", "--fp4-bf16-after", "0.9", *modules)
    (_, own), (_, none) = fp4_arguments.module_recipes(args)
    assert own is not None and own.bf16_after == 0.9 and none is None


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


def test_the_file_s_schedule_takes_other_gemms_from_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("base: tetrajet\nbf16_after: 0.5\n")
    assert recipe(str(path), "--fp4-bf16-gemms", "wgrad").bf16_gemms == ("wgrad",)


def test_the_seed_of_the_noise_is_the_run_s_unless_given() -> None:
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


# --- what cannot work together -----------------------------------------------------------------

REFUSED = [
    "--context-parallel-size 2",
    "--use-megatron-fsdp",
    "--use-torch-fsdp2",
    "--moe-grouped-gemm",
    "--use-grouped-gemm-for-dense-mlp",
    "--use-grouped-gemm-for-shared-expert",
    "--moe-token-dispatcher-type flex",
    "--moe-latent-size 32",
    "--moe-shared-expert-overlap",
    "--moe-router-padding-for-quantization",
    "--moe-router-padding-for-fp8",
    "--hybrid-layer-pattern M*",
    "--multi-latent-attention",
    "--cuda-graph-impl transformer_engine",
    "--cuda-graph-modules attn",
    "--cuda-graph-scope attn",
    "--optimizer-cuda-graph",
    "--enable-cuda-graph",
    "--external-cuda-graph",
    "--delay-wgrad-compute",
    "--tensor-parallel-num-weight-shards 2",
    "--expert-tensor-parallel-num-weight-shards 2",
    "--overlap-moe-expert-parallel-comm",
    "--cpu-offloading-num-layers 1",
    "--tp-comm-overlap",
    "--fp8-format hybrid",
    "--te-precision-config-file some.yaml",
    "--fp4-quantizer-factory some.module.factory",
    "--heterogeneous-layers-config-path some.json",
    "--heterogeneous-layers-config-encoded-json {}",
    "--linear-attention-freq 2",
    "--use-kitchen-attention",
    "--use-transformer-engine-op-fuser",
    "--fused-residual-rmsnorm",
    "--mlp-chunks-for-training 2",
    "--init-model-with-meta-device",
    "--freeze-all-layers",
    "--non-persistent-ckpt-type local",
    "--non-persistent-ckpt-type in_memory",
    "--yaml-cfg some.yaml",
]


@pytest.mark.parametrize("flags", REFUSED)
def test_what_a_recipe_cannot_honour_is_refused_with_a_remedy(flags: str) -> None:
    parse(*flags.split())  # without a recipe it is Megatron's to judge
    message = refusal("--fp4-recipe", "tetrajet", *flags.split())
    start = f"recipe tetrajet does not support {flags.split()[0]}: "
    assert re.match("use |leave |train |choose |give ", message.removeprefix(start))


NO_KEEPERS = [
    "--use-distributed-optimizer --optimizer muon",
    "--use-distributed-optimizer --optimizer lion",
    "--optimizer dist_muon",
    "--use-precision-aware-optimizer",
    "--optimizer-cpu-offload",
    "--ckpt-format torch --use-distributed-optimizer",
]


@pytest.mark.parametrize("flags", NO_KEEPERS)
def test_an_optimizer_that_cannot_keep_an_average_is_refused(flags: str) -> None:
    parse("--fp4-recipe", "tetrajet", *flags.split())  # without an average it may run
    asks = (("--fp4-recipe", "tetrajet-ema"), ("--fp4-module-recipe", "*fc1=tetrajet-ema"))
    for recipe in (asks[0], ("--fp4-recipe", "tetrajet", *asks[1])):
        message = refusal(*recipe, *flags.split())
        assert "recipe tetrajet-ema keeps an average beside the weights, which --" in message
        assert flags.split()[0] in message and message.endswith("cannot keep: leave it out")


@pytest.mark.parametrize("flags", ["--optimizer muon", "--optimizer sgd", "--fp16"])
def test_other_optimizers_keep_it(flags: str) -> None:
    parse("--fp4-recipe", "tetrajet-ema", *flags.split())


GRAPHS = [
    "--fp4-bf16-after 0.5",
    "--pipeline-model-parallel-size 2",
    "--hidden-dropout 0.1",
    "--attention-dropout 0.1",
    "--recompute-granularity selective",
    "--save-activations-interval 2",
    "--save-dgrads-interval 2",
    "--inference-cuda-graph-scope block",
    "--num-experts 4",
    "--mtp-num-layers 1",
    "--fp4-eval-forward bf16",
    "--fp4-weight-cache packed",
    "--eval-micro-batch-size 3",
]


@pytest.mark.parametrize("flags", GRAPHS)
def test_what_a_captured_layer_cannot_follow_is_refused(flags: str) -> None:
    recipe = ("--fp4-recipe", "tetrajet", "--hidden-dropout", "0", "--attention-dropout", "0")
    graphs = (*recipe, "--cuda-graph-impl", "local")
    assert parse(*graphs).fp4_weight_cache == "off"
    if "cuda-graph" not in flags:
        parse(*recipe, *flags.split())
    message = refusal(*graphs, *flags.split())
    named = "return to BF16" if "after" in flags else flags.split()[0]
    assert named in message and "leave out one of them" in message


def test_graphs_are_advised_where_they_can_be_had_and_help() -> None:
    def advice(*flags: str) -> str | None:
        args = parse("--fp4-recipe", "tetrajet", *flags)
        recipe = fp4_arguments.recipe_of(args)
        assert recipe is not None
        return cuda_graphs.advice(args, [recipe])

    launch = ("--hidden-dropout", "0", "--attention-dropout", "0")
    two = (*launch, "--tensor-model-parallel-size", "2")
    assert (advice(*two) or "").startswith("--cuda-graph-impl local may be faster")
    assert advice(*two, "--save", "runs/a", "--save-interval", "10")  # it writes metrics
    assert advice(*launch) is None
    assert advice(*two, "--num-experts", "4") is None
    assert advice(*two, "--cuda-graph-impl", "local") is None


def test_what_a_checkpoint_brings_a_captured_layer_is_refused_too() -> None:
    graphs = ("--cuda-graph-impl", "local", "--hidden-dropout", "0", "--attention-dropout", "0")
    args = parse("--fp4-recipe", "tetrajet", *graphs)
    assert fp4_arguments.recipe_of(args) is not None
    args.num_experts = 4
    with pytest.raises(ConfigError, match="--num-experts: leave out one of them"):
        fp4_arguments.recipe_of(args)


def test_every_refusal_is_tried() -> None:
    tried = {flags.split()[0] for flags in REFUSED}
    assert set(NOT_WITH_A_RECIPE) == tried


def test_as_many_weight_shards_as_tensor_parallel_ranks_are_plain_tensor_parallelism() -> None:
    """So Megatron's validation fills the flag in, and the refusals are asked again after it."""
    both = ("--tensor-parallel-num-weight-shards", "2", "--tensor-model-parallel-size", "2")
    assert parse("--fp4-recipe", "tetrajet", *both).fp4_recipe == "tetrajet"


def test_what_a_checkpoint_s_arguments_bring_is_refused_too() -> None:
    args = parse("--fp4-recipe", "tetrajet", "--use-checkpoint-args")
    args.multi_latent_attention = True
    with pytest.raises(ConfigError, match="--multi-latent-attention: use grouped-query attention"):
        fp4_arguments.recipe_of(args)
