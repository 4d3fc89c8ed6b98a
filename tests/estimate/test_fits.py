"""Layouts that are left out are those that Megatron and this package refuse."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from megatron.training import arguments

from megatron_fp4 import GemmRecipe, Phase, Quantizer, Recipe
from megatron_fp4.errors import ConfigError
from megatron_fp4.estimate import fits, gpus, report
from megatron_fp4.estimate.layout import Layout
from megatron_fp4.estimate.model import Model
from megatron_fp4.estimate.plans import BF16, longest, recipe_named
from megatron_fp4.estimate.search import Fixed, Job, layouts, search
from megatron_fp4.mcore.launch.refusals.cuda_graphs import captured_layers
from megatron_fp4.mcore.launch.refusals.megatron_demands import megatrons_demands
from megatron_fp4.mcore.launch.refusals.table import of_launch, refuse
from megatron_fp4.mcore.runtime import cpu
from megatron_fp4.recipe import Layers
from testing.builders.command_line import parse
from testing.worlds.launch import MOCK_DATA

DENSE = Model(6, 128, 384, 8, 4, 16, 512, 64)
EXPERTS = replace(DENSE, experts=6, expert_ffn=192)
TETRAJET = recipe_named("tetrajet")
MODEL = """
    --num-layers 6 --hidden-size 128 --ffn-hidden-size 384 --num-attention-heads 8
    --group-query-attention --num-query-groups 4 --normalization RMSNorm --swiglu
    --position-embedding-type rope --untie-embeddings-and-output-weights --disable-bias-linear
    --seq-length 64 --max-position-embeddings 64 --train-iters 4 --lr 1e-3
