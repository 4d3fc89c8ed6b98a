"""--fp4-grad-comm: what it refuses, what it prints, and runs that save and go on."""

import functools
import re
from pathlib import Path

import pytest

from testing.builders.fp4_arguments import parse, refusal
from testing.worlds.checkpoints import (
    MOE,
    SHARDED,
    SIZES,
    SMALL,
    TETRAJET,
    again,
    good,
    on_other_numbers_of_ranks,
    run_in_turn,
    same,
    saving,
    told,
)
from testing.worlds.launch import Result, torchrun, train
from testing.worlds.own_megatron import changing
from testing.worlds.own_megatron import run as run_own

FP8, BF16 = "--fp4-grad-comm fp8", "--fp4-grad-comm bf16"
OVERLAPPED = "--overlap-grad-reduce --ddp-bucket-size 20000"
FLAGS = (*FP8.split(), *SIZES.split())
REFUSED = {
    "--ddp-average-in-collective": "leave it out, gradients are scaled before they are sent",
    "--ddp-reduce-scatter-with-fp32-accumulation": "leave it out, gradients are summed in float32",
    "--num-distributed-optimizer-instances 2": "leave it out, all data-parallel ranks are one",
    "--use-torch-fsdp2": "use --use-distributed-optimizer",
    "--use-megatron-fsdp": "use --use-distributed-optimizer",
    "--use-distributed-optimizer --optimizer muon": "leave out --use-distributed-optimizer",
    "--optimizer dist_muon": "use --optimizer muon",
    "--cuda-graph-impl full_iteration": "use --cuda-graph-impl local",
    "--cuda-graph-impl transformer_engine": "use --cuda-graph-impl local",
    "--external-cuda-graph": "use --cuda-graph-impl local",
    "--cuda-graph-impl local --cuda-graph-modules full_iteration": "--cuda-graph-modules full_itera"
    "tion: leave it out",
    "--cuda-graph-impl local --cuda-graph-scope full_iteration": "--cuda-graph-scope full_iteration"
    ": leave it out",
    "--tensor-parallel-num-weight-shards 2": "use --tensor-model-parallel-size",
    "--expert-tensor-parallel-num-weight-shards 2": "use --expert-tensor-parallel-size",
    "--reuse-grad-buf-for-mxfp8-param-ag": "leave it out",
    "--fp8-param-gather": "leave it out",
    "--context-parallel-size 2": "--context-parallel-size: leave out one of the two",
    f"--optimizer-cpu-offload --use-precision-aware-optimizer {SHARDED}": "--optimizer-cpu-offload:"
    " leave out one of the two",
    "--fake-process-group": "leave it out, it sends nothing",
}


# --- the flags ---------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", REFUSED)
def test_what_changes_how_gradients_are_summed_is_refused(flags: str) -> None:
    """In the same words without a recipe; with one, other checks may come first."""
    message = refusal(*FP8.split(), *flags.split())
    assert message.startswith("--fp4-grad-comm does not support ") and REFUSED[flags] in message
    parse(*flags.split())  # negative control


def test_upstreams_gather_of_fp4_is_refused() -> None:
    flags = "--fp4-format e2m1 --transformer-impl transformer_engine --fp4-param-gather"
    assert "leave out --fp4-param-gather" in refusal(*FP8.split(), *flags.split())


def test_elements_are_those_of_fp8() -> None:
    e5m2 = ("--fp4-grad-comm-element", "e5m2")
    for flags in ((), BF16.split()):
        message = refusal(*flags, *e5m2)
        assert message.startswith("--fp4-grad-comm-element e5m2 needs --fp4-grad-comm fp8: add it")
    assert parse(*FP8.split()).fp4_grad_comm_element == "e4m3"
    assert parse(*FP8.split(), *e5m2).fp4_grad_comm_element == "e5m2"
    assert parse().fp4_grad_comm_element is None


def test_the_seed_of_rounding_needs_no_recipe_then() -> None:
    assert parse(*FP8.split(), "--fp4-seed", "7").fp4_seed == 7
    assert "--fp4-seed needs a recipe" in refusal("--fp4-seed", "7")


@pytest.mark.parametrize("recipe", ["", TETRAJET])
def test_a_refused_launch_is_one_line(recipe: str) -> None:
    result = torchrun(2, *FLAGS, *recipe.split(), "--ddp-average-in-collective")
    assert "--fp4-grad-comm does not support --ddp-average-in-collective" in told(result)


