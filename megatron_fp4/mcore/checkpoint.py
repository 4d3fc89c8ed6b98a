"""Checkpoints: a run goes on from one that is whole, with the numerics that made it, or stops.

What made a checkpoint is in Megatron's arguments, which every checkpoint carries (options.py). A
save that was killed, or files that were lost, are told in one line before anything is loaded.

T stands for megatron/training.
"""

import argparse
import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import maybe_load_config
from megatron.training import checkpointing, get_args, training
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException

from megatron_fp4.errors import ConfigError
from megatron_fp4.mcore.comparison import compare

# The files of a torch_dist checkpoint, first those without which it is none.
_FILES = ("metadata.json", ".metadata", "common.pt", "integrity.json", "*.distcp")


def install() -> None:
    """Puts the checks into Megatron's loading and saving; harmless when called again."""
    if hasattr(training.load_checkpoint, "__wrapped__"):
        return
    training.load_checkpoint = _in_one_line(training.load_checkpoint)
    checkpointing._load_base_checkpoint = _if_whole(checkpointing._load_base_checkpoint)
    checkpointing.check_checkpoint_args = _comparing(checkpointing.check_checkpoint_args)
    checkpointing.load_args_from_checkpoint = _in_one_line_at_parsing(
        checkpointing.load_args_from_checkpoint
    )
    dist_checkpointing.save = _from_nothing(dist_checkpointing.save)
    training.save_checkpoint = _cleared_first(training.save_checkpoint)


# --- the same numerics ---------------------------------------------------------------------------


def _comparing(upstream: Callable[..., None]) -> Callable[..., None]:
    # T/checkpointing.py:load_checkpoint calls it once, on every rank, and not with --finetune.
    @functools.wraps(upstream)
    def check_checkpoint_args(saved: argparse.Namespace, *args: Any, **kwargs: Any) -> None:
        upstream(saved, *args, **kwargs)
        compare(saved, get_args())

    return check_checkpoint_args


# --- a whole checkpoint --------------------------------------------------------------------------


def _if_whole(upstream: Callable[..., Any]) -> Callable[..., Any]:
    # T/checkpointing.py reads what a checkpoint says of itself (rank0=True) before its tensors. A
    # tracker that says nothing would end the run there with status 0, a missing one start it anew.
    @functools.wraps(upstream)
    def _load_base_checkpoint(
        load_dir: str | None, args: argparse.Namespace, rank0: bool = False, **kwargs: Any
    ) -> Any:
        if rank0 and load_dir is not None and _is_judged(args):
            problem = _judged_once(Path(load_dir), args)
            if problem is not None:
                raise ConfigError(problem)
        return upstream(load_dir, args, rank0=rank0, **kwargs)

    return _load_base_checkpoint


def _judged_once(load_dir: Path, args: argparse.Namespace) -> str | None:
    """What rank 0 finds: all stop or none, and one reads the metadata."""
    is_world = torch.distributed.is_initialized()
    found: list[str | None] = [None]
    if not is_world or torch.distributed.get_rank() == 0:
        found = [problem_in(load_dir, args.ckpt_step, _non_persistent(load_dir, args))]
    if is_world:
        torch.distributed.broadcast_object_list(found, src=0)
    return found[0]


def _is_judged(args: argparse.Namespace) -> bool:
    plain = args.non_persistent_ckpt_type in (None, "global") and not args.enable_msc
    return plain and args.ckpt_format == "torch_dist"


def _non_persistent(load_dir: Path, args: argparse.Namespace) -> Path | None:
    """Where T/checkpointing.py:_load_base_checkpoint looks for non-persistent checkpoints."""
    if args.non_persistent_ckpt_type is None:
        return None
    inside = load_dir / checkpointing._NON_PERSISTENT_CKPT_SUBDIR
    return Path(args.non_persistent_global_ckpt_dir or inside)


