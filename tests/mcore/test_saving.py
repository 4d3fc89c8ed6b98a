"""Saves that fail, on a disk that is full or in a folder that is gone: one line, status 1, and the
last complete checkpoint stays the one that loads."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedTensor, serialization
from megatron.core.rerun_state_machine import RerunState, RerunStateMachine
from torch.distributed.checkpoint.api import CheckpointException

from megatron_fp4.errors import ConfigError
from megatron_fp4.mcore.checkpoints import folders, saving
from testing.worlds.checkpoints import ENDS, SIZES, TORCH, TP2_SP, TRACKER, good, run_in_turn
from testing.worlds.checkpoints import saving as saves
from testing.worlds.launch import MOCK_DATA, ROOT, TINY, Result, torchrun, train

# Runs a shell command where a small file system is mounted over a folder, which ends with it.
MOUNT = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
MOUNT += ['mount -t tmpfs -o size=3700k none "$0" && eval "$1"']


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saving")


# --- in torchrun worlds ---------------------------------------------------------------------------


def test_a_folder_that_is_gone_is_told(folder: Path) -> None:
    save = folder / "spoilt"
    line = stopped(run_in_turn(2, {"": f"spoils=save {TP2_SP} {saves(save)}"})[""])
    assert "of iteration 4 was not saved: " in line and "cannot be written" in line


PHASES = "--fp4-recipe mxfp4 --fp4-bf16-after 0.5"


def test_a_run_that_has_ended_saves_nothing_and_evaluates_as_it_did(tmp_path: Path) -> None:
    """The same launch again, as after a requeue. Its last step is not one of --save-interval, so
    that Megatron would save it again, and be without it for a while."""
    flags = [*f"{PHASES} --train-iters 3 --save-interval 2".split(), "--save", str(tmp_path)]
    first = train(1, *flags)
    before = times(tmp_path / "iter_0000003")
    again = train(1, *flags, "--load", str(tmp_path))
    assert times(tmp_path / "iter_0000003") == before and len(before) > 2
    assert "is at step 3 of 3: nothing is left to train; raise --train-iters" in again.output
    assert again.evaluations == first.evaluations and not again.losses
    # Negative controls: another form is saved, and the recipe of the first phase evaluates
    # otherwise.
    train(1, *flags, "--load", str(tmp_path), "--dist-ckpt-optim-fully-reshardable")
    assert times(tmp_path / "iter_0000003") != before
    flags[flags.index("0.5")] = "1"
    early = train(1, *flags, "--load", str(tmp_path), "--fp4-load-anyway")
    assert early.evaluations != first.evaluations


@pytest.mark.slow
def test_a_run_that_ended_by_a_nan_resumes_with_the_step_that_had_it(tmp_path: Path) -> None:
    """The checkpoint of the step before is saved again, with the order to run that step again:
    Megatron checks no loss of a process's first step but by such an order."""
    flags = [*"--lr 1e20 --min-lr 1e19 --save-interval 1".split(), "--save", str(tmp_path)]
    first = torchrun(1, *flags)
    assert len(first.losses) == 1 and "Saving a checkpoint and exiting now" in first.output
    again = torchrun(1, *flags, "--load", str(tmp_path))
    assert "runs it again and then exits; add --rerun-mode disabled to train on" in again.output
    assert again.status != 0 and not (tmp_path / "iter_0000002").exists()


@pytest.mark.slow
def test_a_run_that_ended_by_a_nan_trains_on_without_reruns(tmp_path: Path) -> None:
    """The error is injected. Without the flag the step is run again alone, though it succeeds."""
    flags = ["--save-interval", "2", "--save", str(tmp_path)]
    error = "--error-injection-rate 1 --error-injection-type persistent_error".split()
    assert len(torchrun(1, *flags, *error).losses) == 1
    assert not torchrun(1, *flags, "--load", str(tmp_path)).losses
    rest = train(1, *flags, "--load", str(tmp_path), "--rerun-mode", "disabled")
    assert len(rest.losses) == 3


def times(checkpoint: Path) -> dict[str, int]:
    """When each file of a checkpoint was written."""
    return {path.name: path.stat().st_mtime_ns for path in checkpoint.iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["", TORCH], ids=["torch_dist", "torch"])
def test_a_full_disk_is_told_and_the_last_complete_checkpoint_stays(
    tmp_path: Path, flags: str
) -> None:
    first, second = on_a_small_disk(
        tmp_path, f"{flags} {saves(tmp_path)}", f"{flags} {ENDS} --load {tmp_path}"
    )
    line = stopped(first)
    assert f"the checkpoint of iteration 4 was not saved: the disk is full at {tmp_path};" in line
    assert (
        f"the last complete one is of iteration 2: make room, and launch with --load {tmp_path}"
        in line
    )
    assert "at iteration 2" in good(second).output


def on_a_small_disk(folder: Path, *trainings: str) -> list[Result]:
    """Launches one after the other, with a file system mounted over `folder` that has room for one
    checkpoint and a half."""
    if subprocess.run([*MOUNT, str(folder), "true"], stderr=subprocess.DEVNULL).returncode:
        pytest.skip("file systems cannot be mounted here")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    launch += [str(ROOT / "pretrain_gpt.py"), *TINY, *MOCK_DATA, *SIZES.split(), *TP2_SP.split()]
    commands = [f"{shlex.join(launch)} {flags}; echo '=== ended with' $?" for flags in trainings]
    done = subprocess.run(
        [*MOUNT, str(folder), f"exec 2>&1; {'; '.join(commands)}"],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=600,
    )
    *outputs, _ = re.split(r"=== ended with (\d+)\n", done.stdout)
    ended = zip(outputs[::2], outputs[1::2], strict=True)
    return [Result(int(status), [], [], output) for output, status in ended]


