"""Megatron's CUDA graphs (--cuda-graph-impl local): each layer is captured when the first step has
ended, and replayed from then on. Python runs no more; what changes from one microbatch to the next
is read from memory.
"""

from __future__ import annotations

import gc

import torch
from megatron.core.transformer.cuda_graphs import is_graph_capturing, is_graph_warmup


def captures() -> bool:
    """Whether a layer that runs now is to be captured, or warmed up for that."""
    return bool(is_graph_capturing())


def warms_up() -> bool:
    """Whether it runs on anything that lies in memory, and for nothing."""
    return bool(is_graph_warmup())


def release() -> None:
    """Before process groups are destroyed: NCCL waits, without end, for graphs that captured it to
    be gone, and Megatron keeps its graphs."""
    for graph in [found for found in gc.get_objects() if type(found) is torch.cuda.CUDAGraph]:
        graph.reset()


class Clock:
    """Step and microbatch, where graphs read them."""

    def __init__(self, device: torch.device) -> None:
        # Kernels are compiled for tensors that begin at multiples of 16 bytes.
        words = torch.zeros(2, 2, dtype=torch.int64, device=device)
        self.step, self.microbatch = words[:, 0]

    def set(self, step: int, microbatch: int) -> None:
        """For what starts from now on, without waiting for what runs: forward and backward of one
        microbatch, since no pipeline has others under way."""
        self.step.fill_(step)
        self.microbatch.fill_(microbatch)
