"""Loads checkpoints: checks that they are complete, unchanged and have the launch's numerics.

Otherwise the launch stops with one line. Files are checked before anything is loaded from them
(folders.py, integrity.py). Every checkpoint contains the arguments of its run, which are compared
with those of the launch (compare_numerics.py, compare_state.py).

T stands for megatron/training.
"""

import argparse
import functools
import pickle
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import megatron.core
import torch
from megatron.core import optimizer_param_scheduler
from megatron.core.rerun_state_machine import RerunState, get_rerun_state_machine
from megatron.training import checkpointing, get_args, print_rank_0, training
from torch.distributed.checkpoint.api import CheckpointException

from megatron_fp4.errors import ConfigError
from megatron_fp4.mcore.checkpoints import compare_state, folders, integrity, saving
from megatron_fp4.mcore.checkpoints.compare_numerics import compare
from megatron_fp4.mcore.runtime.ranks import on_first

# Arguments by which two checkpoints of one state differ.
_FORM = ("ckpt_format", "dist_ckpt_optim_fully_reshardable")
_of_checkpoint: list[argparse.Namespace] = []  # [arguments in the checkpoint that is being loaded]
# Where code lies that is not the user's. Megatron and this package may lie in checkouts.
_LIBRARIES = (
    *(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")),
    Path(megatron.core.__file__).parents[1],
    Path(__file__).parents[2],
)


def install() -> None:
    """Adds the checks to Megatron's functions that load and save checkpoints. Idempotent."""
    if hasattr(training.load_checkpoint, "__wrapped__"):
        return
    training.load_checkpoint = _in_one_line(training.load_checkpoint)
    checkpointing._load_base_checkpoint = _checking_files(checkpointing._load_base_checkpoint)
    checkpointing.check_checkpoint_args = _comparing(checkpointing.check_checkpoint_args)
    checkpointing.load_args_from_checkpoint = _in_one_line_at_parsing(
        checkpointing.load_args_from_checkpoint
    )
    torch.load = _without_advice(torch.load)
    saving.install()


# --- numerics ------------------------------------------------------------------------------------


def _comparing(upstream: Callable[..., None]) -> Callable[..., None]:
    # T/checkpointing.py:load_checkpoint calls check_checkpoint_args once on every rank, except with
    # --finetune.
    @functools.wraps(upstream)
    def check_checkpoint_args(saved: argparse.Namespace, *args: Any, **kwargs: Any) -> None:
        upstream(saved, *args, **kwargs)
        compare(saved, get_args())

    return check_checkpoint_args


# --- complete and unchanged files ----------------------------------------------------------------


def _checking_files(upstream: Callable[..., Any]) -> Callable[..., Any]:
    # T/checkpointing.py calls _load_base_checkpoint twice, first for the metadata (rank0=True) and
    # then for the tensors; for the format torch it calls it once for both. There, an invalid
    # tracker file would end the run with status 0, and without one training would start anew.
    @functools.wraps(upstream)
    def _load_base_checkpoint(
        load_dir: str | None, args: argparse.Namespace, rank0: bool = False, **kwargs: Any
    ) -> Any:
        is_first = rank0 or args.ckpt_format == "torch"
        if is_first and load_dir is not None and _can_check_files(args):
            _check_files(Path(load_dir), args)
        loaded = upstream(load_dir, args, rank0=rank0, **kwargs)
        state, _, release, _ = loaded
        saved = state.get("args") if state else None
        if saved is not None:
            _of_checkpoint[:] = [saved]
            goes_on = not (args.finetune or release)
            # Once process groups exist, all arguments of the launch are known.
            if goes_on and torch.distributed.is_initialized():
                compare_state.check_optimizer_state(saved, args)
                compare_state.check_schedule(saved, args)
        return loaded

    return _load_base_checkpoint


def _check_files(load_dir: Path, args: argparse.Namespace) -> None:
    """Raises ConfigError if the launch cannot resume from `load_dir`, on all ranks or on none.

    A folder without checkpoints is accepted, except with --exit-on-missing-checkpoint.
    """
    places = folders.load_places(args, load_dir)
    problem = on_first(lambda: folders.problem_in(*places))
    path = None if problem else on_first(lambda: folders.chosen(*places))
    if path is None:
        problem = problem or _nothing_to_load(load_dir, args)
    elif _is_misread(path, args):
        problem = f"{path} is of the format torch_dist: leave out --ckpt-format torch"
    elif (flaw := _changed(path, args)) is not None:
        remedy = on_first(lambda: folders.remedy(*places, damaged=path))
        problem = f"{path} is damaged: {flaw}; {remedy}"
    if problem is not None:
        raise ConfigError(problem)


def _nothing_to_load(load_dir: Path, args: argparse.Namespace) -> str | None:
    if args.exit_on_missing_checkpoint:
        return (
            f"no checkpoint in {load_dir}: give --load the folder of one, or leave out "
            "--exit-on-missing-checkpoint to start from random weights"
        )
    if torch.distributed.is_initialized():
        print_rank_0(f"megatron-fp4: no checkpoint in {load_dir}: starts from random weights")
    return None


def _is_misread(path: Path, args: argparse.Namespace) -> bool:
    torch_only = args.ckpt_format == "torch" and not args.auto_detect_ckpt_format
    return torch_only and (path / "metadata.json").exists()


def _changed(path: Path, args: argparse.Namespace) -> str | None:
    # While arguments are parsed there are no process groups yet over which the hashing could be
    # divided. The same checkpoint is loaded again later, and verified then.
    if not (torch.distributed.is_initialized() and args.fp4_verify_integrity):
        return None
    if integrity.is_covered(path):
        return integrity.flaw_of(path)
    print_rank_0(
        f"megatron-fp4: {path} was not verified: it has no {integrity.INTEGRITY_FNAME} (saved by "
        "an older version, or with --no-verify-integrity)"
    )
    return None


def _can_check_files(args: argparse.Namespace) -> bool:
    """Whether checkpoints are of a format that folders.py knows, in a folder of a file system."""
    plain = args.non_persistent_ckpt_type in (None, "global") and not args.enable_msc
    return plain and args.ckpt_format in ("torch_dist", "torch")


# --- errors in loading, as one line --------------------------------------------------------------


def _in_one_line(upstream: Callable[..., Any]) -> Callable[..., Any]:
    # T/training.py:setup_model_and_optimizer calls load_checkpoint. If a checkpoint cannot be read
    # or does not fit the model, upstream prints a traceback on every rank or exits with status 0.
    @functools.wraps(upstream)
    def load_checkpoint(*args: Any, load_arg: str = "load", **kwargs: Any) -> Any:
        try:
            loaded = upstream(*args, load_arg=load_arg, **kwargs)
        except (ConfigError, torch.OutOfMemoryError):
            raise
        except SystemExit as ended:
            raise ConfigError(_given_up(_folder(get_args(), load_arg), ended)) from ended
        except (Exception, CheckpointException) as error:  # CheckpointException is no Exception
            if _is_users(error):
                raise
            raise ConfigError(_unfit(_folder(get_args(), load_arg), error)) from error
        _tell_of_rerun()
        if load_arg == "load":
            _end_if_trained(get_args(), loaded[0])
        return loaded

    return load_checkpoint


def _tell_of_rerun() -> None:
    """Says so if Megatron will run only one step after a checkpoint, which failed before. It ends
    the launch after this step even if the step now succeeds."""
    if get_rerun_state_machine().state == RerunState.WILL_RERUN_FROM_CHECKPOINT:
        print_rank_0(
            "megatron-fp4: the step after this checkpoint had a NaN or an Inf: Megatron runs it "
            "again and then exits; add --rerun-mode disabled to train on"
        )


def _end_if_trained(launch: argparse.Namespace, step: int) -> None:
    """Says so if no step of the training is left after a checkpoint of `step` was loaded. Keeps the
    checkpoint then, if the launch would save it again."""
    if not launch.train_iters or step < launch.train_iters or launch.skip_train:
        return
    print_rank_0(
        f"megatron-fp4: the checkpoint is at step {step} of {launch.train_iters}: nothing is left "
        "to train; raise --train-iters to go on"
    )
    if _would_save_the_same(launch):
        saving.keep(step)


def _would_save_the_same(launch: argparse.Namespace) -> bool:
    """Whether the launch, if it saves before it trains, saves what the checkpoint has that it has
    loaded, in the same form and the same place."""
    in_part = launch.no_load_optim or launch.no_load_rng or launch.finetune
    [saved] = _of_checkpoint or [argparse.Namespace()]
    alike = all(getattr(saved, name, None) == getattr(launch, name) for name in _FORM)
    return launch.load == launch.save and launch.ckpt_step is None and alike and not in_part


def _in_one_line_at_parsing(upstream: Callable[..., Any]) -> Callable[..., Any]:
    # T/arguments.py:parse_and_validate_args calls this function for --use-checkpoint-args.
    @functools.wraps(upstream)
    def load_args_from_checkpoint(
        args: argparse.Namespace, load_arg: str = "load", **kwargs: Any
    ) -> Any:
        try:
            return upstream(args, load_arg=load_arg, **kwargs)
        except ConfigError:
            raise
        except SystemExit as ended:
            raise ConfigError(_given_up(_folder(args, load_arg), ended)) from ended
        except (Exception, CheckpointException) as error:
            raise ConfigError(
                f"the arguments of the checkpoint in {_folder(args, load_arg)} cannot be read: "
                f"{_cause(error)}; load another, or leave out --use-checkpoint-args"
            ) from error

    return load_args_from_checkpoint


def _given_up(folder: str, ended: SystemExit) -> str:
    """The error line for a sys.exit() in T/checkpointing.py. folder: the value of --load."""
    if ended.__context__ is None:  # it exits after printing a message, not because of an exception
        return f"no checkpoint in {folder} can be loaded, as Megatron says above; load another"
    return (
        f"the checkpoint in {folder} cannot be loaded: {_cause(ended.__context__)}; load another, "
        "or leave out --load to start anew"
    )


def _unfit(folder: str, error: BaseException) -> str:
    """The error line for a checkpoint whose state does not fit the launch, or cannot be read.

    folder: the value of --load. Names the arguments that differ from those of the checkpoint.
    """
    launch, cause = get_args(), _cause(error)
    saved = _of_checkpoint[0] if _of_checkpoint else None
    source = traceback.extract_tb(error.__traceback__)[-1].filename
    if saved and source == optimizer_param_scheduler.__file__:
        return f"the checkpoint in {folder} {compare_state.other_schedule(saved, launch) or cause}"
    changed = compare_state.differences(saved, launch) if saved else ""
    remedy = "give what was, or load another" if changed else "load another"
    # The error is about optimizer state that was saved as it was sharded in memory.
    if "optimizer.distributed.dp_group_idx" in cause or "dp_reshardable" in cause:
        remedy = (
            f"{'give what was, ' if changed else ''}or save with "
            "--dist-ckpt-optim-fully-reshardable to change the layout "
            "(--expert-model-parallel-size too; resume for a step in the old layout to save so), "
            "or load with --no-load-optim"
        )
    reason = changed or "its model, layout and optimizer are this launch's"
    return f"the checkpoint in {folder} cannot be loaded: {cause}; {reason}; {remedy}"


def _is_users(error: BaseException) -> bool:
    """Whether the user's own code raised an error, such as a layer that Megatron asks for its
    state. The checkpoint may then be good, and the traceback says more than one line."""
    source = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    return source.exists() and not any(map(source.is_relative_to, _LIBRARIES))


def _folder(args: argparse.Namespace, load_arg: str) -> str:
    return str(getattr(args, load_arg) or args.pretrained_checkpoint)


def _cause(error: BaseException) -> str:
    if isinstance(error, CheckpointException):  # contains the exception of each rank that failed
        error = next((failure for failure, _ in error.failures.values()), error)
    # T/checkpointing.py:load_checkpoint advises a flag of an older checkpoint format.
    text = str(error).replace("--ckpt-fully-parallel-save", "--dist-ckpt-optim-fully-reshardable")
    return f"{type(error).__name__}: {' '.join(text.split())[:400]}"


def _without_advice(upstream: Callable[..., Any]) -> Callable[..., Any]:
    # For a damaged file torch.load advises weights_only=False, which would run code from the file.
    # T/checkpointing.py prints that advice before this package could change it, so the text is
    # replaced here.
    @functools.wraps(upstream)
    def load(*args: Any, **kwargs: Any) -> Any:
        try:
            return upstream(*args, **kwargs)
        except pickle.UnpicklingError as error:
            if "weights_only" not in str(error):
                raise
            raise pickle.UnpicklingError(
                "what was pickled is damaged, or is no checkpoint"
            ) from None

    return load
