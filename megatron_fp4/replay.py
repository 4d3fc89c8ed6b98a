"""What a recomputed forward pass takes again from its original."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

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
    gradients: their values are kept with the checkpoint, in the order of its calls.

    repeat: how many calls of the same microbatch were before the one that a value is of.
    """

    def __init__(self, repeat: Callable[[Any], int] = _once) -> None:
        self._repeat = repeat
        self._queue: deque[Any] = deque()
        self._latest: Any = None
        self._calls: tuple[Any, int] = None, 0  # of a recomputation: which one, how many calls

    def take(self, fresh: Callable[[], T], training: bool) -> T:
        """fresh(), or in a recomputation what it returned in the original pass."""
        if (backward := torch._C._current_graph_task_id()) != -1:
            return self._again(backward)
        value = self._latest = fresh()
        if training and (checkpoint := _first_pass()) is not None:
            _taken.setdefault(checkpoint, {}).setdefault(self, []).append(value)
            return value
        if training and not torch.is_grad_enabled() and _in_checkpoint():
            self._queue.insert(len(self._queue) - self._repeat(value), value)
        return value

    def _again(self, backward: int) -> Any:
        """What the original pass had, in the backward pass of that number."""
        checkpoint = _recomputed()
        values = None if checkpoint is None else _taken.get(checkpoint, {}).get(self)
        if values is None:
            return self._queue.popleft() if self._queue else self._latest
        begun, calls = self._calls
        calls = calls if begun == (backward, id(values)) else 0
        self._calls = (backward, id(values)), calls + 1
        return values[calls]


# By non-reentrant checkpoint, as long as it lives: the values of its first pass.
_taken: WeakKeyDictionary[Any, dict[Replay, list[Any]]] = WeakKeyDictionary()


def _first_pass() -> Any:
    """The non-reentrant checkpoint whose first pass is under way, None if none is: its hook on
    saved tensors holds it as `frame`."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    code = None if hooks is None else getattr(hooks[0], "__code__", None)
    if hooks is None or code is None or "frame" not in code.co_freevars:
        return None
    held = (hooks[0].__closure__ or ())[code.co_freevars.index("frame")].cell_contents
    return held if type(held).__name__ == "_CheckpointFrame" else None


def _recomputed() -> Any:
    """The non-reentrant checkpoint that is being recomputed, None if none is: its hook on saved
    tensors is on the stack."""
    caller: FrameType | None = sys._getframe()
    while caller is not None:
        if caller.f_code.co_name == "unpack_hook" and "frame" in caller.f_code.co_freevars:
            return caller.f_locals["frame"]
        caller = caller.f_back
    return None


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
