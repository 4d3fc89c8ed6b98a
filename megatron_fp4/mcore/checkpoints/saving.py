"""Saving: nothing of an older checkpoint stays under a new one, its files get a manifest, and a
disk that takes no more ends the run in one line that says so.

T stands for megatron/training, C for megatron/core.
"""

import errno
import functools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.training import checkpointing, get_args, training
from torch.distributed.checkpoint.api import CheckpointException

from megatron_fp4.errors import ConfigError
from megatron_fp4.mcore.checkpoints import integrity
from megatron_fp4.mcore.checkpoints.folders import last_whole, named, non_persistent_folder, tracker
from megatron_fp4.mcore.runtime.ranks import on_all, on_first

# The files of a torch_dist checkpoint, first those without which it is none.
_FILES = ("metadata.json", ".metadata", "common.pt", integrity.INTEGRITY_FNAME, "*.distcp")
_FULL = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up"}
_TRIED = 1 << 20  # bytes: more than a full disk has left once a file of a checkpoint did not fit


def install() -> None:
    """Puts the checks into Megatron's saving."""
    dist_checkpointing.save = _verifiable(dist_checkpointing.save)
    training.save_checkpoint = _whole_or_told(training.save_checkpoint)
    training.maybe_finalize_async_save = _told(training.maybe_finalize_async_save)


def _verifiable(upstream: Callable[..., Any]) -> Callable[..., Any]:
    # T/checkpointing.py:save_checkpoint calls it for the format torch_dist.
    @functools.wraps(upstream)
    def save(state_dict: Any, checkpoint_dir: str, *args: Any, **kwargs: Any) -> Any:
        request = upstream(state_dict, checkpoint_dir, *args, **kwargs)
        if get_args().fp4_verify_integrity:
            if request is None:
                integrity.write(Path(checkpoint_dir))
            else:  # of a save in the background, which is finalized when all ranks have written
                request.add_finalize_fn(functools.partial(integrity.write, Path(checkpoint_dir)))
        return request

    return save


def _whole_or_told(upstream: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(upstream)
    def save_checkpoint(
        iteration: int, *args: Any, non_persistent_ckpt: bool = False, **kwargs: Any
    ) -> Any:
        launch = get_args()
        save = functools.partial(
            upstream, iteration, *args, non_persistent_ckpt=non_persistent_ckpt, **kwargs
        )
        is_local = non_persistent_ckpt and launch.non_persistent_ckpt_type == "local"
        if is_local or launch.enable_msc:  # not in a folder that all ranks see
            return save()
        folder = non_persistent_folder(launch) if non_persistent_ckpt else Path(launch.save)
        path = Path(checkpointing.get_checkpoint_name(folder, iteration, return_base_dir=True))
        with _failure_told(f"the checkpoint of iteration {iteration}", folder, path):
            on_first(lambda: _empty(path))
            result = save()
            if launch.ckpt_format == "torch" and launch.fp4_verify_integrity:
                integrity.write(path)
            return result

    return save_checkpoint


def _empty(path: Path) -> None:
    """Removes the checkpoint that `path` holds, if any. Raises OSError where none can be written.

    T/checkpointing.py:save_checkpoint writes over the files of a folder that a killed run, or one
    gone back by --ckpt-step, left. Killed there in turn, the old metadata would stand for a mixture
    of old files and new. In the format torch, files of ranks that are no more would stay.
    """
    path.mkdir(parents=True, exist_ok=True)
    for pattern in _FILES:
        for file in path.glob(pattern):
            file.unlink()
    for part in path.glob("mp_rank_*"):
        shutil.rmtree(part)
    if not any(path.iterdir()):  # Megatron makes it; before, it counts old ones to be removed
        path.rmdir()


def _told(upstream: Callable[..., Any]) -> Callable[..., Any]:
    # T/training.py:train calls it at every step; saves in the background fail there.
    @functools.wraps(upstream)
    def maybe_finalize_async_save(*args: Any, **kwargs: Any) -> Any:
        launch = get_args()
        if not (launch.async_save and launch.save):
            return upstream(*args, **kwargs)
        with _failure_told("a checkpoint", Path(launch.save)):
            return upstream(*args, **kwargs)

    return maybe_finalize_async_save


@contextmanager
def _failure_told(what: str, folder: Path, path: Path | None = None) -> Iterator[None]:
    """Turns an error of the file system into a ConfigError, on every rank that meets it.

    what: the checkpoint that is saved to `path` in `folder`, in words.
    """
    before = named(folder) if path is not None else None
    try:
        yield
    except CheckpointException as error:  # raised on all ranks if a file of one was not written
        raise ConfigError(_unsaved(what, folder, path, _cause(folder, error))) from error
    except Exception as error:
        # Only the rank that wrote knows; torchrun ends the others when it has left. What torch
        # raises for its own files says nothing of the disk.
        refusal = error if isinstance(error, OSError) else _refusal(folder)
        if refusal is None:
            raise
        _restore(folder, before)
        raise ConfigError(_unsaved(what, folder, path, refusal)) from error


def _cause(folder: Path, error: CheckpointException) -> BaseException:
    """What the file system refuses to a rank, or else what one failed with; on all ranks the same.
    Rank 0's exception alone has what the ranks failed with, and in words."""
    failures = [failure for failure, _ in error.failures.values()]
    shares = on_all(lambda: [_refusal(folder), *failures])
    found = [cause for share in shares for cause in share if cause is not None]
    refusals = [cause for cause in found if isinstance(cause, OSError)]
    return next(iter(refusals + found), error)


def _refusal(folder: Path) -> OSError | None:
    """What the file system says to one more file in `folder`; None if it takes it."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_TRIED))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return OSError(error.errno, error.strerror, str(folder))
    return None


def _restore(folder: Path, before: str | None) -> None:
    """Gives the tracker file back what it said: T/checkpointing.py empties it to write into it."""
    if before is not None and torch.distributed.get_rank() == 0 and named(folder) == "":
        try:
            tracker(folder).write_text(before)
        except OSError:
            pass  # the launch that finds it empty says what to write there


def _unsaved(what: str, folder: Path, path: Path | None, error: BaseException) -> str:
    text = " ".join(str(error).split())[:400]
    cause, remedy = f"{type(error).__name__}: {text}", "see to it"
    if isinstance(error, OSError) and error.errno in _FULL:
        cause, remedy = f"{_FULL[error.errno]} at {folder}", "make room"
    elif isinstance(error, OSError):
        cause = f"{error.filename or folder} cannot be written ({error.strerror})"
    last = last_whole(folder, damaged=path)
    then = "launch again" if last is None else f"launch with --load {folder}"
    left = "there is no whole one yet" if last is None else f"the last whole one is of {last}"
    return f"{what} was not saved: {cause}; {left}: {remedy}, and {then}"
