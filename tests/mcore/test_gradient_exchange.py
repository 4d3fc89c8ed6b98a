"""Gradients that data-parallel ranks exchange in FP8, in Megatron's own loop.

Each run checks all of its exchanges against sums of what all ranks had; see
testing/scripts/pretrain_exchanging.py.
"""

from pathlib import Path

import pytest

from testing.worlds.checkpoints import MOE, SIZES, saving
from testing.worlds.launch import MOCK_DATA, SCRIPTS, TINY, Result, result_of, spawn

SCRIPT = SCRIPTS / "pretrain_exchanging.py"
OVERLAPPED = "--overlap-grad-reduce --ddp-bucket-size 20000"
LAYOUTS = {
    "whole": "",
    "whole, overlapped": OVERLAPPED,
    "sharded": "--use-distributed-optimizer",
    "sharded, overlapped": f"--use-distributed-optimizer {OVERLAPPED}",
    "in BF16": "--use-distributed-optimizer --grad-reduce-in-bf16",
    "accumulated": f"--use-distributed-optimizer {OVERLAPPED} --global-batch-size 16",
}
QUICK = ("whole", "sharded, overlapped")


def run(form: str, flags: str, processes: int = 2) -> Result:
    words = [form, *TINY, *MOCK_DATA, *SIZES.split(), *flags.split()]
    return result_of(spawn(processes, SCRIPT, *words, timeout_s=120))


def check(result: Result, like: Result) -> None:
    """Whether a run trained as one with upstream's collectives did, within the noise of FP8."""
    assert result.status == 0, result.output[-3000:]
    assert result.losses[0] == like.losses[0] and result.losses != like.losses
    assert result.losses == pytest.approx(like.losses, rel=1e-3)


@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in LAYOUTS],
)
def test_sums_are_those_of_all_ranks_gradients(layout: str) -> None:
    check(run("e4m3", LAYOUTS[layout]), run("none", LAYOUTS[layout]))


@pytest.mark.slow
def test_experts_and_e5m2() -> None:
    flags = f"{MOE} --use-distributed-optimizer"
    check(run("e5m2", flags), run("none", flags))


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["", "--sequence-parallel"])
def test_tensor_parallel_ranks_stay_alike(flags: str) -> None:
    """Under sequence parallelism they hold other gradients of norms, which are summed later."""
    flags = f"--tensor-model-parallel-size 2 --use-distributed-optimizer {flags}"
    check(run("e4m3", flags, 4), run("none", flags, 4))


@pytest.mark.slow
def test_bits_that_depend_on_the_tensor_parallel_rank_are_noticed() -> None:
    result = run("e4m3:apart", "--tensor-model-parallel-size 2", 4)
    assert result.status != 0 and "tensor-parallel ranks differ" in result.output


def test_all_ranks_get_the_sums_where_gradients_are_saved(tmp_path: Path) -> None:
    flags = (
        f"--use-distributed-optimizer {OVERLAPPED} {saving(tmp_path, 100)} --save-wgrads-interval 2"
    )
    saved, plain = run("e4m3", flags), run("e4m3", LAYOUTS["sharded, overlapped"])
    assert (saved.status, saved.losses) == (0, plain.losses), saved.output[-3000:]
    assert any("wgrads" in str(path) for path in tmp_path.rglob("*")), [*tmp_path.rglob("*")]


@pytest.mark.parametrize(
    ("mistake", "flags", "said"),
    [("alike", "--use-distributed-optimizer", "sums differ"), ("keeps", "", "differ")],
)
def test_a_mistake_is_noticed(mistake: str, flags: str, said: str) -> None:
    result = run(f"e4m3:{mistake}", flags)
    assert result.status != 0 and said in result.output
