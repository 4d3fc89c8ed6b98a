"""--fp4-param-gather: weights that data-parallel ranks gather as codes, in Megatron's own loop.

A run has the losses of the plain gather, to the last digit. testing/scripts/pretrain_gathering.py
compares the codes of all its gathers with those of the plain gather.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_fp4.mcore.model import attach
from megatron_fp4.mcore.model.sent_weights import SentWeights
from megatron_fp4.recipes import get_recipe
from testing.worlds.checkpoints import (
    EP2,
    MOE,
    SHARDED,
    SIZES,
    TETRAJET,
    again,
    run_in_turn,
    same,
    saving,
)
from testing.worlds.launch import MOCK_DATA, SCRIPTS, TINY, Result, result_of, spawn

HERE = Path(__file__).parent
GATHER, OWNED = "--fp4-param-gather", "--use-distributed-optimizer"
BUCKETS = "--overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 20000"
EIGHT = "--global-batch-size 8"
EMA = f"--fp4-recipe {HERE / 'ema.yaml'}"
CUT = f"--fp4-recipe {HERE / 'blocks-of-64.yaml'} {EIGHT}"
EVALUATED = "--eval-iters 1 --eval-interval 2"
AUTO = "--fp4-recipe auto --fp4-recipe-option fp8_after=0.5 --num-layers 3"
BY_PHASES = f"--fp4-recipe {HERE / 'codes-by-phases.yaml'}"
VIRTUAL = (
    "--num-layers 4 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"
)
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


@cache
def run(processes: int, flags: str, mistake: str = "", script: str = "gathering") -> Result:
    own = [mistake] if mistake else []
    words = [*own, *TINY, *MOCK_DATA, *SIZES.split(), OWNED, *flags.split()]
    return result_of(spawn(processes, SCRIPTS / f"pretrain_{script}.py", *words))


def check(processes: int, flags: str) -> Result:
    """Checks a run with the flag against the one without it; returns the former."""
    plain, found = run(processes, flags), run(processes, f"{flags} {GATHER}")
    assert (plain.status, found.status) == (0, 0), found.output[-3000:]
    assert found.losses == plain.losses and len(found.losses) == 4
    assert found.evaluations == plain.evaluations
    return found


# --- codes and losses -----------------------------------------------------------------------------

# Processes and flags.
LAYOUTS = {
    "at once": (2, TETRAJET),
    "overlapped, in buckets": (2, f"{TETRAJET} {BUCKETS}"),
    "one rank": (1, TETRAJET),
    "three ranks": (3, f"{TETRAJET} {BUCKETS} --global-batch-size 6"),
    "average": (2, EMA),
    "average, overlapped": (2, f"{EMA} {BUCKETS}"),
    "cut blocks": (4, CUT),
    "cut blocks, average": (4, f"--fp4-recipe {HERE / 'blocks-of-64-ema.yaml'} {EIGHT}"),
    "experts": (4, f"{TETRAJET} {MOE} {EP2} {BUCKETS} {EIGHT}"),
    "tensor-parallel": (4, f"{TETRAJET} {BUCKETS} --tensor-model-parallel-size 2"),
    "virtual stages": (4, f"{TETRAJET} {VIRTUAL} {BUCKETS} {EIGHT}"),
    "recomputed": (2, f"{TETRAJET} {RECOMPUTED} {BUCKETS} {EIGHT}"),
    "decoded": (2, f"{TETRAJET} --fp4-weight-cache decoded {EIGHT}"),
    "no cache": (2, f"{TETRAJET} --fp4-weight-cache off {EIGHT}"),
    "codes made again": (2, f"{TETRAJET} --fp4-weight-cache remade {EIGHT}"),
    "backward in BF16": (
        2,
        f"{TETRAJET} {BUCKETS} --fp4-bf16-after 0.5 --fp4-bf16-gemms dgrad wgrad",
    ),
    "some in BF16": (2, f"{TETRAJET} --fp4-module-recipe *.linear_fc1=bf16"),
    "ends in FP8": (
        2,
        f"--fp4-recipe auto --fp4-recipe-option fp8_after=1 --num-layers 3 {BUCKETS}",
    ),
    "FP8 at the end": (2, f"{AUTO} {BUCKETS}"),
    "FP8 at the end, at once": (2, f"{AUTO} {EVALUATED}"),
    "FP8 at the end, virtual stages": (
        4,
        f"{VIRTUAL} {BUCKETS} {EIGHT} {AUTO.replace('--num-layers 3', '')}",
    ),
    "FP8 at the end, evaluated in BF16": (
        2,
        f"{AUTO} {BUCKETS} {EVALUATED} --fp4-eval-forward bf16",
    ),
    "BF16 at the end": (2, f"{TETRAJET} {BUCKETS} --fp4-bf16-after 0.5"),
    "average, and FP8 at the end": (2, f"--fp4-recipe {HERE / 'ema-then-fp8.yaml'} {BUCKETS}"),
    "codes by phases": (2, f"{BY_PHASES} {BUCKETS}"),
    "codes by phases, at once": (2, f"{BY_PHASES} {EVALUATED}"),
    "some at other times": (2, f"{AUTO} --fp4-module-recipe *.linear_fc1=tetrajet {BUCKETS}"),
    "averages of both kinds": (
        2,
        f"{EMA} --fp4-module-recipe *.linear_fc1={HERE / 'ema-of-raw-w.yaml'} {BUCKETS}",
    ),
    "some calibrated": (
        2,
        f"{TETRAJET} --fp4-module-recipe *.linear_fc1={HERE / 'ramping.yaml'} {BUCKETS}",
    ),
    "some by another recipe": (2, f"{TETRAJET} --fp4-module-recipe *.linear_fc1=mxfp4 {BUCKETS}"),
}
QUICK = ("overlapped, in buckets", "average", "FP8 at the end")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.outside) for name in LAYOUTS],
)
def test_codes_and_losses_are_those_of_the_plain_gather(name: str) -> None:
    found = check(*LAYOUTS[name])
    assert ("blocks are cut" in found.output) == name.startswith("cut blocks")
    mixed = name.startswith("some ") and name != "some in BF16"
    mixed |= name in ("ends in FP8", "averages of both kinds") or "by phases" in name
    mixed |= "FP8 at the end" in name
    assert ("where W comes as codes, for dgrad alone" in found.output) == mixed
    if name == "overlapped, in buckets":  # 17 bytes for a block of 32; half of it leaves each rank
        elements = weights_in(found)
        codes, plain = (each * elements / 2 / 2**10 for each in (17 / 32, 2))
        says = (
            f"4.25 bits each and not 16: a rank sends {codes:.1f} KiB a step, not {plain:.1f} KiB"
        )
        assert says in found.output


@pytest.mark.outside
def test_eight_ranks_cut_blocks() -> None:
    """Shards are multiples of 16 elements, and blocks have 32."""
    found = check(8, f"{TETRAJET} {BUCKETS} --micro-batch-size 1 {EIGHT}")
    assert "blocks are cut" in found.output


@pytest.mark.slow
def test_the_precision_aware_optimizer() -> None:
    """The main weights are its own, and it rounds them. Transformer Engine's needs a GPU: this is a
    stand-in (testing/fused_adam.py), with the losses of torch's AdamW."""
    flags = f"{TETRAJET} --use-precision-aware-optimizer"
    found = run(2, f"{flags} {GATHER}", "fused-adam")
    assert found.status == 0, found.output[-3000:]
    assert found.losses == run(2, flags, "fused-adam").losses == run(2, TETRAJET).losses


