"""Refuses saving that would overwrite another run, fail in the background, or cannot be written.

Whether a checkpoint fits the launch is checked when it is loaded (checkpoints/loading.py).
"""

import errno
import os
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import torch
from megatron.core.datasets.object_storage_utils import is_object_storage_path
from megatron.training.checkpointing import get_checkpoint_tracker_filename

from megatron_fp4.mcore.arguments import machine
from megatron_fp4.mcore.arguments.flag_names import flag_of


def background_save(args: Namespace) -> Iterator[str]:
    """Refuses --async-save where it would hang or fail.

    Without a GPU the worker process dies and the ranks wait for it. With other settings Megatron
    stops with a traceback after the first save.
    """
    if not args.async_save:
        return
    if args.ckpt_format == "torch":
        yield "--async-save does not save in --ckpt-format torch: leave out one"
    if not args.use_persistent_ckpt_worker:
        return  # Megatron prints that it ignores --async-save, and saves in the foreground
    if not torch.cuda.is_available():
        yield (
            "--async-save needs a GPU, which its worker asks for, and this machine shows none: "
            "leave it out"
        )
    if args.async_strategy == "nvrx" and not machine.installed("nvidia_resiliency_ext"):
        yield (
            "--async-save needs nvidia-resiliency-ext: pip install nvidia-resiliency-ext, or add "
            "--async-strategy mcore"
        )


def saving(args: Namespace) -> Iterator[str]:
    """Refuses intervals that save nothing, and --save into a folder that another run saved to."""
    if args.save is None:
        return
    if args.non_persistent_save_interval and args.non_persistent_ckpt_type is None:
        yield "--non-persistent-save-interval needs --non-persistent-ckpt-type global"
    if args.non_persistent_save_interval and args.ckpt_format == "torch":
        yield "--non-persistent-save-interval does not save in --ckpt-format torch: leave out one"
    if args.save_interval is None:
        yield "--save needs --save-interval N: the steps from checkpoint to checkpoint"
    tracker = Path(get_checkpoint_tracker_filename(args.save))
    if args.load is None and not is_object_storage_path(args.save) and tracker.is_file():
        yield (
            f"--save {args.save} has checkpoints of another run, which this one would write over: "
            f"add --load {args.save} to go on from them, or give another folder"
        )


def folders(args: Namespace) -> Iterator[str]:
    """Creates the folders that the launch writes to. Refuses one that cannot be written to."""
    for name in ("save", "tensorboard_dir", "wandb_save_dir", "data_cache_path"):
        folder = getattr(args, name)
        if folder is None or is_object_storage_path(folder):
            continue
        try:
            os.makedirs(folder, exist_ok=True)
            if not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            yield (
                f"{flag_of(name)} {folder} cannot be written ({error.strerror}): give another "
                "folder"
            )
