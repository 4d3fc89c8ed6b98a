"""A run of examples/launch.sh that is told to end saves, and goes on when it is started again."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch

from testing.examples import LAUNCH, SLOWLY, SMALL, losses, settings
from testing.worlds.checkpoints import TRACKER, same
from testing.worlds.nodes import wait_for

pytestmark = [
    pytest.mark.outside,
    pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a GPU"),
]
STEPS = 24

# Stands in for a training script whose save takes longer than torchrun waits for its ranks.
_SAVES = """
import os, pathlib, signal, sys, time
folder = pathlib.Path(os.environ["RUN_DIR"])
def save(*_):
    time.sleep(33)
    (folder / "saved").touch()
    sys.exit()
signal.signal(signal.SIGTERM, save)
(folder / "started").touch()
while True:
    time.sleep(0.1)
"""


@contextmanager
def running(log: Path, *command: str | Path, **variables: str) -> Iterator[psutil.Process]:
    """A process and its output in `log`; with all of its descendants it ends with the context."""
    with log.open("ab") as output:
        started = psutil.Popen(
            command, env=os.environ | variables, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        yield started
    finally:
        if started.poll() is None:
            for process in [*started.children(recursive=True), started]:
                process.kill()
            started.wait()


def test_a_save_may_take_longer_than_torchrun_waits_for_its_ranks(tmp_path: Path) -> None:
    """The control is torchrun alone, which gets the signal itself."""
    script = tmp_path / "saves.py"
    script.write_text(_SAVES)
    (ours := tmp_path / "ours").mkdir()
    (control := tmp_path / "control").mkdir()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", str(script)]
    own = settings(ours, PRETRAIN=script)
    with (
        running(ours / "log", LAUNCH, "gpt_345m", **own) as launch,
        running(control / "log", *torchrun, **settings(control)) as alone,
    ):
        for folder in (ours, control):
            wait_for((folder / "started").exists, 60, f"a rank to start, see {folder}/log")
        launch.send_signal(signal.SIGTERM)  # as Kubernetes does, to the first process only
        alone.send_signal(signal.SIGTERM)
        assert launch.wait(timeout=90) == 143 and alone.wait(timeout=90) == 1
    assert (ours / "saved").exists() and not (control / "saved").exists()
    assert "forcefully exiting" in (control / "log").read_text()


def test_a_run_that_got_sigterm_in_all_processes_repeats_the_one_that_got_none(
    tmp_path: Path,
) -> None:
    """As Slurm signals the job that it preempts. The run has saved before, and so has the helper
    process that later saves need; the control is a run in which the helper gets the signal too."""
    alone, ended, control = (tmp_path / name for name in ("alone", "ended", "control"))
    assert train(alone) == 0
    assert train(ended, after=4, SLOW_STEP="0.2") == 143
    saved = int((ended / "checkpoints" / TRACKER).read_text())
    assert 4 < saved < STEPS and f"saved at step {saved} of {STEPS}" in (ended / "log").read_text()
    assert train(ended) == 0
    assert losses(ended / "log") == losses(alone / "log") and len(losses(alone / "log")) == STEPS
    last = f"checkpoints/iter_{STEPS:07d}"
    assert same(ended / last, alone / last)

    assert train(control, after=4, SLOW_STEP="0.2", UNKEPT="1") == 1
    assert (control / "checkpoints" / TRACKER).read_text() == "4"


def train(run: Path, after: int | None = None, **variables: str) -> int:
    """Trains on two ranks; returns the status of examples/launch.sh. Its log is run/log.

    after: once this step is saved, every process gets SIGTERM.
    """
    run.mkdir(exist_ok=True)
    own = settings(run, TRAIN_ITERS=STEPS, SAVE_INTERVAL=4, GPUS_PER_NODE=2, PRETRAIN=SLOWLY)
    with running(run / "log", LAUNCH, "gpt_345m", *SMALL, **own, **variables) as launch:
        if after is not None:
            tracker = run / "checkpoints" / TRACKER
            named = lambda: tracker.exists() and tracker.read_text() == str(after)  # noqa: E731
            wait_for(named, 120, f"step {after} to be saved, see {run}/log")
            for process in [launch, *launch.children(recursive=True)]:
                process.send_signal(signal.SIGTERM)
        return int(launch.wait(timeout=180))