@pytest.mark.slow
@pytest.mark.parametrize("flags", [AUTO, BY_PHASES])
def test_a_phase_that_reads_what_was_not_gathered_is_noticed(flags: str) -> None:
    found, plain = run(2, f"{flags} {GATHER}", "unturned"), run(2, flags)
    assert found.losses[:1] == plain.losses[:1]
    assert found.losses != plain.losses and len(plain.losses) == 4


def test_main_weights_that_are_not_rounded_first_are_noticed() -> None:
    found = run(2, f"{TETRAJET} {GATHER}", "float32")
    assert found.status != 0 and "what was gathered differs" in found.output


@pytest.mark.outside
def test_cut_blocks_that_are_completed_with_zeros_are_noticed() -> None:
    found = run(4, f"{CUT} {GATHER}", "zeros")
    assert found.status != 0 and "what was gathered differs" in found.output


@pytest.mark.outside
@pytest.mark.parametrize("other", ["", BUCKETS])
def test_embeddings_that_are_broadcast(other: str) -> None:
    flags = f"{TETRAJET} {other}"
    found = run(2, f"{flags} {GATHER}", "broadcasts")
    assert found.status == 0 and found.losses == run(2, flags).losses, found.output[-3000:]


@pytest.mark.outside
def test_tied_and_frozen_weights() -> None:
    tied = [word for word in TINY if word != "--untie-embeddings-and-output-weights"]
    words = [*tied, *MOCK_DATA, *SIZES.split(), OWNED, *TETRAJET.split(), *BUCKETS.split()]
    script = SCRIPTS / "pretrain_gathering.py"
    plain, found = (result_of(spawn(2, script, *words, *own)) for own in ([], [GATHER]))
    assert found.status == 0 and found.losses == plain.losses, found.output[-3000:]
    flags = f"{TETRAJET} {OWNED}"
    runs = run_in_turn(
        2,
        {
            "plain": f"freezes=linear_fc1 {flags}",
            "gathered": f"freezes=linear_fc1 {flags} {GATHER}",
            "all": f"{flags} {GATHER}",
        },
    )
    assert runs["gathered"].losses == runs["plain"].losses, runs["gathered"].output[-3000:]
    frozen, every = (weights_in(runs[name]) for name in ("gathered", "all"))
    assert every - frozen == 2 * 256 * 64  # the frozen weights are not gathered


