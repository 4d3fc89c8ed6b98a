"""What `attach` gives the linears of a built model, what it prints, and what it refuses."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_fp4 import get_recipe
from megatron_fp4.arithmetic.quantizer import Quantizer
from megatron_fp4.errors import ConfigError
from megatron_fp4.mcore.model import attach as attaching
from megatron_fp4.mcore.model import attention, executor, size_checks, start_table
from megatron_fp4.mcore.model.attach import attach
from megatron_fp4.mcore.model.run import Run
from megatron_fp4.mcore.model.start_table import Row, table
from megatron_fp4.plan.compiler import compile_plan
from megatron_fp4.plan.data import LinearPlan
from megatron_fp4.plan.words import gemm_words
from megatron_fp4.recipe import GemmRecipe, Phase, Recipe
from megatron_fp4.setting import Setting, column_parallel
from megatron_fp4.target import target_of
from testing.builders.attached import model, printed, run
from testing.worlds.launch import torchrun, train

PP2 = ("--pipeline-model-parallel-size", "2")
TP2 = ("--tensor-model-parallel-size", "2")


def test_the_table_tells_layers_shapes_formats_backends_and_why_not_the_faster(
    one_rank: None, capsys: pytest.CaptureFixture[str]
) -> None:
    attach(run(get_recipe("mxfp4-rht-sr", hadamard=32), start=1, end=2), [model()])
    text = capsys.readouterr().out
    head, *linears = printed(text)
    assert head == ["linear", "layers", "out x in on a rank", "recipe", "fprop", "dgrad", "wgrad"]
    on = "e2m1 x e2m1 on reference"
    assert linears[:2] == [
        ["decoder.layers.*.mlp.linear_fc1", "0,2-3", "256 x 64", *["high precision"] * 4],
        ["decoder.layers.*.mlp.linear_fc1", "1", "256 x 64", "mxfp4-rht-sr", "high precision"]
        + [on, on],
    ]
    assert [line[0].rpartition(".")[2] for line in linears[2:]] == [
        *["linear_fc2"] * 2,
        *["linear_proj"] * 2,
        *["linear_qkv"] * 2,
    ]
    assert text.count("not used:") == 5
    assert "not used: sm100: torch's MXFP4 GEMMs need a GPU of compute" in text
    assert "not used: blackwell: FP4 tensor cores need a GPU of compute capability 10.x" in text
    assert "not used: nvfp4: NVFP4 GEMMs need a GPU of compute capability 10.x" in text
    assert "not used: hopper: FP8 GEMMs with a scale a row need a GPU of compute" in text
    assert "not used: bf16: the model computes in float32; use --bf16" in text
    # Neither its group of 64: it is not the paper's recipe.
    assert text.splitlines()[0] == "megatron-fp4: recipe mxfp4-rht-sr"
    assert "    dgrad: dY and W in E2M1, E8M0 scales (floor) for blocks of 32, stochastic" in text


def test_multipliers_that_a_flag_excludes_are_not_used(
    one_rank: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """--fp4-multiplier bf16, in the table and in what the linears run."""
    told, chunk = run(get_recipe("tetrajet")), model()
    told.args.fp4_multiplier = "bf16"
    attach(told, [chunk])
    text = capsys.readouterr().out
    for name in ("sm100", "blackwell", "nvfp4", "hopper"):
        assert f"not used: {name}: --fp4-multiplier bf16 excludes it" in text
    found = [linear.fp4.site for _, linear, _ in attaching._linears(chunk) if linear.fp4]
    assert found and all(site.fastest == "bf16" for site in found)


def test_only_the_layers_in_between_follow_the_recipe(one_rank: None) -> None:
    chunk = model()
    attach(run(get_recipe("tetrajet"), start=1, end=2), [chunk])
    states = {
        name: linear.fp4.site.name
        for name, linear, _ in attaching._linears(chunk)
        if linear.fp4 is not None
    }
    assert len(states) == 4 and all(name.startswith("decoder.layers.1.") for name in states)
    assert all(name == given for name, given in states.items())


def test_first_and_last_counts_mean_nothing_without_their_switch(one_rank: None) -> None:
    chunk, told = model(), run(get_recipe("tetrajet"), start=1, end=2)
    told.args.first_last_layers_bf16 = False
    attach(told, [chunk])
    assert all(linear.fp4 is not None for _, linear, _ in attaching._linears(chunk))


def test_a_format_that_backward_takes_over_from_forward_is_named() -> None:
    bf16 = torch.bfloat16
    setting = Setting(64, 64, 64, bf16, target_of(torch.device("cpu")), bf16)

    def words(recipe: Recipe) -> list[str]:
        plan = compile_plan(recipe, setting)
        return [gemm_words(plan, gemm) for gemm in plan.gemms]

    assert words(get_recipe("dge-occ"))[1:] == ["e5m2 x e2m1 on bf16"] * 2
    assert words(get_recipe("mxfp4-rht-sr", forward="fp8"))[0] == "e4m3 x e4m3 on bf16"


def test_the_table_has_a_line_for_each_phase(one_rank: None) -> None:
    phases = (Phase(0.5, get_recipe("fp8")), Phase(0.9, Recipe("bf16")))
    attached = run(replace(get_recipe("tetrajet"), phases=phases))
    attach(attached, [model()])
    lines = [" ".join(line.split()) for line in attached.start_table.splitlines()]
    assert "after 0.5 of training: recipe fp8 (arXiv 2209.05433)" in lines
    assert "after 0.9 of training: recipe bf16" in lines
    own = [line for line in lines if line.startswith("decoder.layers.*.mlp.linear_fc1")]
    named = ["tetrajet e2m1", "fp8 after 0.5 e4m3", "bf16 after 0.9 high precision"]
    assert [name in line for name, line in zip(named, own, strict=True)] == [True] * 3, own


@pytest.mark.parametrize(
    ("numbers", "text"), [([], ""), ([3], "3"), ([0, 1], "0-1"), ([7, 0, 2, 1, 9, 8], "0-2,7-9")]
)
def test_ranges_of_layers(numbers: list[int], text: str) -> None:
    assert start_table._ranges(numbers) == text


# --- refusals ----------------------------------------------------------------------------------


def test_a_recipe_that_no_layer_would_follow_is_an_error(one_rank: None) -> None:
    with pytest.raises(ConfigError, match="would quantize no layer.*lower --num-layers-at-start"):
        attach(run(get_recipe("tetrajet"), start=2, end=2), [model()])


@pytest.mark.parametrize(
    ("recipe", "sizes", "says"),
    [
        (
            replace(get_recipe("tetrajet"), phases=(Phase(0.5, get_recipe("mxfp4-rht-sr")),)),
            {"hidden_size": 96},
            "linear_fc2: 96 outputs .* multiple of 64, which dgrad of recipe mxfp4-rht-sr takes",
        ),
        (
            "tetrajet",
            {"ffn_hidden_size": 144},
            "mlp.linear_fc1: 144 outputs .* multiple of 32.*; change --ffn-hidden-size 144 to",
        ),
        (
            "mxfp4-rht-sr",
            {"hidden_size": 96},
            "linear_fc2: 96 outputs .* multiple of 64.*; change --hidden-size 96 to",
        ),
        (
            "dge-occ",
            {"ffn_hidden_size": 132},
            "132 outputs .* multiple of 8.*; change --ffn-hidden-size 132 to",
        ),
        (
            "tetrajet",
            {"num_attention_heads": 4, "kv_channels": 12},
            r"linear_proj: 48 inputs .*; change --num-attention-heads 4 x --kv-channels 12 to",
        ),
        (
            "mxfp4-rht-sr",
            {"hidden_size": 192, "num_attention_heads": 8, "num_query_groups": 2}
            | {"group_query_attention": True},
            r"linear_qkv: 288 outputs .*; change \(--num-attention-heads 8 \+ 2 x "
            r"--num-query-groups 2\) x --kv-channels 24 to",
        ),
    ],
)
def test_a_size_that_does_not_divide_names_the_layer_and_the_flags(
    one_rank: None, recipe: str | Recipe, sizes: dict[str, Any], says: str
) -> None:
    told = run(recipe if isinstance(recipe, Recipe) else get_recipe(recipe))
    given = {"hidden_size": 64, "num_attention_heads": 4, "group_query_attention": False} | sizes
    given.setdefault("kv_channels", given["hidden_size"] // given["num_attention_heads"])
    vars(told.args).update(given)
    del given["group_query_attention"]
    with pytest.raises(ConfigError, match=rf"decoder\.layers\.0\..*{says}"):
        attach(told, [model(**given)])


def test_a_size_of_a_user_s_own_linear_is_told_without_flags(one_rank: None) -> None:
    args = run(get_recipe("tetrajet")).args
    with pytest.raises(ConfigError, match="own_proj: 40 inputs on a rank .* change its inputs to"):
        size_checks.check(
            args, get_recipe("tetrajet"), "own_proj", 40, 64, column_parallel(1), False
        )


def test_a_shard_that_does_not_divide_is_told_once_before_training() -> None:
    """160 rows tile; 80 on each of two ranks do not."""
    result = torchrun(2, *TP2, "--bf16", "--fp4-recipe", "tetrajet")
    told = [line for line in result.output.splitlines() if "megatron-fp4" in line]
    assert result.status != 0 and not result.losses and not result.has_traceback
    assert len(told) == 1 and "linear_fc1: 80 outputs on a rank are not a multiple of 32" in told[0]
    assert "--ffn-hidden-size 160 / --tensor-model-parallel-size 2" in told[0]


def test_an_evaluation_s_tokens_must_fill_blocks_too(one_rank: None) -> None:
    tiles = Quantizer(block=(64, 32))
    own = replace(get_recipe("mxfp4"), fprop=GemmRecipe(tiles, tiles))
    attach(run(own), [model()])
    evaluating = run(own)
    evaluating.args.eval_micro_batch_size = 1
    with pytest.raises(ConfigError, match="32 tokens on a rank are not a multiple of 64"):
        attach(evaluating, [model()])


# --- names -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rank", "name", "whole"),
    [
        (1, "decoder.layers.0.mlp.experts.linear_fc1.weight1", "linear_fc1.weight5"),
        (1, "decoder.layers.0.mlp.experts.linear_fc2.bias0", "linear_fc2.bias4"),
        (0, "decoder.layers.0.mlp.experts.linear_fc1.weight1", "linear_fc1.weight1"),
        (1, "decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight", "_fc1.weight"),
        (1, "decoder.layers.0.mlp.linear_fc1.weight1", "linear_fc1.weight1"),
    ],
)
def test_weights_of_grouped_experts_are_numbered_over_the_model(
    rank: int, name: str, whole: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the exchange of gradients takes experts of two ranks for the same one."""
    monkeypatch.setattr(attaching.mpu, "get_expert_model_parallel_world_size", lambda: 2)
    monkeypatch.setattr(attaching.mpu, "get_expert_model_parallel_rank", lambda: rank)
    config: Any = SimpleNamespace(num_moe_experts=8)
    found = attaching.with_global_weight(name, config)
    assert found.endswith(whole) and (found == name) == name.endswith(whole)


