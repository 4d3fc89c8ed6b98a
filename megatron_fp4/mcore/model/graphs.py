"""Support for Megatron's CUDA graphs (--cuda-graph-impl local).

Megatron captures each layer after the first step and replays it from then on. A replay runs no
Python code, so kernels read the step and the microbatch from GPU memory (`Clock`). Under pipeline
parallelism each microbatch has graphs of its own.
"""

from __future__ import annotations

import gc

import torch
from megatron.core.transformer.cuda_graphs import is_graph_capturing, is_graph_warmup
from torch import Tensor


def captures() -> bool:
    """Whether Megatron is capturing the layer that runs now, or running its warm-up."""
    return bool(is_graph_capturing())


def warms_up() -> bool:
    """Whether the layer that runs now is a warm-up before a capture.

    The input of a warm-up is uninitialized memory, and its output is discarded.
    """
    return bool(is_graph_warmup())


def release() -> None:
    """Frees all CUDA graphs. Call it before process groups are destroyed.

    Destroying an NCCL process group hangs while a graph exists that captured its collectives, and
    Megatron keeps references to its graphs.
    """
    for graph in [found for found in gc.get_objects() if type(found) is torch.cuda.CUDAGraph]:
        graph.reset()


class Clock:
    """The step and the microbatch in GPU memory, from where captured kernels read them."""

    def __init__(self, device: torch.device) -> None:
        # Kernels are compiled for tensors that begin at multiples of 16 bytes, so each of the two
        # numbers has 16 bytes.
        self._words = torch.zeros(2, 2, dtype=torch.int64, device=device)

    def set(self, step: int, microbatch: int) -> None:
        """Sets both numbers for the forward passes that start from now on.

        Does not wait for the GPU: the write is ordered after the kernels launched before.
        """
        self._words[0].fill_(step)
        self._words[1].fill_(microbatch)

    def read(self) -> tuple[Tensor, Tensor]:
        """(step, microbatch) of the forward pass that is being captured: int64 [] each.

        They are copies that each replay of the forward pass makes, and that its backward pass reads
        too. Under pipeline parallelism the clock has moved on by then: other microbatches run
        between the two passes. Each of these has graphs of its own, and so copies of its own.
        """
        step, microbatch = self._words.clone()[:, 0]
        return step, microbatch
