"""Gradients, weights and Adam's moments in few bits, all in one launch."""

from pathlib import Path

import pytest

from testing.worlds.checkpoints import (
    EP2,
    MOE,
    SHARDED,
    SMALL,
    TETRAJET,
    TP2_SP,
    again,
    on_other_numbers_of_ranks,
    run_in_turn,
    same,
    saving,
)
from testing.worlds.launch import MOCK_DATA, SCRIPTS, TINY, Result, result_of, spawn

HERE = Path(__file__).parent
GRADIENTS, MOMENTS = "--fp4-grad-comm fp8", "--fp4-optimizer-state m=fp8,v=fp16"
GATHER, OWNED = "--fp4-param-gather", "--use-distributed-optimizer"
EIGHT = "--global-batch-size 8"  # so that a rank that dies in its sixth pass is in the third step
BUCKETS = "--overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 20000"
DGE_OCC = "--fp4-recipe dge-occ"  # of a paper with gradients and moments in few bits, too
RECIPES = {"tetrajet": TETRAJET, "with an average": f"--fp4-recipe {HERE / 'ema.yaml'}"}


def run(flags: str, processes: int = 2, script: str = "pretrain_gathering.py") -> Result:
    """The script compares what the ranks gathered with the weights."""
    words = [*TINY, *MOCK_DATA, *SMALL.split(), "--bf16", *flags.split()]
    return result_of(spawn(processes, SCRIPTS / script, *words))


def check_each_shows(plain: Result, few: str, script: str = "pretrain_gathering.py") -> None:
    """Gradients and moments in few bits show in the losses, each by itself.

    few: the flags of `plain`, which has both.
    """
    for flag in (GRADIENTS, MOMENTS):
        without = run(few.replace(f" {flag}", ""), script=script)
        assert without.status == 0 and without.losses != plain.losses
        assert without.losses == pytest.approx(plain.losses, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(name, marks=() if name == "tetrajet" else pytest.mark.outside)
        for name in RECIPES
    ],
)
@pytest.mark.parametrize("buckets", [BUCKETS, pytest.param("", marks=pytest.mark.outside)])
def test_a_gather_changes_nothing_of_the_others(recipe: str, buckets: str) -> None:
    few = f"{RECIPES[recipe]} {OWNED} {buckets} {GRADIENTS} {MOMENTS}"
    plain, gathered = run(few), run(f"{few} {GATHER}")
    assert (plain.status, gathered.status) == (0, 0), gathered.output[-3000:]
    assert gathered.losses == plain.losses and len(plain.losses) == 4
    check_each_shows(plain, few)


@pytest.mark.parametrize(
    "layout",
    [f"{OWNED} {BUCKETS}", *(pytest.param(x, marks=pytest.mark.outside) for x in ("", OWNED))],
)
def test_the_set_of_arxiv_2501_17116(layout: str) -> None:
    """Each exchange is compared with the sum of what all ranks had (pretrain_exchanging.py)."""
    few = f"{DGE_OCC} {layout} {GRADIENTS} {MOMENTS}"
    plain = run(few, script="pretrain_exchanging.py")
    assert plain.status == 0 and len(plain.losses) == 4, plain.output[-3000:]
    check_each_shows(plain, few, "pretrain_exchanging.py")


@pytest.mark.outside
@pytest.mark.parametrize("layout", [TP2_SP, f"{MOE} {EP2}"])
def test_a_gather_changes_nothing_in_other_layouts(layout: str) -> None:
    """Two data-parallel ranks of two tensor-parallel ones, and four of which two share experts."""
    few = f"{TETRAJET} {layout} {OWNED} {BUCKETS} {EIGHT} {GRADIENTS} {MOMENTS}"
    plain, gathered = run(few, 4), run(f"{few} {GATHER}", 4)
    assert (plain.status, gathered.status) == (0, 0), gathered.output[-3000:]
    assert gathered.losses == plain.losses and len(plain.losses) == 4


@pytest.mark.outside
def test_other_numbers_of_ranks_go_on(tmp_path: Path) -> None:
    """DP 2 to 1 and back, near the losses of the run that stays on two ranks."""
    flags = f"{TETRAJET} {OWNED} {EIGHT} {GRADIENTS} {MOMENTS} {GATHER}"
    losses, whole = on_other_numbers_of_ranks(flags, tmp_path)
    assert losses[:2] == whole[:2] and len(whole) == 6
    assert losses == pytest.approx(whole, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "own",
    [
        f"{TETRAJET} {OWNED} {GATHER}",
        f"{TETRAJET} {SHARDED} {GATHER}",
        f"{DGE_OCC} {SHARDED}",
    ],
)
def test_a_killed_run_goes_on_bit_for_bit(own: str, tmp_path: Path) -> None:
    flags = f"{own} {BUCKETS} {GRADIENTS} {MOMENTS} {EIGHT}"
    whole, killed, resumed = (tmp_path / name for name in ("whole", "killed", "resumed"))
    runs = run_in_turn(
        2,
        {
            "whole": f"{flags} {saving(whole)}",
            "killed": f"dies=step {flags} {saving(killed)}",
            "resumed": f"{flags} {again(killed)} {saving(resumed)}",
        },
    )
    assert runs["killed"].status != 0 and runs["resumed"].status == 0, runs["resumed"].output
    assert runs["killed"].losses + runs["resumed"].losses == runs["whole"].losses
    assert same(whole / "iter_0000004", resumed / "iter_0000004")
