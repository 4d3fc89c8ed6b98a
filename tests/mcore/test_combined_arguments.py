"""Flags that do not work together with a recipe: each is refused in one line with a remedy."""

import re
from pathlib import Path

import pytest

from megatron_fp4.errors import ConfigError
from megatron_fp4.mcore.data import vocabulary
from megatron_fp4.mcore.launch import cuda_graphs, fp4_arguments
from megatron_fp4.mcore.launch.refusals.fp4_flags import NOT_WITH_A_RECIPE
from megatron_fp4.mcore.loop import plugin
from testing.builders.fp4_arguments import parse, refusal

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
    "--recompute-granularity selective",
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
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
    assert parse(*graphs, "--fp4-weight-cache", "remade").fp4_weight_cache == "remade"
    if "cuda-graph" not in flags:
        parse(*recipe, *flags.split())
    message = refusal(*graphs, *flags.split())
    named = flags.split()[0]
    assert named in message and "leave out one of them" in message


def test_what_evaluation_does_not_do_is_not_captured(tmp_path: Path) -> None:
    """In evaluation a graph would subtract the mean of the microbatch, and show later tokens."""
    dropout = ("--hidden-dropout", "0", "--attention-dropout", "0")
    path = tmp_path / "mean.yaml"
    mean = "base: tetrajet, x_mean: subtracted"
    for text in (mean, f"base: tetrajet, phases: [{{after: 0.5, recipe: {{{mean}}}}}]"):
        path.write_text(f"{{{text}}}")
        launch = ("--fp4-recipe", str(path), *dropout)
        parse(*launch)
        message = refusal(*launch, "--cuda-graph-impl", "local")
        assert "with x_mean: subtracted of recipe " in message
        assert message.endswith("which acts in training alone: leave out one of them")
    path.write_text(f"{{{text}}}".replace("subtracted", "kept"))  # Negative control.
    parse(*launch, "--cuda-graph-impl", "local")


@pytest.mark.parametrize("recipe", ["tetrajet --fp4-bf16-after 0.5", "tetrajet-fp8"])
def test_layers_of_a_recipe_with_phases_are_captured(recipe: str) -> None:
    launch = ("--num-layers", "4", "--fp4-recipe", *recipe.split(), *PIPELINED_GRAPHS[2:])
    assert parse(*launch).cuda_graph_impl == "local"


@pytest.mark.parametrize("zero", ["", "--hidden-dropout 0", "--attention-dropout 0"])
def test_graphs_name_the_values_that_take_dropout_away(zero: str) -> None:
    """Megatron's defaults are not 0."""
    graphs = ("--fp4-recipe", "tetrajet", "--cuda-graph-impl", "local", *zero.split())
    remedy = ("--attention-dropout", "0", "--hidden-dropout", "0")
    assert f"with dropout: give {' '.join(remedy)}, since" in refusal(*graphs)
    parse(*graphs, *remedy)


PIPELINED_GRAPHS = (
    *("--fp4-recipe", "tetrajet", "--hidden-dropout", "0", "--attention-dropout", "0"),
    *("--cuda-graph-impl", "local", "--pipeline-model-parallel-size", "2"),
)


@pytest.mark.parametrize(
    "flags", ["--eval-global-batch-size 8", "--step-batch-size-schedule 0:8,100:16"]
)
def test_another_number_of_captured_microbatches_is_refused(flags: str) -> None:
    batch = () if "schedule" in flags else ("--global-batch-size", "16")
    alone = parse(*PIPELINED_GRAPHS[:-2], *batch, *flags.split())  # one graph for all of them
    assert alone.pipeline_model_parallel_size == 1
    message = refusal(*PIPELINED_GRAPHS, *batch, *flags.split())
    assert f"and {flags.split()[0]} changes their number" in message
    parse(*PIPELINED_GRAPHS, "--global-batch-size", "8", "--eval-global-batch-size", "8")


def test_experts_that_always_get_as_many_tokens_can_be_captured() -> None:
    padded = "--num-experts 4 --moe-expert-capacity-factor 1 --moe-pad-expert-input-to-capacity"
    parse(*PIPELINED_GRAPHS, *padded.split())


def test_graphs_are_advised_where_they_can_be_had_and_help() -> None:
    def advice(*flags: str, in_python: bool = False) -> str | None:
        args = parse("--fp4-recipe", "tetrajet", *flags)
        recipe = fp4_arguments.recipe_of(args)
        assert recipe is not None
        return cuda_graphs.advice(args, [recipe], in_python)

    launch = ("--hidden-dropout", "0", "--attention-dropout", "0")
    two, four = ((*launch, "--tensor-model-parallel-size", ranks) for ranks in ("2", "4"))
    assert (advice(*four) or "").startswith("--cuda-graph-impl local may be faster")
    assert advice(*four, "--save", "runs/a", "--save-interval", "10")  # it writes metrics
    assert advice(*two, in_python=True)
    assert advice(*two) is None
    assert advice(*launch, in_python=True) is None
    assert advice(*four, "--num-experts", "4") is None
    pipeline = ("--pipeline-model-parallel-size", "2")
    assert advice(*four, *pipeline) and advice(*two, *pipeline)
    assert advice(*launch, *pipeline, in_python=True) is None
    assert advice(*four, "--cuda-graph-impl", "local") is None


def test_what_a_checkpoint_brings_a_captured_layer_is_refused_too() -> None:
    graphs = ("--cuda-graph-impl", "local", "--hidden-dropout", "0", "--attention-dropout", "0")
    args = parse("--fp4-recipe", "tetrajet", *graphs)
    assert fp4_arguments.recipe_of(args) is not None
    args.num_experts = 4
    with pytest.raises(ConfigError, match="--num-experts the router decides it: leave out one of"):
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


def test_linears_compute_what_a_checkpoint_s_arguments_bring(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As they did in the training: a resume is exact."""
    args = parse("--fp4-recipe", "tetrajet", "--use-checkpoint-args")
    joined = args.fp4_joins_swiglu, args.fp4_joins_norms
    args.swiglu, args.normalization = True, "RMSNorm"  # as Megatron reads them
    args.transformer_impl, args.add_bias_linear = "local", False
    monkeypatch.setattr(vocabulary, "install", lambda: None)
    monkeypatch.setattr(plugin, "refuse", lambda refusals: None)
    plugin.Plugin(ours=True).validating(lambda args, defaults: None)(args)
    assert joined == (False, False)
    assert (args.fp4_joins_swiglu, args.fp4_joins_norms) == (True, True)
