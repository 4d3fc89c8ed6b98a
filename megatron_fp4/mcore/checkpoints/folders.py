"""Which checkpoint of a folder Megatron would load, whether it is whole, and what to do if not.

Everything here looks at files alone. A folder has a tracker file that names the newest iteration,
and beside it one folder for each checkpoint. T stands for megatron/training.
"""

import argparse
import re
from pathlib import Path

from megatron.core.dist_checkpointing.core import maybe_load_config
from megatron.training import checkpointing
from torch.distributed.checkpoint import FileSystemReader

_ITERATION = re.compile(r"iter_(\d+)")


def problem_in(folder: Path, step: int | None = None, beside: Path | None = None) -> str | None:
    """Why a run cannot go on from `folder`, and what to do; None if it can, or finds nothing there.

    step: the iteration asked for, or None for the one that the tracker file names.
    beside: the folder of non-persistent checkpoints, whose newest is loaded if it is not older.
    """
    if mistake := _mistake(folder):
        return mistake
    if beside is not None and _goes_first(beside, folder, step):
        problem = _problem_of_named(beside, None)
    else:
        problem = _problem_of_named(folder, step)
    return problem and f"{problem}; {remedy(folder, step, beside)}"


def chosen(folder: Path, step: int | None = None, beside: Path | None = None) -> Path | None:
    """The checkpoint that Megatron would load where `problem_in` finds no problem; None if there
    is none."""
    if beside is not None and _goes_first(beside, folder, step):
        return _path(beside, None)
    return _path(folder, step)


def remedy(
    folder: Path, step: int | None = None, beside: Path | None = None, damaged: Path | None = None
) -> str:
    """What the user has to do so that the next launch loads the last whole checkpoint: text for an
    error line. Takes the arguments of `problem_in`.

    damaged: a checkpoint that is known not to be whole, though it seems so here.
    """
    last = last_whole(folder, damaged)
    other = None if beside is None else last_whole(beside, damaged)
    found = [iteration for iteration in (last, other) if iteration is not None]
    if not found:
        return f"none there is whole: remove {folder}, or leave out --load, to start anew"
    best, steps = max(found), []
    persistent = _iteration(named(folder))
    if step is not None and persistent is not None:
        steps += [f"give --ckpt-step {best}"] * (step != best)
    elif persistent is None or persistent > best or (best == last and persistent != best):
        steps.append(f"write {best} into {tracker(folder)}")
    newest = -1 if beside is None else _iteration(named(beside))
    if beside is not None and best == other:
        steps += [f"write {best} into {tracker(beside)}"] * (newest != best)
    elif beside is not None and (newest is None or newest >= best):
        steps.append(f"remove {tracker(beside)}")
    return f"{' and '.join(steps)} to go on from the last whole one"


def non_persistent_folder(args: argparse.Namespace, load_dir: Path | None = None) -> Path:
    """Where Megatron saves non-persistent checkpoints, or looks for them beside `load_dir`."""
    inside = Path(load_dir or args.save) / checkpointing._NON_PERSISTENT_CKPT_SUBDIR
    return Path(args.non_persistent_global_ckpt_dir or inside)


def tracker(folder: Path) -> Path:
    """The file that names the newest iteration of a folder."""
    return Path(checkpointing.get_checkpoint_tracker_filename(folder))


def named(folder: Path) -> str | None:
    """What the tracker file of a folder says; None if there is none."""
    path = tracker(folder)
    return path.read_text(errors="replace").strip() if path.is_file() else None


def last_whole(folder: Path, damaged: Path | None = None) -> int | None:
    """The newest iteration in `folder` whose checkpoint is whole and is not `damaged`."""
    iterations = [int(path.name[5:]) for path in folder.glob("iter_*") if path.name[5:].isdecimal()]
    for iteration in sorted(iterations, reverse=True):
        path = folder / f"iter_{iteration:07d}"
        if path != damaged and not flaw_of(path):
            return iteration
    return None


def flaw_of(path: Path) -> str | None:
    """What a checkpoint lacks to be whole, None if nothing. The metadata of the format torch_dist
    is read, and the sizes of its files."""
    if any(path.glob("mp_rank_*")):
        return None  # of the format torch, which has no metadata
    try:
        if not path.is_dir():
            return "it does not exist"
        if maybe_load_config(str(path)) is None:
            return "its save did not end (there is no metadata.json)"
        places = FileSystemReader(path).read_metadata().storage_data.values()
    except Exception as error:  # as many kinds as there are ways to damage a file
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
    """What is wrong with `folder` itself as a value of --load."""
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
    is_one = any(part.name in (".metadata", "metadata.json") for part in parts)
    if iteration := _ITERATION.fullmatch(folder.resolve().name):
        above = folder.resolve().parent
        return f"{folder} is one checkpoint: give --load {above} --ckpt-step {int(iteration[1])}"
    if is_one or any(part.name.startswith("mp_rank_") for part in parts):
        return f"{folder} is one checkpoint: give --load the folder that it is in"
    return None


def _path(folder: Path, step: int | None) -> Path | None:
    """The folder of the checkpoint of iteration `step`, or of the iteration that the tracker file
    names; None if there is neither."""
    text = named(folder)
    if text is None and step is None:
        return None
    release = text == "release"
    iteration = 0 if release else step or int(text or 0)
    name = checkpointing.get_checkpoint_name(folder, iteration, release, return_base_dir=True)
    return Path(name)


def _problem_of_named(folder: Path, step: int | None) -> str | None:
    text = named(folder)
    if text is None and step is None:
        if last_whole(folder) is None:
            return None
        return f"{folder} holds a checkpoint and no {tracker(folder).name}"
    if text is not None and _iteration(text) is None:
        return f"{tracker(folder)} names no iteration but {text[:20]!r}"
    path = _path(folder, step)
    assert path is not None
    flaw = flaw_of(path)
    return flaw and f"{path} is not a whole checkpoint: {flaw}"


def _goes_first(beside: Path, folder: Path, step: int | None) -> bool:
    """Whether T/checkpointing.py:_load_base_checkpoint would load from `beside`, or would have if
    its tracker were there and said something."""
    persistent, newest = _iteration(named(folder)), _iteration(named(beside))
    if persistent is None:
        return False  # a tracker that says nothing, which is read in any case
    persistent = step or persistent
    if newest == -1:
        return (last_whole(beside) or -1) > persistent
    return newest is None or newest >= persistent


def _iteration(text: str | None) -> int | None:
    """The iteration that a tracker file names; -1 if there is no file, None if it names none."""
    if text is None or text == "release":
        return -1 if text is None else 0
    return int(text) if text.isdecimal() else None
