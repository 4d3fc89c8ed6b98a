"""The sbatch scripts in a Slurm cluster of two nodes, each with a network of its own."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from testing.examples import SLOWLY, SMALL, losses, settings
from testing.worlds import slurm
from testing.worlds.checkpoints import TRACKER, same
from testing.worlds.launch import ROOT
from testing.worlds.nodes import wait_for
from testing.worlds.slurm import Cluster

pytestmark = [
    pytest.mark.outside,
    pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a GPU"),
]
STEPS = 100
SCRIPT = ROOT / "examples" / "slurm" / "gpt_345m.sbatch"
# A save that takes longer than the 30 seconds for which torchrun waits when it is signalled itself.
SLOW_SAVE = "35"

# Stands in for a training script: it runs until it gets SIGTERM, or fails at once.
_WAITS = """
import os, pathlib, signal, sys, time
if "FAILS" in os.environ:
    sys.exit(1)
signal.signal(signal.SIGTERM, lambda *_: sys.exit())
(pathlib.Path(os.environ["RUN_DIR"]) / "started").touch()
while True:
    time.sleep(0.1)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    reason = slurm.missing()
    if reason is not None:
        pytest.skip(reason)
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # a short path, for munge's socket
    folder.chmod(0o755)
    with slurm.cluster(folder) as made:
        yield made
    shutil.rmtree(folder)


def submit(cluster: Cluster, run: Path, *options: str, **variables: object) -> str:
    """The number of a job of SCRIPT on two nodes, with one rank on each. Its log is run/log."""
    run.mkdir()
    own = settings(run, GPUS_PER_NODE=1, TRAIN_ITERS=STEPS, **variables)
    exported = ",".join(["ALL", *(f"{name}={value}" for name, value in own.items())])
    chosen = ["--nodes=2", f"--export={exported}", f"--output={run}/log", *options]
    return cluster.submit(*chosen, SCRIPT, *SMALL)


def ended(cluster: Cluster, number: str, timeout_s: float) -> dict[str, str]:
    """Waits for the end of a job; returns what Slurm says of it."""
    final = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
    state = lambda: cluster.job(number)["JobState"]  # noqa: E731
    wait_for(lambda: state() in final, timeout_s, f"the end of job {number}")
    return cluster.job(number)


def restarted(cluster: Cluster, number: str, timeout_s: float) -> None:
    wait_for(
        lambda: cluster.job(number)["Restarts"] == "1", timeout_s, f"job {number} to be requeued"
    )


@pytest.fixture(scope="module")
def alone(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing has interrupted."""
    run = tmp_path_factory.mktemp("slurm") / "alone"
    job = ended(cluster, submit(cluster, run, "--time=30", PRETRAIN=SLOWLY), 300)
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "0"), (run / "log").read_text()
    return run


def at_the_time_limit(cluster: Cluster, number: str, run: Path) -> None:
    """Lets the time limit come, and gives the job a longer one when it has been requeued."""
    restarted(cluster, number, 240)
    cluster.run("scontrol", "update", f"JobId={number}", "TimeLimit=30")


def preempted(cluster: Cluster, number: str, run: Path) -> None:
    """Sends SIGTERM to the processes of the job, as Slurm does when it preempts with GraceTime."""
    tracker = run / "checkpoints" / TRACKER
    wait_for(lambda: tracker.exists() and tracker.read_text() == "10", 240, "a checkpoint")
    cluster.run("scancel", "--signal=TERM", number)
    restarted(cluster, number, 240)


@pytest.mark.parametrize(
    ("interrupt", "options", "variables"),
    [
        (at_the_time_limit, ["--time=2", "--signal=B:USR1@60"], {"SLOW_SAVE": SLOW_SAVE}),
        (preempted, ["--time=30"], {"SAVE_INTERVAL": 10}),
    ],
)
def test_an_interrupted_job_saves_goes_on_by_itself_and_repeats_the_other(
    cluster: Cluster,
    alone: Path,
    tmp_path: Path,
    interrupt: Callable[[Cluster, str, Path], None],
    options: list[str],
    variables: dict[str, object],
) -> None:
    run = tmp_path / "run"
    number = submit(cluster, run, *options, PRETRAIN=SLOWLY, SLOW_STEP=0.5, **variables)
    interrupt(cluster, number, run)
    job = ended(cluster, number, 300)
    log = (run / "log").read_text()
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "1"), log
    assert "start it again to go on" in log and "successfully loaded checkpoint" in log
    assert losses(run / "log") == losses(alone / "log") and len(losses(run / "log")) == STEPS
    last = f"checkpoints/iter_{STEPS:07d}"
    assert same(run / last, alone / last)


def test_a_job_that_its_user_cancels_is_not_requeued(cluster: Cluster, tmp_path: Path) -> None:
    run = tmp_path / "run"
    number = submit(cluster, run, PRETRAIN=waits(tmp_path))
    wait_for((run / "started").exists, 60, f"job {number} to start")
    cluster.run("scancel", number)
    job = ended(cluster, number, 120)
    assert (job["JobState"], job["Restarts"]) == ("CANCELLED", "0")
    assert "start it again to go on" in (run / "log").read_text()


def test_a_job_that_fails_is_not_requeued(cluster: Cluster, tmp_path: Path) -> None:
    number = submit(cluster, tmp_path / "run", PRETRAIN=waits(tmp_path), FAILS=1)
    job = ended(cluster, number, 120)
    assert (job["JobState"], job["Restarts"]) == ("FAILED", "0")


def waits(folder: Path) -> Path:
    script = folder / "waits.py"
    script.write_text(_WAITS)
    return script
