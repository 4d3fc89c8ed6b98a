"""A long run that is killed again and again ends where the undisturbed one does, bit for bit.

Takes about 20 minutes on two busy cores (2000 steps of about 0.2 s, twice, and 10 starts).
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from testing.worlds.checkpoint_contents import weights
from testing.worlds.checkpoints import TRACKER, same
from testing.worlds.launch import ROOT, tiny_on_mock_data

pytestmark = [
    pytest.mark.outside,
    pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a GPU"),
]

STEPS, INTERVAL = 2000, 50  # of the run, and between two of its checkpoints
KILLS = 6
STALLED_S = 300  # without a logged step
# A recipe with its options, and a state that its optimizer keeps beside each weight. A third of the
# steps that Q-Ramping takes are of calibrations.
RECIPES = {
    "tetrajet-ema": "fp4_average",
    "tetrajet-ramping --fp4-recipe-option ramping_interval=60": "fp4_ramping_sum",
}
MODEL = """
    --ffn-hidden-size 128 --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32
    --micro-batch-size 1 --global-batch-size 2 --bf16 --eval-iters 0 --lr-decay-iters 2000
    --tensor-model-parallel-size 2 --use-distributed-optimizer
"""


def start(recipe: str, folder: Path, log: Path) -> psutil.Popen:
    """Starts the run, or goes on with it: the command is the same."""
    flags = f"{MODEL} --fp4-recipe {recipe} --train-iters {STEPS}"
    saved = f"--save {folder} --load {folder} --save-interval {INTERVAL}"
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    words = tiny_on_mock_data(*f"{flags} {saved}".split())
    with log.open("w") as output:
        return psutil.Popen(
            [*torchrun, "--nproc-per-node", "4", str(ROOT / "pretrain_gpt.py"), *words],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def kill(launch: psutil.Popen) -> None:
    """Kills torchrun, its ranks and the processes that they started, by SIGKILL."""
    processes = [launch, *launch.children(recursive=True)]
    for process in processes:
        process.kill()
    psutil.wait_procs(processes, timeout=30)


def losses(log: Path) -> dict[int, str]:
    """The logged loss of each step."""
    found = re.findall(r" iteration +(\d+)/.* lm loss: (\S+)", log.read_text())
    return {int(step): loss for step, loss in found}


def moments(rng: random.Random) -> Iterator[tuple[int, float]]:
    """(step, seconds after it was logged) of each kill: in a save, anywhere, and in a start."""
    steps = [rng.randrange(INTERVAL, STEPS, INTERVAL) for _ in range(KILLS // 2)]
    steps += [rng.randrange(1, STEPS) for _ in range(KILLS - KILLS // 2)]
    for number, step in enumerate(sorted(steps)):
        yield step, rng.uniform(0, 0.5)
        if number % 4 == 1:
            yield 0, rng.uniform(0, 20)


def wait_for_step(launch: psutil.Popen, log: Path, step: int) -> None:
    """Returns when the step is logged, or the launch has ended."""
    last, since = 0, time.monotonic()
    while launch.poll() is None and last < step:
        time.sleep(0.02)
        if (now := max(losses(log), default=0)) > last:
            last, since = now, time.monotonic()
        assert time.monotonic() < since + STALLED_S, f"no step after {last}, see {log}"


def finish(launch: psutil.Popen, log: Path) -> None:
    try:
        wait_for_step(launch, log, STEPS)
        assert launch.wait(timeout=60) == 0, log.read_text()[-4000:]
    finally:
        if launch.poll() is None:
            kill(launch)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_that_is_killed_at_random_ends_as_the_undisturbed_one(
    recipe: str, tmp_path: Path
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finish(start(recipe, whole, tmp_path / "whole.log"), tmp_path / "whole.log")

    found: dict[int, str] = {}
    for number, (step, after) in enumerate(moments(random.Random(seed))):
        log = tmp_path / f"{number}.log"
        launch = start(recipe, killed, log)
        wait_for_step(launch, log, step)
        time.sleep(after)
        assert launch.poll() is None, log.read_text()[-4000:]
        kill(launch)
        found |= losses(log)
        saved = killed / TRACKER
        print(f"killed at step {max(losses(log), default=0)}, {after:.2f} s after step {step}, "
              f"saved {saved.read_text() if saved.exists() else 'none'}")  # fmt: skip
    finish(start(recipe, killed, tmp_path / "last.log"), tmp_path / "last.log")

    wanted = losses(tmp_path / "whole.log")
    assert (
        list(wanted) == list(range(1, STEPS + 1))
        and found | losses(tmp_path / "last.log") == wanted
    )
    ends = [folder / f"iter_{STEPS:07d}" for folder in (whole, killed)]
    assert same(*ends) and any(RECIPES[recipe] in name for name in weights(ends[0]))
    assert not same(whole / f"iter_{STEPS - INTERVAL:07d}", ends[0])  # the control