def problem_in(folder: Path, step: int | None = None, beside: Path | None = None) -> str | None:
    """Why a run cannot go on from `folder`, and what to do; None if it can, or finds nothing there.

    step: the iteration asked for, or None for the one that the tracker file names.
    beside: the folder of non-persistent checkpoints, whose newest is loaded if it is not older.
    """
    if beside is not None and _goes_first(beside, folder, step):
        problem = _problem_of_named(beside, None)
    else:
        problem = _problem_of_named(folder, step)
    return problem and f"{problem}; {_remedy(folder, step, beside)}"


def _problem_of_named(folder: Path, step: int | None) -> str | None:
    tracker, named = _tracker(folder), _named(folder)
    if named is None and step is None:
        return (
            None
            if _last_whole(folder) is None
            else f"{folder} holds a checkpoint and no {tracker.name}"
        )
    if named is not None and _iteration(named) is None:
        return f"{tracker} names no iteration but {named[:20]!r}"
    release = named == "release"
    iteration = 0 if release else step or int(named or 0)
    name = checkpointing.get_checkpoint_name(folder, iteration, release, return_base_dir=True)
    flaw = flaw_of(Path(name))
    return flaw and f"{name} is not a whole checkpoint: {flaw}"


def _goes_first(beside: Path, folder: Path, step: int | None) -> bool:
    """Whether T/checkpointing.py:_load_base_checkpoint would load from `beside`, or would have if
    its tracker were there and said something."""
    persistent, newest = _iteration(_named(folder)), _iteration(_named(beside))
    if persistent is None:
        return False  # a tracker that says nothing, which is read in any case
    persistent = step or persistent
    if newest == -1:
        return (_last_whole(beside) or -1) > persistent
    return newest is None or newest >= persistent


def _remedy(folder: Path, step: int | None, beside: Path | None) -> str:
    """What to do for the last whole checkpoint of both folders to be loaded."""
    last = _last_whole(folder)
    other = None if beside is None else _last_whole(beside)
    found = [iteration for iteration in (last, other) if iteration is not None]
    if not found:
        return f"none there is whole: remove {folder}, or leave out --load, to start anew"
    best, steps = max(found), []
    persistent = _iteration(_named(folder))
    if step is not None and persistent is not None:
        steps += [f"give --ckpt-step {best}"] * (step != best)
    elif persistent is None or persistent > best or (best == last and persistent != best):
        steps.append(f"write {best} into {_tracker(folder)}")
    newest = -1 if beside is None else _iteration(_named(beside))
    if beside is not None and best == other:
        steps += [f"write {best} into {_tracker(beside)}"] * (newest != best)
    elif beside is not None and (newest is None or newest >= best):
        steps.append(f"remove {_tracker(beside)}")
    return f"{' and '.join(steps)} to go on from the last whole one"


def _tracker(folder: Path) -> Path:
    return Path(checkpointing.get_checkpoint_tracker_filename(folder))


def _named(folder: Path) -> str | None:
    """What the tracker file of a folder says; None if there is none."""
    tracker = _tracker(folder)
    return tracker.read_text(errors="replace").strip() if tracker.is_file() else None


def _iteration(named: str | None) -> int | None:
    """The iteration that a tracker file names; -1 if there is no file, None if it names none."""
    if named is None or named == "release":
        return -1 if named is None else 0
    return int(named) if named.isdecimal() else None


def _last_whole(folder: Path) -> int | None:
    iterations = [int(path.name[5:]) for path in folder.glob("iter_*") if path.name[5:].isdecimal()]
    whole = (n for n in sorted(iterations, reverse=True) if not flaw_of(folder / f"iter_{n:07d}"))
    return next(whole, None)


def flaw_of(path: Path) -> str | None:
    """What a torch_dist checkpoint lacks to be whole, None if nothing. Its metadata is read, and
    the sizes of its files."""
    if any(path.glob("mp_rank_*")):
        return None  # of the format torch, which has nothing to judge by
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


def _from_nothing(upstream: Callable[..., Any]) -> Callable[..., Any]:
    # T/checkpointing.py:save_checkpoint writes over the files of a directory that a killed run, or
    # one gone back by --ckpt-step, left. Killed there in turn, the old metadata would stand for a
    # mixture of old files and new.
    @functools.wraps(upstream)
    def save(state_dict: Any, checkpoint_dir: str, *args: Any, **kwargs: Any) -> Any:
        if torch.distributed.get_rank() == 0:
            for pattern in _FILES:
                for file in Path(checkpoint_dir).glob(pattern):
                    file.unlink()
        torch.distributed.barrier()
        return upstream(state_dict, checkpoint_dir, *args, **kwargs)

    return save


