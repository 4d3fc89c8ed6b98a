"""Compares the run that saved a checkpoint with the launch that loads it, by their arguments.

Every checkpoint contains Megatron's arguments. This module compares what the saved state has to
fit: model, layout, optimizer and learning-rate schedule. compare_numerics.py compares the numerics.
T stands for megatron/training.
"""

import argparse
from collections.abc import Iterable

from megatron_fp4.convert.arguments import SHAPES
from megatron_fp4.errors import ConfigError
from megatron_fp4.mcore.arguments.flag_names import flag_of
from megatron_fp4.mcore.checkpoints.differences import was_and_is

_LAYOUT = (
    "tensor_model_parallel_size pipeline_model_parallel_size expert_model_parallel_size "
    "expert_tensor_parallel_size num_layers_per_virtual_pipeline_stage world_size"
).split()
_OPTIMIZER = "optimizer use_distributed_optimizer bf16 fp16 use_precision_aware_optimizer".split()
# Arguments from which T/training.py:get_optimizer_param_scheduler makes the schedule.
_SCHEDULE = (
    "train_iters train_samples global_batch_size lr min_lr decoupled_lr decoupled_min_lr "
    "lr_decay_style lr_decay_iters lr_decay_samples lr_warmup_iters lr_warmup_samples "
    "lr_warmup_fraction start_weight_decay end_weight_decay weight_decay_incr_style"
).split()
# More of these. Megatron does not save them with the schedule, so it does not compare them.
_WSD = "lr_wsd_decay_style lr_wsd_decay_iters lr_wsd_decay_samples".split()
# What the message calls an argument, where it is not the flag of the same name.
_FLAGS = {
    "padded_vocab_size": "the vocabulary with its padding (--vocab-size, "
    "--make-vocab-size-divisible-by)",
    "add_bias_linear": "biases (off: --disable-bias-linear)",
    "world_size": "the number of processes",
    "start_weight_decay": "--weight-decay (or --start-weight-decay)",
    "end_weight_decay": "--weight-decay (or --end-weight-decay)",
}


def differences(saved: argparse.Namespace, launch: argparse.Namespace) -> str:
    """The differences of model, layout and optimizer, as text with flags; "" if there are none."""
    return _differing([*SHAPES, *_LAYOUT, *_OPTIMIZER], saved, launch)


def other_schedule(saved: argparse.Namespace, launch: argparse.Namespace) -> str:
    """The differences of the schedules of learning rate and weight decay, and what to do.

    Text with flags for an error line; "" if there are no differences.
    """
    changed = _differing([*_SCHEDULE, *_WSD], saved, launch)
    return changed and (
        f"was trained with another schedule: {changed}; add --override-opt_param-scheduler to go "
        "on with this launch's, or give what was"
    )


def check_optimizer_state(saved: argparse.Namespace, launch: argparse.Namespace) -> None:
    """Raises ConfigError if a checkpoint does not have the optimizer state that the launch needs.

    saved: the arguments in the checkpoint. launch: the arguments of the launch.
    """
    if launch.no_load_optim:
        return
    if getattr(saved, "no_save_optim", None):
        misfit = "was saved with --no-save-optim; load another"
    elif changed := _differing(["optimizer"], saved, launch):
        misfit = f"was trained with another optimizer: {changed}; give what was"
    elif _has_main_weights(saved) != _has_main_weights(launch) and not _is_reshardable(launch):
        is_half = _has_main_weights(saved)
        was = "with --bf16 or --fp16" if is_half else "in FP32, without --bf16 and --fp16"
        misfit = f"was trained {was}; launch so"
    else:
        return
    raise ConfigError(
        f"the checkpoint in {launch.load} {misfit}, or add --no-load-optim to begin with a new "
        "optimizer state"
    )


def check_schedule(saved: argparse.Namespace, launch: argparse.Namespace) -> None:
    """Raises ConfigError if a launch changes the decay of a WSD learning-rate schedule.

    --override-opt_param-scheduler allows the change.
    """
    if launch.no_load_optim or launch.override_opt_param_scheduler:
        return
    if launch.lr_decay_style == "WSD" and _differing(_WSD, saved, launch):
        raise ConfigError(f"the checkpoint in {launch.load} {other_schedule(saved, launch)}")


def _has_main_weights(args: argparse.Namespace) -> bool:
    """Whether the optimizer keeps FP32 main weights beside 16-bit weights.

    They have names of their own in a checkpoint.
    """
    return args.bf16 or args.fp16


def _is_reshardable(args: argparse.Namespace) -> bool:
    """Whether the checkpoint names main weights alike for FP32, FP16 and BF16 training."""
    return args.use_distributed_optimizer and args.dist_ckpt_optim_fully_reshardable


def _differing(names: Iterable[str], saved: argparse.Namespace, launch: argparse.Namespace) -> str:
    missing = object()
    found = []
    for name in names:
        was, now = getattr(saved, name, missing), getattr(launch, name, missing)
        # An argument that one of the two versions does not have is not compared.
        if missing not in (was, now):
            found += was_and_is(_FLAGS.get(name, flag_of(name)), was, now)
    return "; ".join(found)
