"""Refuses optimizers that do not run with the given dtype, sharding or checkpoint format.

C stands for megatron/core.
"""

import os
from argparse import Namespace
from collections.abc import Iterator

import torch
from megatron.core.optimizer.emerging_optimizers import AdaptiveMuon

from megatron_fp4.mcore.arguments.flag_names import flag_of


def choice(args: Namespace) -> Iterator[str]:
    """Refuses an optimizer that would fail in training or in saving, with the other flags."""
    name, sharded = args.optimizer, args.use_distributed_optimizer
    for fsdp in ("use_torch_fsdp2", "use_megatron_fsdp"):
        if getattr(args, fsdp) and not torch.cuda.is_available():
            yield (
                f"{flag_of(fsdp)} needs a GPU and this machine shows none: "
                "use --use-distributed-optimizer"
            )
    if name == "adam":
        return
    if name == "sgd":
        if sharded:
            yield "--optimizer sgd does not support --use-distributed-optimizer: leave it out"
        return
    if args.fp16:
        yield f"--optimizer {name} does not support --fp16: use --bf16"
    if sharded or name == "dist_muon":
        without = "muon" if name == "dist_muon" else name
        remedy = f"use --optimizer {without} without --use-distributed-optimizer"
        if not args.bf16:
            yield f"--optimizer {name}, distributed, needs --bf16: add it, or {remedy}"
        if args.distributed_backend == "gloo" and _data_parallel_size(args) > 1:
            yield (
                f"--optimizer {name}, distributed, gathers shards of unequal sizes, which gloo "
                f"does not: {remedy}"
            )
    if name == "adaptive_muon" and hasattr(AdaptiveMuon, "_apply_muon_scale"):
        yield (
            "--optimizer adaptive_muon of Megatron-core 0.19 does not run with the installed "
            "emerging-optimizers (0.3 changed it): use --optimizer muon"
        )
    # C/dist_checkpointing/optimizer.py can save only tensors of the weight's shape. SOAP's factors
    # have other shapes.
    keeps = args.load or (args.save and not args.no_save_optim)
    if name == "soap" and keeps and args.ckpt_format != "torch":
        yield (
            f"--ckpt-format {args.ckpt_format} cannot hold the state of --optimizer soap: "
            "use --ckpt-format torch"
        )


def is_layer_wise(args: Namespace) -> bool:
    """Whether Megatron's layer-wise optimizer runs, which gives whole weights to single ranks."""
    return args.use_distributed_optimizer and args.optimizer not in ("adam", "sgd")


def _data_parallel_size(args: Namespace) -> int:
    """The number of data-parallel ranks. Megatron computes args.data_parallel_size only later."""
    model = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    return int(os.environ.get("WORLD_SIZE", "1")) // (model * args.context_parallel_size)