def _cleared_first(upstream: Callable[..., Any]) -> Callable[..., Any]:
    # The same of --ckpt-format torch, a folder of each rank's. Where the tracker names the
    # iteration already, as after --ckpt-step, files that are missing stop a launch, and older ones
    # would not.
    @functools.wraps(upstream)
    def save_checkpoint(
        iteration: int, *args: Any, non_persistent_ckpt: bool = False, **kwargs: Any
    ) -> Any:
        launch = get_args()
        if launch.ckpt_format == "torch" and not non_persistent_ckpt:
            if torch.distributed.get_rank() == 0:
                name = checkpointing.get_checkpoint_name(
                    launch.save, iteration, return_base_dir=True
                )
                for folder in Path(name).glob("mp_rank_*"):
                    shutil.rmtree(folder)
            torch.distributed.barrier()
        return upstream(iteration, *args, non_persistent_ckpt=non_persistent_ckpt, **kwargs)

    return save_checkpoint


def _in_one_line(upstream: Callable[..., Any]) -> Callable[..., Any]:
    # T/training.py:setup_model_and_optimizer calls it: what cannot be read, or does not fit the
    # model, would be a traceback from every rank, or an exit with status 0.
    @functools.wraps(upstream)
    def load_checkpoint(*args: Any, load_arg: str = "load", **kwargs: Any) -> Any:
        try:
            return upstream(*args, load_arg=load_arg, **kwargs)
        except ConfigError:
            raise
        except SystemExit as ended:
            raise ConfigError(_given_up(_folder(get_args(), load_arg), ended)) from ended
        except (Exception, CheckpointException) as error:  # torch's is no Exception
            cause, remedy = _cause(error), "or load another"
            if "optimizer.distributed.dp_group_idx" in cause:  # of shards as they were in memory
                remedy = (
                    "or save with --dist-ckpt-optim-fully-reshardable to change the layout "
                    "(--expert-model-parallel-size too), or load with --no-load-optim"
                )
            raise ConfigError(
                f"the checkpoint in {_folder(get_args(), load_arg)} cannot be loaded: {cause}; "
                f"launch with the model, layout and optimizer that saved it, {remedy}"
            ) from error

    return load_checkpoint


def _in_one_line_at_parsing(upstream: Callable[..., Any]) -> Callable[..., Any]:
    # T/arguments.py:parse_and_validate_args calls it for --use-checkpoint-args.
    @functools.wraps(upstream)
    def load_args_from_checkpoint(
        args: argparse.Namespace, load_arg: str = "load", **kwargs: Any
    ) -> Any:
        try:
            return upstream(args, load_arg=load_arg, **kwargs)
        except SystemExit as ended:
            raise ConfigError(_given_up(_folder(args, load_arg), ended)) from ended

    return load_args_from_checkpoint


def _given_up(folder: str, ended: SystemExit) -> str:
    """What there is to say where T/checkpointing.py calls sys.exit()."""
    if ended.__context__ is None:  # not within an except clause, but after words of its own
        return f"no checkpoint in {folder} can be loaded, as Megatron says above; load another"
    return (
        f"the checkpoint in {folder} cannot be loaded: {_cause(ended.__context__)}; load another, "
        "or leave out --load to start anew"
    )


def _folder(args: argparse.Namespace, load_arg: str) -> str:
    return str(getattr(args, load_arg) or args.pretrained_checkpoint)


def _cause(error: BaseException) -> str:
    if isinstance(error, CheckpointException):  # torch's, around what each rank raised
        error = next((failure for failure, _ in error.failures.values()), error)
    # The advice of T/checkpointing.py:load_checkpoint is of an earlier format.
    text = str(error).replace("--ckpt-fully-parallel-save", "--dist-ckpt-optim-fully-reshardable")
    return f"{type(error).__name__}: {' '.join(text.split())[:400]}"