# --- what is printed and sent ------------------------------------------------------------------


def lines(result: Result) -> list[str]:
    """What a launch says of its gradients."""
    pattern = r"^megatron-fp4: data-parallel ranks send .*\n(?:^  \w+: .*\n)*"
    [found] = re.findall(pattern, result.output, re.MULTILINE)
    return str(found).splitlines()


MEAN = "each of 2 ranks sends bytes of a parameter, on average"
OF_RANK_0 = """
from megatron_fp4.mcore.exchange import start
of_all = start.of_all
start.of_all = lambda mine: of_all(mine)[:1]
"""


@functools.cache
def plain(processes: int, *flags: str) -> Result:
    return train(processes, *SIZES.split(), *flags)


def test_the_bytes_of_a_parameter() -> None:
    head, dense = lines(train(2, *FLAGS, "--use-distributed-optimizer"))
    assert head.startswith(
        "megatron-fp4: data-parallel ranks send gradients in FP8 (E4M3), through"
    )
    assert dense == f"  dense: {MEAN}: 0.50 by all-to-all"
    _, dense = lines(train(2, *BF16.split(), *SIZES.split()))
    assert dense.endswith(f"{MEAN}: 1.00 by all-to-all and 1.00 by all-gather")


@pytest.mark.slow
def test_the_bytes_of_a_parameter_are_a_mean_where_shards_are_uneven(tmp_path: Path) -> None:
    """The ends of padded buckets are empty: rank 1 has less of them, and sends more. Negative
    control: the bytes are those of rank 0."""
    flags = (*FLAGS, "--use-distributed-optimizer", "--ddp-pad-buckets-for-high-nccl-busbw")
    assert lines(train(2, *flags))[1] == f"  dense: {MEAN}: 0.50 by all-to-all"
    alone = run_own(changing(tmp_path, OF_RANK_0), 2, *flags)
    assert lines(alone)[1] == f"  dense: {MEAN}: 0.30 by all-to-all"


@pytest.mark.slow
def test_experts_have_ranks_of_their_own() -> None:
    flags = f"{MOE} --expert-model-parallel-size 2 --use-distributed-optimizer"
    _, dense, experts = lines(train(2, *FLAGS, *flags.split()))
    assert dense.startswith("  dense: each of 2 ranks sends")
    assert experts == "  experts: 1 rank sends nothing"


@pytest.mark.parametrize("recipe", ["", pytest.param(TETRAJET, marks=pytest.mark.slow)])
def test_one_rank_sends_and_rounds_nothing(recipe: str) -> None:
    result = train(1, *FLAGS, *recipe.split())
    assert (
        lines(result)[1:] == ["  dense: 1 rank sends nothing"] and "buffers" not in lines(result)[0]
    )
    assert result.losses == plain(1, *recipe.split()).losses


@pytest.mark.slow
def test_another_seed_rounds_otherwise() -> None:
    one, two = (train(2, *FLAGS, "--fp4-seed", seed) for seed in ("1", "2"))
    assert one.losses != two.losses == pytest.approx(one.losses, rel=1e-3)
    assert "data-parallel ranks send" not in plain(2).output


@pytest.mark.parametrize("recipe", [TETRAJET, pytest.param("", marks=pytest.mark.slow)])
def test_a_users_own_script_exchanges_too(recipe: str) -> None:
    """With a recipe it has the losses of pretrain_gpt.py."""
    own, without = (
        run_own("provider.py", 2, *flags, *recipe.split()) for flags in (FLAGS, FLAGS[2:])
    )
    assert own.status == without.status == 0, own.output[-4000:]
    assert own.losses != without.losses == pytest.approx(own.losses, rel=1e-3)
    if recipe:
        assert own.losses == train(2, *FLAGS, *recipe.split()).losses