def test_names_count_over_the_model_under_interleaved_pipelines() -> None:
    """Every stage's layer is its layer 0; the table, which goes by global names, has all four.
    Multi-token prediction's layer is neither the first nor the last of the decoder."""
    interleaved = ("--num-layers", "4", "--num-layers-per-virtual-pipeline-stage", "1")
    bf16 = ("--first-last-layers-bf16", "--mtp-num-layers", "1", "--ffn-hidden-size", "128")
    output = train(2, *PP2, *interleaved, *bf16, "--fp4-recipe", "tetrajet").output
    start = output.index("megatron-fp4: recipe")
    linears = printed(output[start : output.index("embedding, head", start)])[1:]
    decoder = {(*line[:2], line[3]) for line in linears if line[0].startswith("decoder")}
    assert decoder == {
        (f"decoder.layers.*.{name}", layers, precision)
        for name in ("mlp.linear_fc1", "mlp.linear_fc2")
        + ("self_attention.linear_proj", "self_attention.linear_qkv")
        for layers, precision in (("0,3", "high precision"), ("1-2", "tetrajet"))
    }
    mtp = {line[3] for line in linears if line[0].startswith("mtp")}
    assert mtp == {"tetrajet"}


def test_the_table_has_the_lines_of_the_executor(
    one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the plans of all linears and phases."""

    def start(run: Run, plans: Sequence[LinearPlan]) -> executor.Started:
        assert [plan.recipe.name for plan in plans] == ["tetrajet", "fp8"] * 16
        return executor.Started("it cannot be built")

    monkeypatch.setattr(executor, "start", start)
    attached = run(replace(get_recipe("tetrajet"), phases=(Phase(0.5, get_recipe("fp8")),)))
    attach(attached, [model()])
    assert "\n  linears run in Python: it cannot be built\n" in attached.start_table + "\n"


@pytest.mark.parametrize("problem", [None, "it is older than torch's"])
def test_the_table_says_when_attention_is_slower_than_it_could_be(
    problem: str | None, one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "cudnn_problem", lambda: problem)
    attached = run(get_recipe("tetrajet"))
    chunk = model()
    core = chunk.decoder.layers[0].self_attention.core_attention
    assert isinstance(core, attention.SdpaAttention)
    attach(attached, [chunk])
    line = f"cuDNN's kernels, the fastest here: {problem}; set CUDNN_HOME"
    assert (line in attached.start_table) == (problem is not None)


def test_the_memory_that_kept_weights_take_is_told(
    one_rank: None, capsys: pytest.CaptureFixture[str]
) -> None:
    told = run(get_recipe("tetrajet"))
    attach(told, [model()])
    weights = 4 * (256 * 64 + 64 * 128 + 192 * 64 + 64 * 64)
    packed = 2 * weights * 4.25 / 8
    assert f"kept packed: {packed / 2**10:.1f} KiB on a rank" in capsys.readouterr().out
    told.args.fp4_weight_cache = "decoded"
    attach(told, [model()])
    decoded = packed + 2 * 4 * weights  # float32
    assert f"kept decoded: {decoded / 2**20:.1f} MiB on a rank" in capsys.readouterr().out


def test_experts_are_told_of_the_layers_that_have_them() -> None:
    """Two experts of layer 0 follow another recipe: all three of layer 1 do not, nor the third."""

    def row(layer: int, expert: int) -> Row:
        name = f"decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc2"
        own = layer == 0 and expert < 2
        return Row(name, "64 x 64", "mxfp4" if own else "tetrajet", ("on",) * 3, ())

    recipe = get_recipe("tetrajet")
    _, *lines = printed(table([recipe], [row(i, j) for i in range(2) for j in range(3)]))
    start = "decoder.layers.*.mlp.experts.local_experts"
    assert [line[:4] for line in lines] == [
        [f"{start}.0-1.linear_fc2", "0", "64 x 64", "mxfp4"],
        [f"{start}.2.linear_fc2", "0", "64 x 64", "tetrajet"],
        [f"{start}.0-2.linear_fc2", "1", "64 x 64", "tetrajet"],
    ]
