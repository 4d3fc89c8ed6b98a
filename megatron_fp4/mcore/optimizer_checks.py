"""Which optimizers run, and which saved state a launch can go on from.

C stands for megatron/core, T for megatron/training.
"""

import argparse
import functools
import os
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.optimizer.emerging_optimizers import AdaptiveMuon
from megatron.training import checkpointing, global_vars

from megatron_fp4.errors import ConfigError


def install() -> None:
    """Puts `check_saved` where checkpoints are opened; harmless when called again."""
    if not hasattr(checkpointing._load_base_checkpoint, "_checks_optimizers"):
        checkpointing._load_base_checkpoint = _checked(checkpointing._load_base_checkpoint)


def check(args: argparse.Namespace) -> None:
    """Raises ConfigError for an optimizer that does not run, or cannot be saved, as asked for."""
    name, sharded = args.optimizer, args.use_distributed_optimizer
    for flag in ("--use-torch-fsdp2", "--use-megatron-fsdp"):
        if getattr(args, flag[2:].replace("-", "_")) and not torch.cuda.is_available():
            raise ConfigError(
                f"{flag} needs a GPU and this machine shows none: use --use-distributed-optimizer"
            )
    if name == "adam":
        return
    if name == "sgd":
        if sharded:
            raise ConfigError(
                "--optimizer sgd does not support --use-distributed-optimizer: leave it out"
            )
        return
    if args.fp16:
        raise ConfigError(f"--optimizer {name} does not support --fp16: use --bf16")
    if sharded or name == "dist_muon":
        without = "muon" if name == "dist_muon" else name
        remedy = f"use --optimizer {without} without --use-distributed-optimizer"
        if not args.bf16:
            raise ConfigError(f"--optimizer {name}, distributed, needs --bf16: add it, or {remedy}")
        if args.distributed_backend == "gloo" and _data_parallel_size(args) > 1:
            raise ConfigError(
                f"--optimizer {name}, distributed, gathers shards of unequal sizes, which gloo "
                f"does not: {remedy}"
            )
    if name == "adaptive_muon" and hasattr(AdaptiveMuon, "_apply_muon_scale"):
        raise ConfigError(
            "--optimizer adaptive_muon of Megatron-core 0.19 does not run with the installed "
            "emerging-optimizers (0.3 changed it): use --optimizer muon"
        )
    # C/dist_checkpointing/optimizer.py saves tensors of a weight's shape. SOAP's factors are none.
    keeps = args.load or (args.save and not args.no_save_optim)
    if name == "soap" and keeps and args.ckpt_format != "torch":
        raise ConfigError(
            f"--ckpt-format {args.ckpt_format} cannot hold the state of --optimizer soap: "
            "use --ckpt-format torch"
        )


def _data_parallel_size(args: argparse.Namespace) -> int:
    """Before Megatron has computed it."""
    model = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    return int(os.environ.get("WORLD_SIZE", "1")) // (model * args.context_parallel_size)


def check_saved(saved: argparse.Namespace, args: argparse.Namespace) -> None:
    """Raises ConfigError if a checkpoint lacks the optimizer state that a launch goes on from.

    saved: the arguments of the run that saved it. args: the launch's.
    """
    if args.finetune or args.no_load_optim:
        return
    remedy = "or add --no-load-optim to start with a new state"
    if getattr(saved, "no_save_optim", None):
        raise ConfigError(
            f"the checkpoint in {args.load} was saved with --no-save-optim: load another, {remedy}"
        )
    if saved.optimizer != args.optimizer:
        raise ConfigError(
            f"the checkpoint in {args.load} has the state of --optimizer {saved.optimizer}: "
            f"launch with that, {remedy}"
        )
    then, now = (run.bf16 or run.fp16 for run in (saved, args))
    sharded = args.use_distributed_optimizer and args.dist_ckpt_optim_fully_reshardable
    if then != now and not sharded:  # there all main weights have one name
        was = "in 16 bits, with FP32 main weights" if then else "in FP32"
        flag = "with --bf16 or --fp16" if then else "without --bf16 and --fp16"
        raise ConfigError(
            f"the checkpoint in {args.load} was trained {was}: launch {flag}, {remedy}"
        )


def _checked(upstream: Callable[..., Any]) -> Callable[..., Any]:
    # T/checkpointing.py:load_checkpoint calls it for what a checkpoint says of itself and then for
    # its tensors, those of the optimizer included.
    @functools.wraps(upstream)
    def _load_base_checkpoint(load_dir: Any, args: argparse.Namespace, **kwargs: Any) -> Any:
        state, name, release, kind = upstream(load_dir, args, **kwargs)
        is_launch = global_vars._GLOBAL_ARGS is args  # --use-checkpoint-args comes before
        if state is not None and "args" in state and is_launch and not release:
            check_saved(state["args"], args)
        return state, name, release, kind

    _load_base_checkpoint._checks_optimizers = True  # type: ignore[attr-defined]
    return _load_base_checkpoint