def test_a_script_that_trains_nothing_is_an_error(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("from megatron.training.arguments import parse_and_validate_args as p; p()")
    assert "--fp4-grad-comm did nothing: the script made no" in told(run_own(script, 1, *FLAGS))


UNWRAPPED = """
get_model = training.get_model
training.get_model = lambda *given, **named: get_model(*given, **named | {"wrap_with_ddp": False})
"""


def test_a_model_that_nothing_wraps_is_an_error(tmp_path: Path) -> None:
    result = run_own(changing(tmp_path, UNWRAPPED), 2, *FLAGS)
    assert "needs Megatron's DistributedDataParallel around the model" in told(result)


# --- save, kill, go on -------------------------------------------------------------------------

LAYOUTS = {
    "whole": f"{TETRAJET} {FP8}",
    "sharded": f"{FP8} {SHARDED} {OVERLAPPED}",
    "in bf16": f"{TETRAJET} {BF16} {SHARDED} {OVERLAPPED}",
}


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("whole", marks=pytest.mark.outside),
        pytest.param("sharded", marks=pytest.mark.slow),
        pytest.param("in bf16", marks=pytest.mark.outside),
    ],
)
def test_a_killed_run_goes_on_bit_for_bit(layout: str, tmp_path: Path) -> None:
    flags = f"{LAYOUTS[layout]} --global-batch-size 8"  # a step has two microbatches
    killed = tmp_path / "killed"
    goes_on = f"{flags} {saving(killed)} --load {killed}"
    runs = run_in_turn(
        2,
        {
            "whole": f"{flags} {saving(tmp_path / 'whole')}",
            "killed": f"dies=step {goes_on}",
            "resumed": goes_on,
            "other": f"{flags} {saving(tmp_path / 'other')} {again(killed)} --fp4-seed 9 "
            "--fp4-load-anyway",
        },
    )
    assert runs["killed"].status != 0 and "at iteration 2" in good(runs["resumed"]).output
    last = "iter_0000004"
    assert same(tmp_path / "whole" / last, killed / last)
    assert not same(tmp_path / "whole" / last, tmp_path / "other" / last)  # negative control


OTHERS = {
    "format torch": f"--bf16 {TETRAJET} {FP8} {SHARDED} {OVERLAPPED} --ckpt-format torch",
    "format torch, whole": f"--bf16 {TETRAJET} {FP8} --ckpt-format torch",
    "fp16": f"{TETRAJET} --fp16 --initial-loss-scale 128 {FP8} {SHARDED} {OVERLAPPED}",
    "fp32": f"{TETRAJET} {FP8} {SHARDED}",
    "fp32, format torch": f"{TETRAJET} {BF16} --ckpt-format torch",
}


@pytest.mark.outside
@pytest.mark.parametrize("name", OTHERS)
def test_other_precisions_and_formats_resume(name: str, tmp_path: Path) -> None:
    """Losses of a run that was killed are those of the whole, bit for bit, after it goes on."""
    flags = f"{OTHERS[name]} --global-batch-size 8"
    killed = f"{flags} {saving(tmp_path / 'killed')} --load {tmp_path / 'killed'}"
    runs = run_in_turn(
        2,
        {
            "whole": f"{flags} {saving(tmp_path / 'whole')}",
            "killed": f"dies=step {killed}",
            "resumed": killed,
            "other": f"{killed} --ckpt-step 2 --fp4-seed 9 --fp4-load-anyway",
        },
        SMALL,
    )
    assert runs["killed"].status != 0
    whole = runs["whole"].losses
    resumed, other = (good(runs[each]).losses for each in ("resumed", "other"))
    assert len(whole) == 4 and resumed == whole[2:]
    assert len(other) == 2 and other != resumed  # negative control


@pytest.mark.slow
def test_other_numbers_of_ranks_go_on_and_back(tmp_path: Path) -> None:
    """Two ranks, then one, then two: each begins with the weights and state of the one before."""
    flags = f"{TETRAJET} {FP8} {SHARDED} {OVERLAPPED}"
    losses, whole = on_other_numbers_of_ranks(flags, tmp_path)
    assert losses[:2] == whole[:2] and losses == pytest.approx(whole, rel=2e-3)


@pytest.mark.slow
def test_a_resume_with_another_form_is_one_line(tmp_path: Path) -> None:
    flags = f"{TETRAJET} {SHARDED}"
    runs = run_in_turn(
        2,
        {
            "saves": f"{flags} {FP8} {saving(tmp_path)}",
            "otherwise": f"{flags} {BF16} {again(tmp_path)}",
            "anyway": f"{flags} {BF16} {again(tmp_path)} --fp4-load-anyway",
        },
    )
    assert "--fp4-grad-comm was FP8 (E4M3) and is BF16" in told(runs["otherwise"])
    assert "goes on from other numerics: --fp4-grad-comm was FP8" in good(runs["anyway"]).output
