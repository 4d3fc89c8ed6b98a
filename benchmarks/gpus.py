"""Names of the GPUs that a benchmark may use, for the launches that it starts."""

from __future__ import annotations

import os

import torch


def visible_gpus() -> tuple[str, ...]:
    """Each GPU as CUDA_VISIBLE_DEVICES names it in this process's environment; () without GPUs.

    A launch that a benchmark starts on one of them gets this name: a number counted from 0 would
    name another GPU where the benchmark itself may use some of a machine's GPUs only.
    """
    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return tuple(named.split(",")[:count] if named else map(str, range(count)))
