"""Finds the checkpoint that Megatron would load from a folder, and whether it is complete.

If it is not complete, the user is told what to do. A folder of checkpoints has a tracker file,
which names the newest iteration, and one folder for each checkpoint. Only files are read here, no
tensors. T stands for megatron/training.
"""

import argparse
import re
from pathlib import Path

from megatron.core.dist_checkpointing.core import maybe_load_config
from megatron.training import checkpointing
from torch.distributed.checkpoint import FileSystemReader

_ITERATION = re.compile(r"iter_(\d+)")


def problem_in(
    folder: Path, step: int | None = None, non_persistent: Path | None = None
) -> str | None:
    """Why a run cannot resume from `folder`, and what to do, as text for an error line.

    None if it can resume, and if the folder has no checkpoint.

    folder: the value of --load.
    step: the iteration to load (--ckpt-step); None: the one that the tracker file names.
    non_persistent: the folder of non-persistent checkpoints, or None. Megatron loads the newest of
        them if it is at least as new as that of `folder`.
    """
    if mistake := _mistake(folder):
        return mistake
    if non_persistent is not None and _prefers_non_persistent(non_persistent, folder, step):
        problem = _problem_of_named(non_persistent, None)
    else:
        problem = _problem_of_named(folder, step)
    return problem and f"{problem}; {remedy(folder, step, non_persistent)}"


def chosen(
    folder: Path, step: int | None = None, non_persistent: Path | None = None
) -> Path | None:
    """The folder of the checkpoint that Megatron would load; None if there is no checkpoint.

    Takes the arguments of `problem_in`, which must have found no problem.
    """
    if non_persistent is not None and _prefers_non_persistent(non_persistent, folder, step):
        return _path(non_persistent, None)
    return _path(folder, step)


def remedy(
    folder: Path,
    step: int | None = None,
    non_persistent: Path | None = None,
    damaged: Path | None = None,
) -> str:
    """What the user can do to resume from the last complete checkpoint, as text for an error line.

    Takes the arguments of `problem_in`. damaged: the folder of a checkpoint that is known to be
    damaged although `flaw_of` finds nothing, for example by its SHA-256.
    """
    last = last_complete(folder, damaged)
    other = None if non_persistent is None else last_complete(non_persistent, damaged)
    found = [iteration for iteration in (last, other) if iteration is not None]
    if not found:
        return (
            f"no checkpoint there is complete: remove {folder}, or leave out --load, to start anew"
        )
    best, steps = max(found), []
    persistent = _iteration(tracker_text(folder))
    if step is not None and persistent is not None:
        steps += [f"give --ckpt-step {best}"] * (step != best)
    elif persistent is None or persistent > best or (best == last and persistent != best):
        steps.append(f"write {best} into {tracker(folder)}")
    newest = -1 if non_persistent is None else _iteration(tracker_text(non_persistent))
    if non_persistent is not None and best == other:
        steps += [f"write {best} into {tracker(non_persistent)}"] * (newest != best)
    elif non_persistent is not None and (newest is None or newest >= best):
        steps.append(f"remove {tracker(non_persistent)}")
    return f"{' and '.join(steps)} to go on from the last complete one"


def load_places(args: argparse.Namespace, load_dir: Path) -> tuple[Path, int | None, Path | None]:
    """(folder, step, non_persistent): what `problem_in`, `chosen` and `remedy` take, for a launch.

    load_dir: the value of --load. args: Megatron's.
    """
    has_others = args.non_persistent_ckpt_type is not None
    non_persistent = non_persistent_folder(args, load_dir) if has_others else None
    return load_dir, args.ckpt_step, non_persistent


def non_persistent_folder(args: argparse.Namespace, load_dir: Path | None = None) -> Path:
    """The folder in which Megatron saves non-persistent checkpoints, or looks for them.

    load_dir: the value of --load when loading; None when saving. args: Megatron's.
    """
    inside = Path(load_dir or args.save) / checkpointing._NON_PERSISTENT_CKPT_SUBDIR
    return Path(args.non_persistent_global_ckpt_dir or inside)


def tracker(folder: Path) -> Path:
    """The path of the tracker file of `folder`, which names the newest iteration."""
    return Path(checkpointing.get_checkpoint_tracker_filename(folder))


def tracker_text(folder: Path) -> str | None:
    """The text of the tracker file of `folder`; None if there is no such file."""
    path = tracker(folder)
    return path.read_text(errors="replace").strip() if path.is_file() else None