def weights_in(result: Result) -> int:
    """How many weights the start table says to be gathered."""
    [found] = re.findall(r"([\d,]+) weights on a rank are gathered as codes", result.output)
    return int(found.replace(",", ""))


def test_a_rank_sends_less_of_weights_of_which_fewer_ranks_have_a_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a dense weight of 4 ranks 3/4 leave each, of an expert's of 2 ranks 1/2."""
    monkeypatch.setattr(attach.mpu, "get_data_parallel_world_size", lambda: 4)
    monkeypatch.setattr(attach.mpu, "get_expert_data_parallel_world_size", lambda: 2)
    weights, recipe = SentWeights(), get_recipe("tetrajet")
    for size, is_expert in ((64, False), (128, True)):
        weight = torch.nn.Parameter(torch.zeros(size, 64, dtype=torch.bfloat16))
        setattr(weight, "allreduce", not is_expert)  # noqa: B010  mypy knows no such attribute
        weights.add(weight, recipe)
    found = attach._gathered(SimpleNamespace(sent_weights=weights))  # type: ignore[arg-type]
    dense, experts = 64 * 64, 128 * 64
    sent = dense * 3 / 4 + experts / 2
    assert found.elements == dense + experts
    assert (found.size, found.plain) == (found.elements * 17 / 32, found.elements * 2)
    assert (found.sent, found.plain_sent) == (sent * 17 / 32, sent * 2)


@pytest.mark.outside
@pytest.mark.parametrize(
    ("recipe", "steps", "captures"), [(TETRAJET, 4, 1), (BY_PHASES, 8, 4)], ids=["one", "phases"]
)
def test_graphs_read_the_codes_at_fixed_addresses(recipe: str, steps: int, captures: int) -> None:
    """Pretended graphs: a replay reads the memory that the capture read, and quantizes no W. Each
    phase has a capture of its own."""
    flags = f"{recipe} {GATHER} {EIGHT} --seq-length 32 --max-position-embeddings 32"
    flags += f" --train-iters {steps}"
    graphs = "--cuda-graph-impl local --cuda-graph-warmup-steps 1"
    pretended = "in_pretended_graphs"
    replayed = run(2, f"{flags} {graphs}", "none", pretended)
    assert replayed.captures == captures, replayed.output[-3000:]
    layers, plain = run(2, flags, "none", pretended), run(2, flags.replace(GATHER, ""))
    assert replayed.losses == layers.losses == plain.losses and len(plain.losses) == steps


@pytest.mark.outside
def test_linears_in_cpp_read_the_codes() -> None:
    flags = f"{TETRAJET} --fp4-recipe-option backward_rounding=nearest {BUCKETS} --train-iters 8"
    plain, found = run(2, flags), run(2, f"{flags} {GATHER}", script="in_cpp")
    assert found.losses == plain.losses and len(plain.losses) == 8, found.output[-3000:]
    # Of 64: the first two of each linear, and those that hold nothing yet.
    calls = re.findall(r"forward passes in Python: (\d+)", found.output)
    assert [int(each) < 64 for each in calls] == [True, True]


