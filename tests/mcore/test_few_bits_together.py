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
RECIPES = {"tetrajet": TETRAJET, "with an average": f"--fp4-recipe {HERE / 'ema.yaml'}"}


def run(flags: str, processes: int = 2) -> Result:
    """Compares what the ranks gathered with the weights (pretrain_gathering.py)."""
    words = [*TINY, *MOCK_DATA, *SMALL.split(), "--bf16", OWNED, *flags.split()]
    return result_of(spawn(processes, SCRIPTS / "pretrain_gathering.py", *words, timeout_s=120))


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(name, marks=() if name == "tetrajet" else pytest.mark.outside)
        for name in RECIPES
    ],
)
@pytest.mark.parametrize("buckets", [BUCKETS, pytest.param("", marks=pytest.mark.outside)])
def test_a_gather_changes_nothing_of_the_others(recipe: str, buckets: str) -> None:
    few = f"{RECIPES[recipe]} {buckets} {GRADIENTS} {MOMENTS}"
    plain, gathered = run(few), run(f"{few} {GATHER}")
    assert (plain.status, gathered.status) == (0, 0), gathered.output[-3000:]
    assert gathered.losses == plain.losses and len(plain.losses) == 4
    # Each of the others shows in the losses by itself.
    for flag in (GRADIENTS, MOMENTS):
        without = run(few.replace(f" {flag}", ""))
        assert without.status == 0 and without.losses != plain.losses
        assert without.losses == pytest.approx(plain.losses, rel=1e-3)


@pytest.mark.outside
@pytest.mark.parametrize("layout", [TP2_SP, f"{MOE} {EP2}"])
def test_a_gather_changes_nothing_in_other_layouts(layout: str) -> None:
    """Two data-parallel ranks of two tensor-parallel ones, and four of which two share experts."""
    few = f"{TETRAJET} {layout} {BUCKETS} {EIGHT} {GRADIENTS} {MOMENTS}"
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
@pytest.mark.parametrize("form", ["", SHARDED])
def test_a_killed_run_goes_on_bit_for_bit(form: str, tmp_path: Path) -> None:
    flags = f"{TETRAJET} {OWNED} {BUCKETS} {form} {GRADIENTS} {MOMENTS} {GATHER} {EIGHT}"
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