def last_complete(folder: Path, damaged: Path | None = None) -> int | None:
    """The newest iteration in `folder` with a complete checkpoint; None if there is none.

    damaged: the folder of a checkpoint that does not count.
    """
    iterations = [int(path.name[5:]) for path in folder.glob("iter_*") if path.name[5:].isdecimal()]
    for iteration in sorted(iterations, reverse=True):
        path = folder / f"iter_{iteration:07d}"
        if path != damaged and not flaw_of(path):
            return iteration
    return None


def flaw_of(path: Path) -> str | None:
    """Why the checkpoint in folder `path` is not complete; None if it is.

    In the format torch_dist, the metadata are read, and each file must have the size that they
    imply. A checkpoint of the format torch has no metadata and counts as complete.
    """
    if any(path.glob("mp_rank_*")):
        return None  # the format torch, which has no metadata
    try:
        if not path.is_dir():
            return "it does not exist"
        if maybe_load_config(str(path)) is None:
            return "its save did not end (there is no metadata.json)"
        places = FileSystemReader(path).read_metadata().storage_data.values()
    except Exception as error:  # damaged pickles raise many kinds of exceptions
        return f"its metadata cannot be read ({type(error).__name__})"
    ends: dict[str, int] = {}
    for place in places:
        ends[place.relative_path] = max(
            ends.get(place.relative_path, 0), place.offset + place.length
        )
    for name, end in sorted(ends.items()):
        size = (path / name).stat().st_size if (path / name).is_file() else None
        if size is None:
            return f"{name} is missing"
        if size < end:
            return f"{name} has {size} bytes of {end}"
    return None


def _mistake(folder: Path) -> str | None:
    """Why `folder` is not usable as a value of --load, and what to give; None if it is.

    For example it is a file, cannot be read, or is the folder of a single checkpoint. A folder that
    does not exist is usable: training starts from the beginning.
    """
    try:
        if not folder.exists():
            return None
        if not folder.is_dir():
            return f"{folder} is a file: give --load the folder that has {tracker(folder).name}"
        parts = list(folder.iterdir())
        if tracker(folder).exists():
            tracker(folder).read_bytes()
    except OSError as error:
        return f"{error.filename} cannot be read ({error.strerror}): give --load another folder"
    if tracker(folder) in parts:
        return None
    for part in parts:  # what --ckpt-convert-save writes
        if part.name in ("torch", "torch_dist") and tracker(part).exists():
            return f"{folder} has checkpoints in {part.name}: give --load {part}"
    is_one = any(part.name in (".metadata", "metadata.json") for part in parts)
    if iteration := _ITERATION.fullmatch(folder.resolve().name):
        above = folder.resolve().parent
        return f"{folder} is one checkpoint: give --load {above} --ckpt-step {int(iteration[1])}"
    if is_one or any(part.name.startswith("mp_rank_") for part in parts):
        return f"{folder} is one checkpoint: give --load the folder that it is in"
    return None


def _path(folder: Path, step: int | None) -> Path | None:
    """The folder of the checkpoint of iteration `step`.

    step: None: the iteration that the tracker file names. The result is None without either.
    """
    text = tracker_text(folder)
    if text is None and step is None:
        return None
    release = text == "release"
    iteration = 0 if release else step or int(text or 0)
    name = checkpointing.get_checkpoint_name(folder, iteration, release, return_base_dir=True)
    return Path(name)


def _problem_of_named(folder: Path, step: int | None) -> str | None:
    text = tracker_text(folder)
    if text is None and step is None:
        if last_complete(folder) is None:
            return None
        return f"{folder} holds a checkpoint and no {tracker(folder).name}"
    if text is not None and _iteration(text) is None:
        return f"{tracker(folder)} names no iteration but {text[:20]!r}"
    path = _path(folder, step)
    assert path is not None
    flaw = flaw_of(path)
    return flaw and f"{path} is not a complete checkpoint: {flaw}"


def _prefers_non_persistent(non_persistent: Path, folder: Path, step: int | None) -> bool:
    """Whether T/checkpointing.py:_load_base_checkpoint would load from `non_persistent`, and not
    from `folder`.

    If the tracker file of `non_persistent` is missing, whether it would load from there if the file
    named the last complete checkpoint there; if the tracker file names no iteration, True.
    """
    persistent, newest = _iteration(tracker_text(folder)), _iteration(tracker_text(non_persistent))
    if persistent is None:
        return False  # `folder` has an invalid tracker file, which Megatron reads in any case
    persistent = step or persistent
    if newest == -1:
        return (last_complete(non_persistent) or -1) > persistent
    return newest is None or newest >= persistent


def _iteration(text: str | None) -> int | None:
    """The iteration in the text of a tracker file; 0 for "release".

    -1 if there is no file (text is None), and None if the text is not a number.
    """
    if text is None or text == "release":
        return -1 if text is None else 0
    return int(text) if text.isdecimal() else None
