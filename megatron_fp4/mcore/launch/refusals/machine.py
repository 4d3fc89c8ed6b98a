"""Refuses flags that need a GPU on a machine without one, and a process without a launcher."""

import os
from argparse import Namespace
from collections.abc import Iterator

import torch

from megatron_fp4.mcore.arguments.flag_names import flag_of

# Arguments for which Megatron calls CUDA. Without a GPU it ends with a traceback, or, for the
# sniff test, computes for more than eight minutes before the first step.
_NEEDS_A_GPU = (
    "gpu_sniff_test_interval",
    "log_device_memory_used",
    "moe_routing_trace_path",
    "record_memory_history",
)


def gpu(args: Namespace) -> Iterator[str]:
    """Refuses flags that need CUDA on a machine without a GPU, and PyTorch's profiler without a
    folder for its traces."""
    has_gpu = torch.cuda.is_available()
    if not has_gpu and args.distributed_backend != "gloo":
        yield (
            f"--distributed-backend {args.distributed_backend} needs a GPU and this machine shows "
            "none; leave it out (gloo is the default here) or use --distributed-backend gloo"
        )
    if args.cuda_graph_impl != "none" and not has_gpu:
        yield (
            f"--cuda-graph-impl {args.cuda_graph_impl} needs a GPU and this machine shows none: "
            "leave it out"
        )
    for name in _NEEDS_A_GPU:
        if getattr(args, name) and not has_gpu:
            yield f"{flag_of(name)} needs a GPU and this machine shows none: leave it out"
    if args.profile and args.use_pytorch_profiler and not args.tensorboard_dir:
        yield (
            "--use-pytorch-profiler writes its traces beside TensorBoard's logs: add "
            "--tensorboard-dir DIR"
        )
    if args.profile and not (args.use_pytorch_profiler or has_gpu):
        yield (
            "--profile needs a GPU and this machine shows none: leave it out, or add "
            "--use-pytorch-profiler and --tensorboard-dir DIR"
        )


def launcher(args: Namespace) -> Iterator[str]:
    """Refuses a process that was not started by a launcher such as torchrun.

    torch.distributed needs the MASTER_ADDR that a launcher sets.
    """
    if "MASTER_ADDR" not in os.environ:
        yield "no launcher: start this script by torchrun --nproc-per-node N"
