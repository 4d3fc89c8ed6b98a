"""A process of a run: what it sets before Megatron is imported, and how it ends.

If the launch is refused (a ConfigError) or a GPU runs out of memory, the process exits with status
1, and one rank prints the error as one line.
"""

import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType

import torch

from megatron_fp4.errors import ConfigError
from megatron_fp4.mcore.runtime import cpu
from megatron_fp4.mcore.runtime.ranks import once

LESS_MEMORY = (
    "Lower --micro-batch-size, raise --tensor-model-parallel-size or "
    "--pipeline-model-parallel-size, shard the optimizer (--use-distributed-optimizer), or "
    "recompute activations (--recompute-activations)"
)


def prepare(ours: bool) -> None:
    """Sets the environment and the warnings. On a machine without a GPU the CPU stands in for it.

    ours: whether the script is pretrain_gpt.py and not a user's own. Call this function, or
    `prepare_torch`, before Megatron is imported. Raises ConfigError for GPUs that are not NVIDIA's.
    """
    prepare_torch(ours)
    cpu.install()


def prepare_torch(ours: bool) -> None:
    """The part of `prepare` that does not import megatron. ours: as there."""
    # megatron/training/arguments.py:validate_args requires 1 for tensor parallelism on Hopper and
    # older GPUs. CUDA reads the variable when it is initialized. A value that the user set is kept.
    # A user's script without a recipe keeps its environment; some of its flags may forbid the 1.
    if ours or any(word.partition("=")[0] == "--fp4-recipe" for word in sys.argv):
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    _quiet()
    cpu.install_in_torch()


@contextmanager
def ending_in_one_line() -> Iterator[None]:
    """A context in which a ConfigError or an out-of-memory error ends the process with one line.

    The exit status is 1. Without an error, process groups are destroyed at the end.
    """
    try:
        yield
    except (ConfigError, torch.OutOfMemoryError) as error:
        _tell(error)
        sys.exit(1)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def tell_uncaught(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    """A sys.excepthook with the lines of `ending_in_one_line`, for a process that others start."""
    if isinstance(error, ConfigError | torch.OutOfMemoryError):
        _tell(error)
    else:
        sys.__excepthook__(kind, error, traceback)


def _tell(error: Exception) -> None:
    # megatron/core/transformer/spec_utils.py:build_module appends "when instantiating ..." to an
    # error once for each nested module that it builds. Users do not need it.
    text = re.sub(r"( when instantiating \w+)+$", "", str(error))
    if isinstance(error, torch.OutOfMemoryError):
        text = f"{_first_sentence(error)} {LESS_MEMORY}"
    if _speaks():
        print(f"megatron-fp4: error: {text}", file=sys.stderr, flush=True)


def _first_sentence(error: Exception) -> str:
    """The first sentence of an error's text: for an out-of-memory error, the size that did not fit.

    The allocator's advice that follows is left out, since LESS_MEMORY gives other remedies.
    """
    return re.split(r"(?<=\w\.) ", " ".join(str(error).split()))[0]


def _quiet() -> None:
    """Suppresses the warnings about optional packages that Megatron and torch print on every rank.

    Nothing is lost: Megatron's arguments, which rank 0 prints or writes to start.log, show what
    runs instead of such a package.
    """
    for start in (
        "Transformer Engine and Apex are not installed",
        "Apex is not installed",
        "Only transformer-engine>=1.7.0 supports MoE experts, but your version is 0.0.0",
        "absl.logging is not installed",
        "MimoModelConfig is experimental",  # Megatron-core 0.19.2 imports it for every model
        "torch.distributed is disabled, unavailable or uninitialized",  # from its checkpoints
        "The argument order of load has been changed",
        "Please use DTensor instead and we are deprecating ShardedTensor",
        "'pin_memory' argument is set as true but no accelerator is found",  # on a CPU
    ):
        warnings.filterwarnings("ignore", message=start)
    if not torch.cuda.is_available():  # "No CUDA runtime is found, using CUDA_HOME=..."
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)


def _speaks() -> bool:
    """Whether this rank is to print the error: True in the first rank that asks.

    No rank is chosen in advance, because torchrun kills all other ranks as soon as one has exited.
    """
    if torch.distributed.is_initialized():
        return once("error")
    try:  # torchrun's own store, which exists longer than the ranks
        store = torch.distributed.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            timeout=timedelta(seconds=5),
        )
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return store.add(f"megatron_fp4:error:{attempt}", 1) == 1
    except (KeyError, torch.distributed.DistError):  # no launcher, or a launcher without a store
        return int(os.environ.get("LOCAL_RANK", "0")) == 0
