"""Gradients that data-parallel ranks exchange in few bits, in Megatron's own loop.

Each run checks all of its exchanges against sums of what all ranks had, and the norm by which
gradients are clipped; see testing/scripts/pretrain_exchanging.py.
"""

import re
from pathlib import Path

import pytest

from testing.worlds.checkpoints import MOE, SMALL, saving
from testing.worlds.launch import MOCK_DATA, SCRIPTS, TINY, Result, result_of, spawn

SCRIPT = SCRIPTS / "pretrain_exchanging.py"
FP8, BF16 = "--fp4-grad-comm fp8", "--fp4-grad-comm bf16"
SHARDED = "--use-distributed-optimizer"
OVERLAPPED = "--overlap-grad-reduce --ddp-bucket-size 20000"
PIECES = "bytes=9000"  # so few that a bucket is sent in several pieces
LAYOUTS = {
    "whole": "",
    "whole, overlapped": OVERLAPPED,
    "sharded": SHARDED,
    "sharded, overlapped": f"{SHARDED} {OVERLAPPED}",
    "in BF16": f"{SHARDED} --grad-reduce-in-bf16",
    "accumulated": f"{SHARDED} {OVERLAPPED} --global-batch-size 16",
    "accumulated apart": f"{SHARDED} {OVERLAPPED} --grad-reduce-in-bf16 --global-batch-size 16 "
    "--ddp-param-name-patterns-for-fp32-local-accumulation *linear_fc1*",
    "with a recipe": f"{SHARDED} {OVERLAPPED} --fp4-recipe tetrajet",
}
QUICK = ("whole", "sharded, overlapped")


def run(
    flags: str, words: str = "", processes: int = 2, dtype: str = "--bf16", fresh: bool = False
) -> Result:
    """words: of the script. fresh: see `spawn`."""
    given = [*words.split(), *TINY, *MOCK_DATA, *SMALL.split(), *dtype.split(), *flags.split()]
    return result_of(spawn(processes, SCRIPT, *given, fresh=fresh))


def check(result: Result, like: Result, shows: bool = True) -> None:
    """Whether a run trained as one with upstream's collectives did, within the noise of rounding.

    shows: whether the losses must differ, as the noise of FP8 shows in the digits of the log.
    """
    assert result.status == 0, result.output[-3000:]
    assert result.losses[0] == like.losses[0] and (result.losses != like.losses or not shows)
    assert result.losses == pytest.approx(like.losses, rel=1e-3)


def outside_but_for(quick: tuple[str, ...]) -> list[object]:
    return [pytest.param(x, marks=() if x in quick else pytest.mark.outside) for x in LAYOUTS]


@pytest.mark.parametrize("layout", outside_but_for(QUICK))
def test_sums_are_those_of_all_ranks_gradients(layout: str) -> None:
    check(run(f"{FP8} {LAYOUTS[layout]}"), run(LAYOUTS[layout]))


@pytest.mark.parametrize("layout", outside_but_for(("whole",)))
def test_gradients_in_bf16(layout: str) -> None:
    check(run(f"{BF16} {LAYOUTS[layout]}"), run(LAYOUTS[layout]), shows=False)


@pytest.mark.slow
def test_eight_ranks() -> None:
    """Their shards are multiples of 16 elements, not of the 128 of a block."""
    flags = f"{SHARDED} {OVERLAPPED} --micro-batch-size 1 --global-batch-size 8"
    check(run(f"{FP8} {flags}", processes=8), run(flags, processes=8))


# A norm of 34 elements has shards of 5 on seven ranks, and none on the eighth.
NARROW = "--hidden-size 34 --num-attention-heads 1 --num-query-groups 1 --ddp-bucket-size 1"


@pytest.mark.outside
@pytest.mark.parametrize("words", ["", PIECES])
@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (3, OVERLAPPED),
        (8, "--overlap-grad-reduce --hidden-size 56 --ddp-bucket-size 1"),
        (8, f"--overlap-grad-reduce {NARROW}"),
    ],
)
def test_uneven_and_empty_shards(ranks: int, flags: str, words: str) -> None:
    """Without the distributed optimizer, which pads its buckets."""
    flags = f"{flags} --micro-batch-size 1 --global-batch-size {ranks}"
    check(run(f"{FP8} {flags}", words, ranks), run(flags, processes=ranks))


