"""Saves checkpoints: removes older files first, writes integrity.json, reports failed writes.

A failed write, for example because the disk is full, ends the run with one line. T stands for
megatron/training, C for megatron/core.
"""

import errno
import functools
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.rerun_state_machine import RerunState, get_rerun_state_machine
from megatron.training import checkpointing, get_args, training
from torch.distributed.checkpoint.api import CheckpointException

from megatron_fp4.errors import ConfigError
from megatron_fp4.mcore.checkpoints import integrity
from megatron_fp4.mcore.checkpoints.folders import (
    flaw_of,
    last_complete,
    non_persistent_folder,
    tracker,
    tracker_text,
)
from megatron_fp4.mcore.runtime.ranks import on_all, on_first

# The files of a torch_dist checkpoint, in the order in which they are deleted. Without the first
# ones it is not a complete checkpoint.
_FILES = ("metadata.json", ".metadata", "common.pt", integrity.INTEGRITY_FNAME, "*.distcp")
_FULL = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up"}
# The number of bytes that are written to find out whether the disk is full. When a file of a
# checkpoint did not fit, fewer are left.
_PROBE_BYTES = 1 << 20
# [the folder of the checkpoint that this process saved or loaded last]
_saved: list[Path] = []


def install() -> None:
    """Wraps Megatron's functions that save checkpoints. Call it once."""
    dist_checkpointing.save = _verifiable(dist_checkpointing.save)
    training.save_checkpoint = _saving_safely(training.save_checkpoint)
    training.maybe_finalize_async_save = _finalizing_in_one_line(training.maybe_finalize_async_save)


def _verifiable(upstream: Callable[..., Any]) -> Callable[..., Any]:
    # T/checkpointing.py:save_checkpoint calls dist_checkpointing.save for the format torch_dist.
    @functools.wraps(upstream)
    def save(state_dict: Any, checkpoint_dir: str, *args: Any, **kwargs: Any) -> Any:
        request = upstream(state_dict, checkpoint_dir, *args, **kwargs)
        if get_args().fp4_verify_integrity:
            if request is None:
                integrity.write(Path(checkpoint_dir))
            else:  # --async-save: the functions run when all ranks have written their files
                request.add_finalize_fn(functools.partial(integrity.write, Path(checkpoint_dir)))
        return request

    return save


def _saving_safely(upstream: Callable[..., Any]) -> Callable[..., Any]:
    # T/training.py calls save_checkpoint. It would write over older files of the same iteration.
    @functools.wraps(upstream)
    def save_checkpoint(
        iteration: int, *args: Any, non_persistent_ckpt: bool = False, **kwargs: Any
    ) -> Any:
        launch = get_args()
        save = functools.partial(
            upstream, iteration, *args, non_persistent_ckpt=non_persistent_ckpt, **kwargs
        )
        is_local = non_persistent_ckpt and launch.non_persistent_ckpt_type == "local"
        if is_local or launch.enable_msc:  # not saved in a folder that all ranks can read
            return save()
        folder = non_persistent_folder(launch) if non_persistent_ckpt else Path(launch.save)
        path = _folder_of(folder, iteration)
        if on_first(lambda: _is_saved(path, launch.async_save)):
            return None  # saved again, it would be incomplete for a while, and say the same
        failing = _failing_in_one_line(f"the checkpoint of iteration {iteration}", folder, path)
        with failing, _signal_blocked(launch):
            if _saved == [path]:  # its files may still be written in the background
                training.maybe_finalize_async_save(blocking=True)
            on_first(lambda: _delete(path))
            result = save()
            if launch.ckpt_format == "torch" and launch.fp4_verify_integrity:
                integrity.write(path)
            _saved[:] = [path]
            return result

    return save_checkpoint


def keep(iteration: int) -> None:
    """Keeps the checkpoint of `iteration` in the folder of --save: saving that iteration again does
    nothing as long as the checkpoint is complete.

    Call it after that checkpoint was loaded by a run that has no steps left. Megatron saves at the
    end of its loop even then, and would delete the checkpoint before it writes it again.
    """
    _saved[:] = [_folder_of(Path(get_args().save), iteration)]


def _is_saved(path: Path, is_async: bool) -> bool:
    """Whether the checkpoint in folder `path` has what would be saved there now: this run saved or
    loaded it last, and it is complete.

    is_async: it may still be written, so that its folder is enough.
    """
    # After a loss that is NaN again in a rerun, Megatron saves the last step once more, with the
    # order to run the step after it again. Without the order a resumed run would train on the NaN.
    if _saved != [path] or get_rerun_state_machine().state != RerunState.NOT_RUNNING_YET:
        return False
    return path.is_dir() if is_async else flaw_of(path) is None


def _folder_of(folder: Path, iteration: int) -> Path:
    return Path(checkpointing.get_checkpoint_name(folder, iteration, return_base_dir=True))