""".split()
LAUNCH = "--bf16 --attention-dropout 0 --hidden-dropout 0 --fp4-recipe tetrajet".split()
OF_EXPERTS = "--num-experts 6 --moe-ffn-hidden-size 192".split()


def every(model: Model, gpu_count: int) -> Iterator[Layout]:
    job = Job(model, TETRAJET, gpus.MEASURED, gpu_count, 4, 24)
    yield from layouts(job, Fixed(graphs=False, micro_batch=2, recompute=False))


def refused_by_megatron(model: Model, gpu_count: int, flags: list[str]) -> str:
    """What Megatron's validation, with this package's, says of a launch; "" if it is fine."""
    # Without a GPU there is no NCCL, and gloo has no all-to-all.
    given = " ".join(flags).replace("alltoall", "allgather").split()
    try:
        args = parse(*(OF_EXPERTS if model.experts else []), *given, *MOCK_DATA, model=MODEL)
        args.rank, args.world_size = 0, gpu_count
        refuse(of_launch(args, ours=True))
        with megatrons_demands():
            arguments.validate_args(args, {})
            arguments.core_transformer_config_from_args(args)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.fixture
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a launch has it: on Hopper Megatron asks for this variable under tensor parallelism."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    cpu.install()


@pytest.mark.parametrize(
    ("model", "gpu_count"),
    [
        (DENSE, 4),
        pytest.param(DENSE, 24, marks=pytest.mark.outside),
        pytest.param(EXPERTS, 4, marks=pytest.mark.outside),
        pytest.param(EXPERTS, 24, marks=pytest.mark.outside),
    ],
)
def test_megatron_refuses_the_same_layouts(model: Model, gpu_count: int, on_a_cpu: None) -> None:
    seen = set()
    for layout in every(model, gpu_count):
        mine = next(fits.refusals(model, layout, TETRAJET), "")
        if mine.endswith("as VPP needs") or re.match(r"EP \d+ times PP .* GPUs$", mine):
            continue  # Megatron says it later: in the first step, and when it makes the groups
        flags = [*LAUNCH, *layout.flags(model.experts > 0)]
        theirs = refused_by_megatron(model, gpu_count, flags)
        assert bool(mine) == bool(theirs), (layout, mine, theirs)
        seen.add(bool(mine))
    assert seen == {True, False}


@pytest.mark.parametrize("model", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_the_shown_flags_of_every_layout_can_be_pasted(model: Model, on_a_cpu: None) -> None:
    job = Job(model, TETRAJET, gpus.MEASURED, 2, 2, 24)
    found = [each.layout for each in search(job, Fixed(micro_batch=2, vpp=1))]
    assert any(layout.graphs for layout in found) == (model is DENSE)
    for layout in found:
        flags = report.flags(job, layout)
        assert {"--bf16", "--attention-dropout 0", "--hidden-dropout 0"} < set(flags)
        said = refused_by_megatron(model, 2, flags)
        # That comes after the recipe's refusals. The control shows that they see the flags.
        assert said.startswith("--cuda-graph-impl local needs a GPU") if layout.graphs else not said
        without = [flag for flag in flags if "dropout" not in flag]
        assert ("dropout" in refused_by_megatron(model, 2, without)) == layout.graphs


@pytest.mark.parametrize(
    "change", [{"pp": 2}, {"recompute": True}, {}], ids=["pipeline", "recompute", "plain"]
)
@pytest.mark.parametrize("model", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_graphs_are_refused_as_this_package_refuses_them(
    model: Model, change: dict[str, Any]
) -> None:
    layout = Layout(2, 2, micro_batch=2, batch=24, graphs=True, **change)
    args = Namespace(
        pipeline_model_parallel_size=layout.pp,
        num_experts=model.experts or None,
        recompute_granularity="full" if layout.recompute else None,
        micro_batch_size=2,
    )
    for name in (
        *("moe_pad_expert_input_to_capacity", "step_batch_size_schedule", "global_batch_size"),
        *("eval_global_batch_size",),
        *("mtp_num_layers", "hidden_dropout", "attention_dropout", "save_activations_interval"),
        *("save_dgrads_interval", "inference_cuda_graph_scope", "fp4_eval_forward"),
        *("fp4_weight_cache", "fp4_metrics_interval", "eval_micro_batch_size"),
    ):
        setattr(args, name, None)
    theirs = any(captured_layers(args, [TETRAJET]))
    has_no_estimate = layout.pp > 1
    assert any(fits.refusals(model, layout, TETRAJET)) == (theirs or has_no_estimate)
    assert theirs == bool(layout.recompute or model.experts)
    late = Recipe("late", phases=(Phase(0.5, TETRAJET),))
    assert any(captured_layers(args, [late])) == theirs  # each phase is captured
    assert any(fits.refusals(model, layout, late)) == (theirs or has_no_estimate)
    mean = Recipe("mean", phases=(Phase(0.5, replace(TETRAJET, x_mean="subtracted")),))
    own = replace(TETRAJET, layers=(Layers(mean, last=1),))
    for each in (mean, own):
        assert any("x_mean: subtracted" in line for line in captured_layers(args, each.followed))
        assert "x_mean: subtracted" in " ".join(fits.refusals(model, layout, each))


def test_blocks_that_do_not_divide_a_shard_are_said() -> None:
    model = replace(DENSE, ffn=320)  # 80 on a rank
    layout = Layout(4, 4, tp=4, sp=True, micro_batch=2, batch=24)
    [problem] = fits.refusals(model, layout, TETRAJET)
    assert problem == ("TP 4: mlp.linear_fc2 has 80 in features on a rank, not a multiple of 32")
    assert not any(fits.refusals(model, layout, BF16))  # the control: BF16 has no blocks
    late = Recipe("late", phases=(Phase(0.1, TETRAJET),))  # BF16 first
    assert list(fits.refusals(model, layout, late)) == [problem]


def test_blocks_over_tokens_of_a_late_phase_are_said() -> None:
    """They must divide the tokens of a rank, under sequence parallelism."""
    tiles = Quantizer(block=(32, 32))
    late = replace(TETRAJET, name="late", fprop=GemmRecipe(tiles, TETRAJET.fprop.b), backward="raw")
    phased = replace(TETRAJET, phases=(Phase(0.5, late),))
    model = replace(DENSE, sequence=96)
    layout = Layout(2, 2, tp=2, sp=True, micro_batch=1, batch=24)
    problems = list(fits.refusals(model, layout, phased))
    assert "TP 2: 48 tokens on a rank, not a multiple of 32" in problems
    assert not any(fits.refusals(model, layout, TETRAJET))


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_the_time_is_the_mean_over_phases(graphs: bool) -> None:
    late = Recipe("late", phases=(Phase(0.1, TETRAJET),))
    assert late.ever_quantized and longest(late) is TETRAJET
    early = replace(TETRAJET, phases=(Phase(0.9, BF16),))
    assert longest(early) is early and longest(BF16) is BF16
    job = Job(DENSE, late, gpus.MEASURED, 1, 1, 24)
    fixed = Fixed(graphs=graphs, micro_batch=2)
    found = search(job, fixed)
    assert "the time is the mean over the phases of late, by their shares of training" in " ".join(
        found[0].extrapolated
    )
    first, plain = (search(replace(job, recipe=each), fixed)[0].time for each in (BF16, TETRAJET))
    for name, seconds in found[0].time._asdict().items():
        mean = 0.1 * getattr(first, name) + 0.9 * getattr(plain, name)
        assert seconds == pytest.approx(mean)
    assert found[0].time.total != pytest.approx(plain.total)  # the control


@pytest.mark.parametrize(
    ("fixed", "message"),
    [
        (Fixed(tp=3), "no layout runs: TP 3 does not divide the attention heads \\(8\\)"),
        (
            Fixed(graphs=True, tp=1, pp=2, vpp=1, micro_batch=1),
            "the memory of CUDA graphs under pipeline parallelism has no estimate",
        ),
    ],
)
def test_where_nothing_runs_the_reason_is_said(fixed: Fixed, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        search(Job(DENSE, TETRAJET, gpus.MEASURED, 4, 4, 24), fixed)


def test_of_sizes_that_nobody_gave_none_is_the_reason() -> None:
    """The batch does not divide over the GPUs, by which TP 2 and PP 2 do not divide either."""
    with pytest.raises(ConfigError, match=r"DP 3 times micro-batch \d does not divide the global"):
        search(Job(replace(DENSE, layers=8), TETRAJET, gpus.MEASURED, 3, 3, 16), Fixed())


def test_where_nothing_fits_the_smallest_is_said() -> None:
    large = Model(96, 12288, 49152, 96, 96, 128, 50000, 2048)
    with pytest.raises(ConfigError, match=r"the smallest takes \d+ GiB on a rank, and a h200 has"):
        search(Job(large, BF16, gpus.MEASURED, 2, 2, 16), Fixed(micro_batch=1))
