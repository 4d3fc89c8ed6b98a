"""The entry point of a training process.

    torchrun --nproc-per-node N pretrain_gpt.py <Megatron's flags>
    torchrun --nproc-per-node N -m megatron_fp4.mcore.pretrain <Megatron's flags>

The second works away from the checkout.
The same command trains on a CPU over gloo and on GPUs over NCCL. A mistake in what was asked for
ends every rank with status 1 and is told once, in one line.
"""

import logging
import os
import re
import sys
import warnings
from datetime import timedelta
from typing import NoReturn

import torch

from megatron_fp4.errors import ConfigError
from megatron_fp4.mcore.runtime import cpu
from megatron_fp4.mcore.runtime.ranks import once

LESS_MEMORY = (
    "Lower --micro-batch-size, raise --tensor-model-parallel-size or "
    "--pipeline-model-parallel-size, shard the optimizer (--use-distributed-optimizer), or "
    "recompute activations (--recompute-activations)"
)


def main() -> None:
    """Trains as sys.argv and the launcher's environment say."""
    # T/arguments.py:validate_args demands it with tensor parallelism on Hopper and before; CUDA
    # reads it when it starts. A value of the user's own stays.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    _quiet()
    try:
        cpu.install()
        # They import megatron, which must find a device.
        from megatron_fp4.mcore.loop import gpt
        from megatron_fp4.mcore.model import graphs

        gpt.train()
        graphs.release()
    except ConfigError as error:
        # C/transformer/spec_utils.py:build_module adds this at each level that it builds.
        _end(re.sub(r"( when instantiating \w+)+$", "", str(error)))
    except torch.OutOfMemoryError as error:
        _end(f"{_first_sentence(error)} {LESS_MEMORY}")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _end(text: str) -> NoReturn:
    if _speaks():
        print(f"megatron-fp4: error: {text}", file=sys.stderr, flush=True)
    sys.exit(1)


def _first_sentence(error: Exception) -> str:
    """What was asked for; the allocator's advice that follows is of other remedies."""
    return re.split(r"(?<=\w\.) ", " ".join(str(error).split()))[0]


def _quiet() -> None:
    """Leaves out what Megatron and torch say about optional packages on every rank, at import.

    What runs in their place is in the arguments that rank 0 prints.
    """
    for start in (
        "Transformer Engine and Apex are not installed",
        "Apex is not installed",
        "Only transformer-engine>=1.7.0 supports MoE experts, but your version is 0.0.0",
        "absl.logging is not installed",
        "MimoModelConfig is experimental",  # 0.19.2 imports it for every model
        "torch.distributed is disabled, unavailable or uninitialized",  # in torch's checkpoints
        "The argument order of load has been changed",
        "Please use DTensor instead and we are deprecating ShardedTensor",
        "'pin_memory' argument is set as true but no accelerator is found",  # on a CPU
    ):
        warnings.filterwarnings("ignore", message=start)
    if not torch.cuda.is_available():  # "No CUDA runtime is found, using CUDA_HOME=..."
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)


def _speaks() -> bool:
    """True in one rank of those that failed, whichever comes first: torchrun ends the others as
    soon as one has left, be it the one that was to speak."""
    if torch.distributed.is_initialized():
        return once("error")
    try:  # at torchrun's own store, which outlives its ranks
        store = torch.distributed.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            timeout=timedelta(seconds=5),
        )
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return store.add(f"megatron_fp4:error:{attempt}", 1) == 1
    except (KeyError, torch.distributed.DistError):  # no launcher, or one that keeps no store
        return int(os.environ.get("LOCAL_RANK", "0")) == 0


if __name__ == "__main__":
    main()
