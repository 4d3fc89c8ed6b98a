"""Checkpoints: a run goes on from one that is whole, with the numerics that made it, or stops.

What made a checkpoint is in Megatron's arguments, which every checkpoint carries (options.py). A
save that was killed, or files that were lost, are told in one line before anything is loaded.

T stands for megatron/training.
"""

import argparse
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import maybe_load_config
from megatron.training import checkpointing, get_args, print_rank_0, training
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException

from megatron_fp4.errors import ConfigError

# What must be as it was, besides the content of the recipe, for the numbers to be the same.
_FLAGS = {
    "fp4_numerics_version": "numerics version",
    "fp4_seed": "--fp4-seed",
    "first_last_layers_bf16": "--first-last-layers-bf16",
    "num_layers_at_start_in_bf16": "--num-layers-at-start-in-bf16",
    "num_layers_at_end_in_bf16": "--num-layers-at-end-in-bf16",
}
# Fields of a recipe with flags of their own, and those that change no number.
_SCHEDULE = {"bf16_after": "--fp4-bf16-after", "bf16_gemms": "--fp4-bf16-gemms"}
_WORDS = ("name", "description", "paper")
_SHOWN = 3  # differing fields of a recipe that the line names

# The files of a torch_dist checkpoint, first those without which it is none.
_FILES = ("metadata.json", ".metadata", "common.pt", "integrity.json", "*.distcp")


def install() -> None:
    """Puts the checks into Megatron's loading and saving; harmless when called again."""
    if hasattr(training.load_checkpoint, "__wrapped__"):
        return
    training.load_checkpoint = _in_one_line(training.load_checkpoint)
    checkpointing._load_base_checkpoint = _if_whole(checkpointing._load_base_checkpoint)
    checkpointing.check_checkpoint_args = _comparing(checkpointing.check_checkpoint_args)
    dist_checkpointing.save = _from_nothing(dist_checkpointing.save)


# --- the same numerics ---------------------------------------------------------------------------


def _comparing(upstream: Callable[..., None]) -> Callable[..., None]:
    # T/checkpointing.py:load_checkpoint calls it once, on every rank, and not with --finetune.
    @functools.wraps(upstream)
    def check_checkpoint_args(saved: argparse.Namespace, *args: Any, **kwargs: Any) -> None:
        upstream(saved, *args, **kwargs)
        compare(saved, get_args())

    return check_checkpoint_args


def compare(saved: argparse.Namespace, launch: argparse.Namespace) -> None:
    """Raises ConfigError where `launch` would go on from a checkpoint with other FP4 numerics than
    `saved`, the arguments in it, unless --fp4-load-anyway. Going from or to high precision is
    what a launch says itself: it is told, as another version of the plugin is."""
    then, now = (getattr(args, "fp4_recipe_content", None) for args in (saved, launch))
    if not (then and now):
        if then or now:
            words = [_spelled(saved) if then else "no recipe", _spelled(launch) if now else "none"]
            _tell("the checkpoint was trained with {}, this launch has {}".format(*words))
        return
    version = getattr(saved, "fp4_plugin_version", None)
    if version != launch.fp4_plugin_version:
        _tell(f"version {version} saved the checkpoint, this is {launch.fp4_plugin_version}")
    differing = "; ".join(_differences(saved, launch))
    if differing and not launch.fp4_load_anyway:
        raise ConfigError(
            f"the checkpoint was trained with other numerics: {differing}; give what was, or "
            "--fp4-load-anyway to go on with what is"
        )
    if differing:
        _tell(f"goes on from other numerics: {differing}")


def _differences(saved: argparse.Namespace, launch: argparse.Namespace) -> list[str]:
    found = []
    for name, flag in _FLAGS.items():
        found += _was_and_is(flag, getattr(saved, name, None), getattr(launch, name, None))
    # A file may change under its path, and a built-in recipe stand in a file: the content counts.
    old, new = (_fields(args.fp4_recipe_content) for args in (saved, launch))
    for name, flag in _SCHEDULE.items():
        found += _was_and_is(flag, old.pop(name, None), new.pop(name, None))
    if fields := _changed(old, new):
        found.append(f"--fp4-recipe was {_spelled(saved)} and is {_spelled(launch)} ({fields})")
    then, now = (_modules(args) for args in (saved, launch))
    if then != now:
        was, is_ = (_said(args.fp4_module_recipe) for args in (saved, launch))
        # Where the texts are equal, what changed is in a file of theirs.
        fields = "; ".join(_changed(a, b) for (_, a), (_, b) in zip(then, now, strict=False))
        shown = f" ({fields})" if fields else ""
        found.append(f"--fp4-module-recipe was {was} and is {is_}{shown}")
    return found


def _was_and_is(what: str, old: Any, new: Any) -> list[str]:
    # A flag that one of them has not got yet is as if left out.
    return [f"{what} was {_said(old)} and is {_said(new)}"] if (old or 0) != (new or 0) else []


