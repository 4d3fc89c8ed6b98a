"""Fully reshardable checkpoints of models whose buckets of gradients have padding at their ends."""

from pathlib import Path

import pytest
import torch

from testing.worlds.checkpoint_contents import main_weights, weights
from testing.worlds.checkpoints import ENDS, SHARDED, SIZES, again, good, run_in_turn, same, saving

BUCKETS = f"{SHARDED} --overlap-grad-reduce --ddp-bucket-size 20000"  # five, three of them padded
STEPS = ("iter_0000002", "iter_0000004")


def shifted(path: Path) -> list[str]:
    """The weights of a checkpoint that are not their FP32 main weights, rounded to BF16."""
    model, mains = weights(path), main_weights(path)
    assert len(mains) > 8
    return [name for name, main in mains.items() if not torch.equal(main.bfloat16(), model[name])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders with checkpoints of a run, of one that resumed it, and of one without the mend."""
    folder = tmp_path_factory.mktemp("padded")
    whole = f"{BUCKETS} {saving(folder / 'whole')}"
    resumed = f"{BUCKETS} {again(folder / 'whole')} {saving(folder / 'resumed')}"
    without = f"without=padded_buckets {BUCKETS} {saving(folder / 'without')} --exit-interval 2"
    runs = run_in_turn(2, {"whole": whole, "resumed": resumed, "without": without}, SIZES)
    good(runs["resumed"])
    assert [result.status for result in runs.values()] == [0, 0, 0], runs["without"].output[-3000:]
    return folder


@pytest.mark.slow
def test_the_state_of_each_parameter_is_its_own(folder: Path) -> None:
    for step in STEPS:
        assert shifted(folder / "whole" / step) == []
    assert len(shifted(folder / "without" / STEPS[0])) > 2  # negative control


def test_a_resumed_run_ends_where_the_uninterrupted_one_does(folder: Path) -> None:
    whole, resumed = (folder / name / STEPS[1] for name in ("whole", "resumed"))
    assert same(whole, resumed)


def test_one_process_loads_the_same_state(folder: Path) -> None:
    alone = f"{SHARDED} {ENDS} {again(folder / 'whole')} --save {folder / 'alone'}"
    good(run_in_turn(1, {"alone": alone})["alone"])
    assert same(folder / "whole" / STEPS[0], folder / "alone" / STEPS[0])