@contextmanager
def _signal_blocked(launch: Any) -> Iterator[None]:
    """A context whose new processes do not get --exit-signal, if --exit-signal-handler is given.

    C/dist_checkpointing/strategies/filesystem_async.py starts a process in the first save, which
    all saves need. A scheduler may send the signal to every process of a job, as Slurm does when it
    preempts one. That process would die of it, and the rank could not save. A process that is
    started inherits the signals that its parent's thread has blocked. The rank itself gets a
    blocked signal when the context ends.

    launch: Megatron's arguments.
    """
    if not launch.exit_signal_handler:
        yield
        return
    resource_tracker.ensure_running()  # starting it unblocks SIGTERM
    signal.pthread_sigmask(signal.SIG_BLOCK, {launch.exit_signal})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {launch.exit_signal})


def _delete(path: Path) -> None:
    """Deletes the checkpoint in folder `path`, if there is one. Raises OSError if it cannot.

    Files can be there if a run was killed while it saved, or went back with --ckpt-step.
    T/checkpointing.py:save_checkpoint would overwrite them one by one. If that run were killed too,
    the old metadata would describe a mixture of old and new files. In --ckpt-format torch, files of
    ranks that no longer exist would remain.
    """
    path.mkdir(parents=True, exist_ok=True)
    for pattern in _FILES:
        for file in path.glob(pattern):
            file.unlink()
    for part in path.glob("mp_rank_*"):
        shutil.rmtree(part)
    # Megatron creates the folder itself. An empty one that exists before would be counted when
    # Megatron looks for old checkpoints to remove.
    if not any(path.iterdir()):
        path.rmdir()


def _finalizing_in_one_line(upstream: Callable[..., Any]) -> Callable[..., Any]:
    # T/training.py:train calls maybe_finalize_async_save in every step. It raises the errors of
    # saves that run in the background.
    @functools.wraps(upstream)
    def maybe_finalize_async_save(*args: Any, **kwargs: Any) -> Any:
        launch = get_args()
        if not (launch.async_save and launch.save):
            return upstream(*args, **kwargs)
        with _failing_in_one_line("a checkpoint", Path(launch.save)):
            return upstream(*args, **kwargs)

    return maybe_finalize_async_save


@contextmanager
def _failing_in_one_line(what: str, folder: Path, path: Path | None = None) -> Iterator[None]:
    """A context in which a failed write is raised as a ConfigError, on each rank where it failed.

    The message says what failed and which checkpoint can be loaded.

    what: the name of the checkpoint in the message. folder: the folder of all checkpoints.
    path: the folder of the one that is saved, or None where it is unknown.
    """
    before = tracker_text(folder) if path is not None else None
    try:
        yield
    except CheckpointException as error:  # raised on all ranks if any rank failed to write
        raise ConfigError(_failure_line(what, folder, path, _cause(folder, error))) from error
    except Exception as error:
        # Raised only on the rank that wrote; torchrun ends the others when that rank has exited.
        # An error of torch.save does not say whether the disk is full; _write_error finds out.
        failure = error if isinstance(error, OSError) else _write_error(folder)
        if failure is None:
            raise
        _restore(folder, before)
        raise ConfigError(_failure_line(what, folder, path, failure)) from error


def _cause(folder: Path, error: CheckpointException) -> BaseException:
    """Why a checkpoint was not written; the same exception on all ranks. All ranks must call it.

    If the file system refuses a write on some rank, that OSError; else the exception with which a
    rank failed. Only rank 0's CheckpointException contains the exceptions of the ranks.
    """
    failures = [failure for failure, _ in error.failures.values()]
    shares = on_all(lambda: [_write_error(folder), *failures])
    found = [cause for share in shares for cause in share if cause is not None]
    refused = [cause for cause in found if isinstance(cause, OSError)]
    return next(iter(refused + found), error)


def _write_error(folder: Path) -> OSError | None:
    """The OSError of writing another file to `folder`; None if it can be written."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return OSError(error.errno, error.strerror, str(folder))
    return None


def _restore(folder: Path, before: str | None) -> None:
    """Writes `before` back to the tracker file of `folder` if that is empty. Only on rank 0.

    T/checkpointing.py truncates the tracker file before it writes to it, so a failed write leaves
    it empty.
    """
    if before is not None and torch.distributed.get_rank() == 0 and tracker_text(folder) == "":
        try:
            tracker(folder).write_text(before)
        except OSError:
            pass  # a launch that finds the file empty tells the user what to write there


def _failure_line(what: str, folder: Path, path: Path | None, error: BaseException) -> str:
    text = " ".join(str(error).split())[:400]
    cause, remedy = f"{type(error).__name__}: {text}", "see to it"
    if isinstance(error, OSError) and error.errno in _FULL:
        cause, remedy = f"{_FULL[error.errno]} at {folder}", "make room"
    elif isinstance(error, OSError):
        cause = f"{error.filename or folder} cannot be written ({error.strerror})"
    last = last_complete(folder, damaged=path)
    then = "launch again" if last is None else f"launch with --load {folder}"
    left = "there is no complete one yet"
    if last is not None:
        left = f"the last complete one is of iteration {last}"
    return f"{what} was not saved: {cause}; {left}: {remedy}, and {then}"
