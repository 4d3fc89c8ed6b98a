"""What a recomputed forward pass takes again from its first pass.

Activation checkpointing runs a forward pass twice: first without keeping activations, and again
inside the backward pass. In between, counters move on: the step, the microbatch, how often a layer
was called. A pass that is run again must see them as its first pass did, or it draws other noise.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any, cast

import torch
from torch.utils import checkpoint as torchs

_UNKNOWN = (
    "a forward pass inside a backward pass belongs to no checkpoint of PyTorch or Megatron: it "
    "draws the noise of the last forward pass; use torch.utils.checkpoint to recompute activations"
)
_ANOTHER = (
    "a recomputed forward pass calls a layer more often than its first pass did: what is "
    "checkpointed must do the same each time"
)


class Replay:
    """A value that every forward pass takes anew, and a recomputed one as its first pass did."""

    def __init__(self) -> None:
        self._latest: Any = None

    def take[T](self, fresh: Callable[[], T]) -> T:
        """fresh(), or in a recomputation what it returned in the first pass. Raises RuntimeError
        where a recomputation takes more values than its first pass did."""
        first_passes: list[Checkpoint] = []
        for checkpoint, again in reversed(_passes.running):
            if again:
                value = checkpoint.next_of(self)
                break
            first_passes.append(checkpoint)
        else:
            if torch._C._current_graph_task_id() != -1:
                warnings.warn(_UNKNOWN, stacklevel=2)
                return self._latest
            value = self._latest = fresh()
        for checkpoint in first_passes:
            checkpoint.keep(self, value)
        return cast(T, value)


class Checkpoint:
    """One checkpointed part of a forward pass: what every Replay took in its first pass, in order.

    Checkpoints may contain each other: the inner one's first pass is run again with the outer's.
    """

    def __init__(self) -> None:
        self._taken: dict[Replay, list[Any]] = {}
        self._next: dict[Replay, int] = {}

    def keep(self, replay: Replay, value: Any) -> None:
        self._taken.setdefault(replay, []).append(value)

    def next_of(self, replay: Replay) -> Any:
        values, place = self._taken.get(replay, []), self._next.get(replay, 0)
        if place == len(values):
            raise RuntimeError(_ANOTHER)
        self._next[replay] = place + 1
        return values[place]

    def first_pass(self) -> AbstractContextManager[None]:
        """The context in which the first pass runs."""
        return _passes.of(self, again=False)

    def run_again[**P, T](self, function: Callable[P, T]) -> Callable[P, T]:
        """`function`, each call of which is a recomputation."""

        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            self._next.clear()
            with _passes.of(self, again=True):
                return function(*args, **kwargs)

        return call


class _Passes(threading.local):
    """The checkpoints whose passes are under way in this thread, the innermost last."""

    def __init__(self) -> None:
        self.running: list[tuple[Checkpoint, bool]] = []

    @contextmanager
    def of(self, checkpoint: Checkpoint, again: bool) -> Iterator[None]:
        self.running.append((checkpoint, again))
        try:
            yield
        finally:
            self.running.pop()


_passes = _Passes()


def recomputed[**P, T](function: Callable[P, T]) -> Callable[P, T]:
    """A function for a checkpoint to run: its first call is the first pass, each later call a
    recomputation of it."""
    checkpoint = Checkpoint()
    run_again = checkpoint.run_again(function)
    is_first = True

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        nonlocal is_first
        if not is_first:
            return run_again(*args, **kwargs)
        is_first = False
        with checkpoint.first_pass():
            return function(*args, **kwargs)

    return call


def follow(checkpointing: type[torch.autograd.Function]) -> None:
    """Has the checkpoints of an autograd function followed, whose forward(ctx, run_function, ...)
    runs the first pass, and whose backward runs the same function again. Idempotent."""
    forward = checkpointing.forward
    if hasattr(forward, "__wrapped__"):
        return

    @wraps(forward)
    def followed(ctx: Any, run_function: Callable[..., Any], *args: Any) -> Any:
        return forward(ctx, recomputed(run_function), *args)

    checkpointing.forward = staticmethod(followed)  # type: ignore[method-assign]


class _Hook(torchs._checkpoint_hook):  # type: ignore[misc]
    """The context of the first pass of torch's checkpoints with use_reentrant=False; `frame` has
    the function that runs it again."""

    def __init__(self, frame: Any) -> None:
        super().__init__(frame)
        checkpoint = Checkpoint()
        frame.recompute_fn = checkpoint.run_again(frame.recompute_fn)
        self._first_pass = checkpoint.first_pass()

    def __enter__(self) -> None:
        self._first_pass.__enter__()
        super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._first_pass.__exit__(*raised)


follow(torchs.CheckpointFunction)
torchs._checkpoint_hook = _Hook  # type: ignore[misc]  # looked up for every checkpoint
