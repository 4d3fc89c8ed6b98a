"""Known mistakes in the averages of weights, each of which a check of a training must show."""

from __future__ import annotations

import functools
import shlex
from pathlib import Path

import pytest
import torch

from testing.scripts.pretrain_with_wrong_averages import MISTAKES
from testing.worlds.checkpoint_contents import averages, is_blended
from testing.worlds.checkpoints import SHARDED, saving
from testing.worlds.conversions import LLAMA
from testing.worlds.launch import SCRIPTS, Result, result_of, spawn

pytestmark = pytest.mark.outside

SCRIPT = SCRIPTS / "pretrain_with_wrong_averages.py"
BETA = 0.75
EMA = (
    "--fp4-recipe tetrajet-ema --fp4-recipe-option ema_beta=0.75 --fp4-recipe-option ema_delay=0 "
    "--clip-grad 0 --lr 1e-2"
)
# The loss scale doubles after every step until gradients overflow, and that step is skipped.
SKIPPING = "--fp16 --initial-loss-scale 524288 --loss-scale-window 1 --hysteresis 1 --train-iters 6"


def launch(mistake: str, flags: str, processes: int = 1) -> Result:
    words = shlex.split(f"{LLAMA} {EMA} {flags}")
    result = result_of(spawn(processes, SCRIPT, mistake, *words))
    assert result.status == 0, result.output[-4000:]
    return result


def step(folder: Path, number: int) -> Path:
    return folder / f"iter_{number:07d}"


def blends_the_main_weights(mistake: str, folder: Path) -> bool:
    """Whether each step's averages are the formula's, to the bit."""
    launch(mistake, f"--bf16 {saving(folder, 1)}")
    return all(is_blended(step(folder, n), step(folder, n + 1), BETA) for n in (1, 2, 3))


def leaves_skipped_steps(mistake: str, folder: Path) -> bool:
    """Whether the averages do not change in a step that is skipped."""
    output = launch(mistake, f"{SKIPPING} {saving(folder, 1)}").output
    counts = [int(line.split("skipped iterations:")[1].split("|")[0])
              for line in output.splitlines() if "skipped iterations:" in line]  # fmt: skip
    skipped = [n for n in range(2, 7) if counts[n - 1] and averages(step(folder, n - 1))]
    assert skipped and len(counts) == 6
    pairs = [(averages(step(folder, n - 1)), averages(step(folder, n))) for n in skipped]
    return all(torch.equal(was[key], now[key]) for was, now in pairs for key in was)


# Half of the parameters end within a linear's weight, so that both ranks own a part of it.
DIVIDED = "--bf16 --num-layers 3"


@functools.cache
def losses_of_one() -> list[float]:
    return launch("none", DIVIDED).losses


def repeats_one_process(mistake: str, folder: Path) -> bool:
    """Whether the losses of a sharded optimizer are those of one process."""
    return launch(mistake, f"{DIVIDED} {SHARDED}", 2).losses == losses_of_one()


CHECKS = {
    "on skipped steps": leaves_skipped_steps,
    "not read": repeats_one_process,
    "a part in another's place": repeats_one_process,
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_shows(mistake: str, tmp_path: Path) -> None:
    assert not CHECKS.get(mistake, blends_the_main_weights)(mistake, tmp_path)


@pytest.mark.parametrize(
    "check", [blends_the_main_weights, leaves_skipped_steps, repeats_one_process]
)
def test_without_a_mistake_every_check_holds(check: object, tmp_path: Path) -> None:
    assert callable(check) and check("none", tmp_path)