def stopped(result: Result) -> str:
    """The one line of a run that stopped while it trained."""
    lines = [line for line in result.output.splitlines() if "megatron-fp4: error:" in line]
    assert result.status == 1 and len(lines) == 1 and not result.has_traceback, result.output[
        -4000:
    ]
    return lines[0]


# --- in one process -------------------------------------------------------------------------------


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    args = SimpleNamespace(
        save=str(tmp_path),
        ckpt_format="torch_dist",
        fp4_verify_integrity=True,
        async_save=True,
        enable_msc=False,
        exit_signal_handler=False,
    )
    monkeypatch.setattr(saving, "get_args", lambda: args)
    return args


@pytest.mark.parametrize("ckpt_format", ["torch_dist", "torch"])
def test_a_save_over_an_older_one_leaves_no_mixture(
    one_rank: None, launch: SimpleNamespace, tmp_path: Path, ckpt_format: str
) -> None:
    """Killed at its first byte, it leaves no checkpoint rather than the older one's metadata."""
    launch.ckpt_format, launch.fp4_verify_integrity = ckpt_format, False
    path = tmp_path / "iter_0000004"
    (path / "mp_rank_07").mkdir(parents=True)
    for name in ("metadata.json", ".metadata", "common.pt", "__0_0.distcp", "integrity.json"):
        (path / name).write_text("of the older")
    found: list[Path] = []
    saving._saving_safely(lambda *_, **__: found.extend(tmp_path.glob("**/*")))(4)
    assert not found


def test_a_save_in_the_background_gets_its_manifest_when_it_is_finalized(
    one_rank: None, launch: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    tensor = ShardedTensor.from_rank_offsets("weight", torch.arange(8.0))
    request = saving._verifiable(serialization.save)(
        {"weight": tensor}, str(tmp_path), async_sharded_save=True, async_strategy="mcore"
    )
    finalize = request.finalize_fns.copy()
    request.finalize_fns.clear()
    request.execute_sync()
    assert (tmp_path / "__0_0.distcp").exists() and not (tmp_path / "integrity.json").exists()
    for part in finalize:
        part()
    assert (tmp_path / "integrity.json").exists() and folders.flaw_of(tmp_path) is None


def test_what_is_saved_is_saved_again_only_with_the_order_to_rerun_a_step(
    one_rank: None, launch: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, saved = RerunStateMachine(), list[int]()
    monkeypatch.setattr(saving.training, "maybe_finalize_async_save", lambda blocking: None)
    monkeypatch.setattr(saving, "get_rerun_state_machine", lambda: machine)
    monkeypatch.setattr(saving, "_saved", [])

    def upstream(iteration: int, **_: Any) -> None:
        saved.append(iteration)
        (tmp_path / f"iter_{iteration:07d}").mkdir()

    save = saving._saving_safely(upstream)
    save(4)
    save(4)
    assert saved == [4]
    machine.state = RerunState.WILL_RERUN_FROM_CHECKPOINT
    save(4)
    assert saved == [4, 4]


def test_files_that_are_still_written_in_the_background_are_not_deleted(
    one_rank: None, launch: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save with the order to run a step again follows the first one of that step at once."""
    machine, file = RerunStateMachine(), tmp_path / "iter_0000004/__0_0.distcp"
    monkeypatch.setattr(saving, "get_rerun_state_machine", lambda: machine)
    monkeypatch.setattr(saving, "_saved", [])
    finished = list[bool]()

    def finalize(blocking: bool = False) -> None:
        finished.append(blocking and file.exists())

    monkeypatch.setattr(saving.training, "maybe_finalize_async_save", finalize)

    def upstream(*_: Any, **__: Any) -> None:
        file.parent.mkdir()
        file.write_text("codes")

    save = saving._saving_safely(upstream)
    save(4)
    assert not finished
    machine.state = RerunState.WILL_RERUN_FROM_CHECKPOINT
    save(4)
    assert finished == [True]


def test_a_tracker_that_was_emptied_by_the_save_that_failed_is_restored(
    one_rank: None, launch: SimpleNamespace, tmp_path: Path
) -> None:
    (tmp_path / TRACKER).write_text("2")

    def save(*_: Any, **__: Any) -> None:
        (tmp_path / TRACKER).write_text("")
        raise OSError(28, "No space left on device", str(tmp_path / TRACKER))

    with pytest.raises(ConfigError, match="iteration 4 was not saved: the disk is full at"):
        saving._saving_safely(save)(4)
    assert (tmp_path / TRACKER).read_text() == "2"


def test_a_save_in_the_background_that_failed_is_told(
    one_rank: None, launch: SimpleNamespace, tmp_path: Path
) -> None:
    def finalize(*_: Any, **__: Any) -> None:
        raise CheckpointException("write", {})

    with pytest.raises(ConfigError, match="a checkpoint was not saved: "):
        saving._finalizing_in_one_line(finalize)()
    launch.save = str(tmp_path / "gone")
    with pytest.raises(ConfigError, match="gone cannot be written .No such file or directory"):
        saving._finalizing_in_one_line(finalize)()


def test_an_error_that_is_not_the_disks_is_not_taken_for_one(
    one_rank: None, launch: SimpleNamespace
) -> None:
    def save(*_: Any, **__: Any) -> None:
        raise KeyError("a mistake of the code")

    with pytest.raises(KeyError):
        saving._saving_safely(save)(4)