def _changed(old: dict[str, Any], new: dict[str, Any]) -> str:
    """The first fields of a recipe that are others, as one text."""
    fields = []
    for name in sorted(old.keys() | new.keys()):
        fields += _was_and_is(name, old.get(name), new.get(name))
    return ", ".join(fields[:_SHOWN] + ["..."] * (len(fields) > _SHOWN))


def _modules(args: argparse.Namespace) -> list[tuple[str, dict[str, Any]]]:
    """Each --fp4-module-recipe: its glob and its recipe's fields; none of BF16."""
    given = getattr(args, "fp4_module_contents", [])
    return [(glob, _fields(content) if content else {}) for glob, content in given]


def _fields(content: str) -> dict[str, Any]:
    """A recipe's content as one level of fields: fprop.a.rule and its like."""
    return _flat(json.loads(content))


def _flat(recipe: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in recipe.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        elif prefix or name not in _WORDS:
            flat[prefix + name] = value
    return flat


def _spelled(args: argparse.Namespace) -> str:
    return " ".join([args.fp4_recipe, *args.fp4_recipe_option])


def _said(value: Any) -> str:
    if value is None or value is False or value == []:
        return "none"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _tell(line: str) -> None:
    print_rank_0(f"megatron-fp4: {line}")


# --- a whole checkpoint --------------------------------------------------------------------------


def _if_whole(upstream: Callable[..., Any]) -> Callable[..., Any]:
    # T/checkpointing.py reads what a checkpoint says of itself (rank0=True) before its tensors. A
    # tracker that says nothing would end the run there with status 0, a missing one start it anew.
    @functools.wraps(upstream)
    def _load_base_checkpoint(
        load_dir: str | None, args: argparse.Namespace, rank0: bool = False, **kwargs: Any
    ) -> Any:
        if rank0 and load_dir is not None and _is_judged(args):
            problem = [problem_in(Path(load_dir), args.ckpt_step)]
            if torch.distributed.is_initialized():  # all stop or none, whatever each can see
                torch.distributed.broadcast_object_list(problem, src=0)
            if problem[0] is not None:
                raise ConfigError(problem[0])
        return upstream(load_dir, args, rank0=rank0, **kwargs)

    return _load_base_checkpoint


def _is_judged(args: argparse.Namespace) -> bool:
    plain = args.non_persistent_ckpt_type is None and not args.enable_msc
    return plain and args.ckpt_format == "torch_dist"


def problem_in(folder: Path, step: int | None = None) -> str | None:
    """Why a run cannot go on from `folder`, and what to do; None if it can, or finds nothing there.

    step: the iteration asked for, or None for the one that the tracker file names.
    """
    tracker = Path(checkpointing.get_checkpoint_tracker_filename(folder))
    named = tracker.read_text(errors="replace").strip() if tracker.is_file() else None
    if named is None and step is None and _last_whole(folder) is None:
        return None
    if named is None and step is None:
        problem = f"{folder} holds a checkpoint and no {tracker.name}"
    elif named is not None and named != "release" and not named.isdecimal():
        problem = f"{tracker} names no iteration but {named[:20]!r}"
    else:
        release = named == "release"
        iteration = 0 if release else step or int(named or 0)
        name = checkpointing.get_checkpoint_name(folder, iteration, release, return_base_dir=True)
        flaw = flaw_of(Path(name))
        if flaw is None:
            return None
        problem = f"{name} is not a whole checkpoint: {flaw}"
    last = _last_whole(folder)
    if last is None:
        return (
            f"{problem}; none there is whole: remove {folder}, or leave out --load, to start anew"
        )
    if step is not None and (named is None or named.isdecimal()):
        return f"{problem}; the last whole one is --ckpt-step {last}"
    return f"{problem}; write {last} into {tracker} to go on from the last whole one"


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


def _in_one_line(upstream: Callable[..., Any]) -> Callable[..., Any]:
    # T/training.py:setup_model_and_optimizer calls it: what cannot be read, or does not fit the
    # model, would be a traceback from every rank.
    @functools.wraps(upstream)
    def load_checkpoint(*args: Any, load_arg: str = "load", **kwargs: Any) -> Any:
        try:
            return upstream(*args, load_arg=load_arg, **kwargs)
        except ConfigError:
            raise
        except (Exception, CheckpointException) as error:  # torch's is no Exception
            folder = getattr(get_args(), load_arg) or get_args().pretrained_checkpoint
            raise ConfigError(
                f"the checkpoint in {folder} cannot be loaded: {_cause(error)}; launch with the "
                "model, layout and optimizer that saved it, or load another"
            ) from error

    return load_checkpoint


def _cause(error: BaseException) -> str:
    if isinstance(error, CheckpointException):  # torch's, around what each rank raised
        error = next((failure for failure, _ in error.failures.values()), error)
    # The advice of T/checkpointing.py:load_checkpoint is of an earlier format.
    text = str(error).replace("--ckpt-fully-parallel-save", "--dist-ckpt-optim-fully-reshardable")
    return f"{type(error).__name__}: {' '.join(text.split())[:400]}"