# --- where the weights themselves are read --------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp4", marks=pytest.mark.outside)])
def test_evaluations(precision: str) -> None:
    flags = f"{TETRAJET} {EVALUATED} --fp4-eval-forward {precision}"
    assert len(check(2, flags).evaluations) == 4
    if precision == "bf16":
        wrong = run(2, f"{flags} {GATHER}", "stale")
        assert wrong.losses == run(2, flags).losses
        assert wrong.evaluations != run(2, flags).evaluations


@pytest.mark.outside
def test_an_overlapped_evaluation() -> None:
    for precision in ("bf16", "fp4"):
        check(2, f"{TETRAJET} {BUCKETS} {EVALUATED} --fp4-eval-forward {precision}")


@pytest.mark.outside
def test_hashes_of_weights() -> None:
    flags = f"{TETRAJET} --check-weight-hash-across-dp-replicas-interval 2"
    check(2, flags)
    wrong = run(2, f"{flags} {GATHER}", "stale")
    assert wrong.status != 0 and "hashes not matching" in wrong.output


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(TETRAJET, marks=pytest.mark.slow),
        *(
            pytest.param(x, marks=pytest.mark.outside)
            for x in (
                f"{TETRAJET} {BUCKETS}",
                f"{TETRAJET} {SHARDED}",
                f"{EMA} {SHARDED}",
                f"{AUTO} {BUCKETS}",
                f"{BY_PHASES} {SHARDED}",
            )
        ),
    ],
)
def test_a_killed_run_goes_on_as_the_plain_one(other: str, tmp_path: Path) -> None:
    flags, plain, killed = (
        f"{other} {OWNED} {EIGHT}",
        tmp_path / "plain",
        tmp_path / "killed",
    )
    runs = run_in_turn(
        2,
        {
            "plain": f"{flags} {saving(plain)}",
            "killed": f"dies=step {flags} {GATHER} {saving(killed)}",
            "resumed": f"{flags} {GATHER} {again(killed)} {saving(tmp_path / 'resumed')}",
        },
    )
    assert runs["killed"].status != 0 and runs["resumed"].status == 0, runs["resumed"].output
    assert runs["killed"].losses + runs["resumed"].losses == runs["plain"].losses
    assert same(plain / "iter_0000002", killed / "iter_0000002")
    assert same(plain / "iter_0000004", tmp_path / "resumed" / "iter_0000004")


@pytest.mark.outside
def test_a_checkpoint_of_stale_weights_is_noticed(tmp_path: Path) -> None:
    good, stale = (
        run(2, f"{TETRAJET} {GATHER} {saving(tmp_path / (mistake or 'good'))}", mistake)
        for mistake in ("", "stale")
    )
    assert (good.status, stale.status) == (0, 0) and good.losses == stale.losses
    assert not same(tmp_path / "good" / "iter_0000002", tmp_path / "stale" / "iter_0000002")


@pytest.mark.outside
def test_other_numbers_of_ranks_go_on(tmp_path: Path) -> None:
    """A checkpoint of two ranks on one, with and without the flag, and back."""
    flags, two, one = f"{TETRAJET} {SHARDED}", tmp_path / "two", tmp_path / "one"
    run_in_turn(2, {"two": f"{flags} {GATHER} {saving(two)}"})
    going = f"{flags} {again(two)}"
    ones = run_in_turn(
        1,
        {
            "plain": f"{going} --save {tmp_path / 'plain'}",
            "gathered": f"{going} {GATHER} {saving(one, 1)}",
        },
    )
    assert ones["gathered"].losses == ones["plain"].losses and len(ones["plain"].losses) == 2
    back = f"{flags} --load {one} --ckpt-step 3"
    twos = run_in_turn(2, {"plain": back, "gathered": f"{back} {GATHER}"})
    assert twos["gathered"].losses == twos["plain"].losses and len(twos["plain"].losses) == 1


def test_an_evaluation_alone_gathers_nothing() -> None:
    flags = f"{TETRAJET} {GATHER} --skip-train --eval-iters 1"
    found, plain = run(2, flags), run(2, flags.replace(GATHER, ""))
    assert found.status == 0 and found.evaluations == plain.evaluations, found.output[-3000:]
    assert "no weights are gathered under --skip-train" in found.output