@pytest.mark.slow
@pytest.mark.parametrize("form", [FP8, pytest.param(BF16, marks=pytest.mark.outside)])
@pytest.mark.parametrize("sharded", ["", SHARDED])
def test_pieces_change_no_bit(form: str, sharded: str) -> None:
    """However many a bucket has. The buffers that they go through are then smaller."""
    flags = f"{form} {sharded} {OVERLAPPED}"
    whole, cut = run(flags), run(flags, PIECES)
    assert (whole.status, cut.status) == (0, 0), cut.output[-3000:]
    assert cut.losses == whole.losses
    assert held(cut) < 45 < held(whole)


@pytest.mark.parametrize(
    "sharded",
    [
        pytest.param("", marks=pytest.mark.outside),
        pytest.param(f"{SHARDED} --grad-reduce-in-bf16", marks=pytest.mark.slow),
    ],
)
def test_kernels_change_no_bit(sharded: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter. The run compares all sums with the reference's, too."""
    flags = f"{FP8} {sharded} --train-iters 2 --fp4-fused-kernels off"
    plain = run(flags)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    by_kernels = run(flags, f"kernels {PIECES}", fresh=True)
    assert (plain.status, by_kernels.status) == (0, 0), by_kernels.output[-3000:]
    assert by_kernels.losses == plain.losses


@pytest.mark.outside
def test_buffers_do_not_grow_with_the_model() -> None:
    small, large = (run(f"{FP8} --num-layers {layers}", PIECES) for layers in (2, 4))
    assert small.status == large.status == 0 and held(small) == pytest.approx(held(large), rel=0.05)


def held(result: Result) -> float:
    """KiB of the buffers that gradients go through, from the start table."""
    found = re.search(r"send gradients in .* through buffers of ([\d.,]+) KiB", result.output)
    assert found is not None, result.output[-3000:]
    return float(found[1].replace(",", ""))


COMBINATIONS = {
    "FP32": ("", SHARDED),
    "FP16": ("--fp16", f"{SHARDED} --initial-loss-scale 128"),
    "SGD": ("--bf16", "--optimizer sgd"),
    "both overlapped": ("--bf16", f"{SHARDED} {OVERLAPPED} --overlap-param-gather"),
    "recomputed": (
        "--bf16",
        f"{SHARDED} --fp4-recipe tetrajet --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1",
    ),
    "Q-EMA": ("--bf16", f"{SHARDED} --fp4-recipe tests/mcore/ema.yaml"),
    "Q-Ramping": (
        "--bf16",
        f"{SHARDED} {OVERLAPPED} --train-iters 6 --fp4-recipe tests/mcore/ramping.yaml",
    ),
    "no clipping": ("--bf16", f"{SHARDED} --clip-grad 0"),
    "a mean of tokens": ("--bf16", f"{SHARDED} --calculate-per-token-loss"),
}


@pytest.mark.outside
@pytest.mark.parametrize("name", COMBINATIONS)
def test_other_launches(name: str) -> None:
    dtype, flags = COMBINATIONS[name]
    check(run(f"{FP8} {flags}", dtype=dtype), run(flags, dtype=dtype))


@pytest.mark.slow
@pytest.mark.parametrize("form", [FP8, pytest.param(BF16, marks=pytest.mark.outside)])
def test_the_precision_aware_optimizer(form: str) -> None:
    """It reads the sums where they are stored. Here it is a stand-in (testing/fused_adam.py), with
    the losses of torch's AdamW. Negative control: the norm is taken before the sum."""
    flags = f"{form} {SHARDED}"
    aware = f"{flags} --use-precision-aware-optimizer"
    found = run(aware, "fused-adam")
    assert found.status == 0 and found.losses == run(flags).losses, found.output[-3000:]
    wrong = run(aware, "fused-adam norm")
    assert wrong.status != 0 and "the norm is" in wrong.output


@pytest.mark.outside
@pytest.mark.parametrize("form", [f"{FP8} --fp4-grad-comm-element e5m2", BF16])
def test_experts(form: str) -> None:
    check(run(f"{form} {MOE} {SHARDED}"), run(f"{MOE} {SHARDED}"), shows=form != BF16)


@pytest.mark.outside
def test_experts_of_other_ranks() -> None:
    """Experts have two data-parallel ranks, the rest has four."""
    flags = f"{MOE} --expert-model-parallel-size 2 --global-batch-size 8 {SHARDED} {OVERLAPPED}"
    check(run(f"{FP8} {flags}", processes=4), run(flags, processes=4))


QK_NORMS = "--qk-layernorm"
COPIED_EMBEDDING = "--pipeline-model-parallel-size 2 --mtp-num-layers 1"
VIRTUAL = "--num-layers 4 --num-virtual-stages-per-pipeline-rank 2"
WITH_THE_STEP = (
    "--overlap-param-gather --overlap-param-gather-with-optimizer-step --ckpt-format torch"
)
MOMENTS = "--fp4-recipe tetrajet --fp4-optimizer-state m=fp8,v=fp16"


@pytest.mark.outside
@pytest.mark.parametrize("schedule", ["", VIRTUAL, f"{VIRTUAL} {WITH_THE_STEP} {MOMENTS}"])
def test_pipeline_stages(schedule: str) -> None:
    flags = f"--pipeline-model-parallel-size 2 {SHARDED} --overlap-grad-reduce {schedule}"
    flags += " --global-batch-size 8"
    check(run(f"{FP8} {flags}", processes=4), run(flags, processes=4))


@pytest.mark.outside
@pytest.mark.parametrize("flags", ["", "--sequence-parallel", QK_NORMS])
def test_tensor_parallel_ranks_stay_alike(flags: str) -> None:
    """Under sequence parallelism they hold other gradients of norms, which are summed later. With
    norms of query and key they hold other gradients of these, of their own heads."""
    flags = f"--tensor-model-parallel-size 2 {SHARDED} {flags}"
    check(run(f"{FP8} {flags}", processes=4), run(flags, processes=4))


@pytest.mark.outside
def test_bits_that_depend_on_the_tensor_parallel_rank_are_noticed() -> None:
    result = run(f"{FP8} --tensor-model-parallel-size 2", "apart", 4)
    assert result.status != 0 and "tensor-parallel ranks differ" in result.output


@pytest.mark.outside
def test_pipeline_stages_with_copies_of_the_embedding() -> None:
    """They hold other gradients of it, which are summed later."""
    flags = f"{COPIED_EMBEDDING} {SHARDED} --overlap-grad-reduce"
    check(run(f"{FP8} {flags}", processes=4), run(flags, processes=4))


@pytest.mark.outside
@pytest.mark.parametrize(
    ("flags", "ranks"),
    [
        ("--tensor-model-parallel-size 2 --sequence-parallel", "tensor-parallel ranks"),
        (f"--tensor-model-parallel-size 2 {QK_NORMS}", "tensor-parallel ranks"),
        (COPIED_EMBEDDING, "pipeline stages"),
    ],
)
def test_noise_of_gradients_that_are_summed_later_is_not_shared(flags: str, ranks: str) -> None:
    result = run(f"{FP8} {flags}", "shared", 4)
    assert result.status != 0 and f"{ranks} share noise" in result.output


@pytest.mark.outside
@pytest.mark.parametrize("form", [FP8, BF16])
def test_copies_to_the_host_change_nothing(form: str) -> None:
    """By which several ranks of one GPU exchange gradients over gloo, in tests."""
    flags = [*TINY, *MOCK_DATA, *SMALL.split(), "--bf16", *f"{form} {OVERLAPPED}".split()]
    script = SCRIPTS / "pretrain_with_digests.py"
    copied = result_of(spawn(2, script, "none", *flags, "--distributed-backend", "gloo"))
    assert copied.status == 0 and copied.losses == run(f"{form} {OVERLAPPED}").losses


# --- gradients that are saved ------------------------------------------------------------------


@pytest.mark.parametrize(
    "other",
    [
        "",
        *(
            pytest.param(flags, marks=pytest.mark.outside)
            for flags in (
                "--pipeline-model-parallel-size 2",
                f"{MOE} --expert-model-parallel-size 2 --global-batch-size 8",
                "--grad-reduce-in-bf16 --ddp-param-name-patterns-for-fp32-local-accumulation "
                "*linear_fc1*",
            )
        ),
    ],
)
def test_all_ranks_get_the_sums_where_gradients_are_saved(other: str, tmp_path: Path) -> None:
    """Under pipeline parallelism the schedule starts the exchange. Experts have groups of their
    own, and what is accumulated in FP32 is in buffers of its own."""
    flags = f"{FP8} {SHARDED} {OVERLAPPED} {other}"
    processes = 4 if "parallel-size" in other else 2
    saved = run(f"{flags} {saving(tmp_path, 100)} --save-wgrads-interval 2", processes=processes)
    plain = run(flags, processes=processes)
    assert (saved.status, saved.losses) == (0, plain.losses), saved.output[-3000:]
    assert any("wgrads" in str(path) for path in tmp_path.rglob("*")), [*tmp_path.rglob("*")]


def test_gradients_that_are_not_gathered_are_noticed(tmp_path: Path) -> None:
    flags = f"{FP8} {SHARDED} {saving(tmp_path, 100)} --save-wgrads-interval 2"
    result = run(flags, "ungathered")
    assert result.status != 0 and "not gathered" in result.output


# --- what is not finite, CUDA graphs -----------------------------------------------------------


@pytest.mark.parametrize("form", [FP8, pytest.param(BF16, marks=pytest.mark.outside)])
@pytest.mark.parametrize("sharded", ["", SHARDED])
def test_what_overflows_on_one_rank_is_found_on_all(form: str, sharded: str) -> None:
    """FP16 then skips the step. Negative control: what is not finite is replaced before it is
    encoded."""
    flags = f"{form} {sharded} --initial-loss-scale 128"
    result = run(flags, "overflows", dtype="--fp16")
    assert result.status == 0, result.output[-3000:]
    assert skipped(result) == [0, 1, 0, 0]
    hidden = run(flags, "overflows finite", dtype="--fp16")
    assert hidden.status != 0 and "sums differ" in hidden.output


@pytest.mark.parametrize("sharded", [SHARDED, pytest.param("", marks=pytest.mark.outside)])
def test_what_overflows_under_bf16_ends_the_run_or_is_in_the_norm(sharded: str) -> None:
    """Megatron checks the gradients of each rank before they are sent, unless it is told not to."""
    checked = run(f"{FP8} {sharded}", "overflows", dtype="--bf16")
    assert checked.status != 0 and "found Inf in local grad norm" in checked.output
    unchecked = run(f"{FP8} {sharded} --no-check-for-nan-in-loss-and-grad", "overflows")
    assert unchecked.status == 0, unchecked.output[-3000:]
    norms = re.findall(r"grad norm: +(\S+)", unchecked.output)
    assert norms[0] != "nan" and norms[1:] == ["nan"] * 3  # of the second step, and then of weights


def skipped(result: Result) -> list[int]:
    found = re.findall(r"number of skipped iterations: +(\d+)", result.output)
    return [int(number) for number in found]


@pytest.mark.parametrize("mistake", ["", "unwaited"])
def test_graphs_are_waited_for(mistake: str) -> None:
    result = run(f"{FP8} {SHARDED} {OVERLAPPED}", f"{mistake} replays")
    assert (result.status != 0 and "sums differ" in result.output) == bool(mistake), result.output[
        -3000:
    ]


# --- the order of events -----------------------------------------------------------------------


@pytest.mark.parametrize("sharded", ["", pytest.param(SHARDED, marks=pytest.mark.outside)])
def test_a_bucket_travels_while_others_are_computed(sharded: str) -> None:
    """Negative control: each is waited for at once. No more than two pieces travel at a time."""
    flags = f"{FP8} {sharded} {OVERLAPPED}"
    result, at_once = run(flags, "events"), run(flags, "events at-once")
    assert (result.status, at_once.losses) == (0, result.losses), at_once.output[-3000:]
    assert most_in_flight(result) == 2 and most_in_flight(at_once) == 1
    assert overlapped(result) >= 3 and overlapped(at_once) == 0


def events(result: Result) -> list[str]:
    """What happens on rank 0 in the last step: a gradient is ready, a piece is sent or arrives."""
    return re.findall(r"^event: (\w+)", result.output.split("event: step")[-2], re.MULTILINE)


def most_in_flight(result: Result) -> int:
    most = now = 0
    for event in events(result):
        now += {"sent": 1, "arrived": -1}.get(event, 0)
        most = max(most, now)
    return most


def overlapped(result: Result) -> int:
    """The pieces between whose sending and arrival gradients become ready."""
    found, ready = 0, 0
    sent: list[int] = []
    for event in events(result):
        if event == "ready":
            ready += 1
        elif event == "sent":
            sent.append(ready)
        else:
            found += sent.pop(0) < ready
    return found


# --- mistakes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mistake", "flags", "said"),
    [
        ("alike", SHARDED, "sums differ"),
        ("scales", SHARDED, "sums differ"),
        (f"shifted {PIECES}", SHARDED, "sums differ"),
        ("twice", SHARDED, "sums differ"),
        ("early", SHARDED, "sums differ"),
        ("keeps", "", "differ"),
        ("norm", SHARDED, "the norm is"),
        ("norm", "", "the norm is"),
    ],
)
def test_a_mistake_is_noticed(mistake: str, flags: str, said: str) -> None:
    result = run(f"{FP8} {flags}", mistake)
    assert result.status != 0 and said in result.output, result.output[-3000:]
