"""What a recomputed forward pass takes again from its original."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def _once(value: Any) -> int:
    return 0


class Replay:
    """Gives a recomputed forward pass what its original had.

    Activation checkpointing runs a forward pass again inside backward, when counters have moved
    on. Its first pass runs without gradients; values taken then are queued, and passes inside
    backward take them in the same order (microbatches are recomputed first in, first out), but for
    the calls of one microbatch: backward comes to the last of them first. Other passes without
    gradients are never run again. Torch's non-reentrant checkpoints run the first pass with
    gradients: there a recomputation gets the value of the latest pass, which is its own where a
    layer runs once a step.

    repeat: how many calls of the same microbatch were before the one that a value is of.
    """

    def __init__(self, repeat: Callable[[Any], int] = _once) -> None:
        self._repeat = repeat
        self._queue: deque[Any] = deque()
        self._latest: Any = None

    def take(self, fresh: Callable[[], T], training: bool) -> T:
        """fresh(), or in a recomputation what it returned in the original pass."""
        if torch._C._current_graph_task_id() != -1:  # inside backward
            return self._queue.popleft() if self._queue else self._latest
        value = self._latest = fresh()
        if training and not torch.is_grad_enabled() and _in_checkpoint():
            self._queue.insert(len(self._queue) - self._repeat(value), value)
        return value


def _in_checkpoint() -> bool:
    """Whether a checkpoint's first pass is under way. The autograd functions of torch, Megatron and
    Transformer Engine that run one all take it as `run_function`, and leave no other trace."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if "run_function" in code.co_varnames[: code.co_argcount]:
            return True
        frame = frame.f_back
    return False
