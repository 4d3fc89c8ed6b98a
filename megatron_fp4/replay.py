"""Gives a recomputed forward pass the counters of its first pass.

Activation checkpointing runs a forward pass twice: first without keeping activations, and again
inside the backward pass. Between the two, counters increase: the step, the microbatch, how often a
layer was called. The recomputation must read the values of the first pass, since other values would
give other random bits. This module therefore records them for PyTorch's checkpoints, reentrant or
not; `follow` adds other checkpointing functions.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any, cast

import torch
from torch.utils import checkpoint as torch_checkpoint

from megatron_fp4.caller import warn_caller

_UNKNOWN = (
    "a forward pass inside a backward pass belongs to no checkpoint of PyTorch or Megatron: it "
    "draws the random bits of the last forward pass; use torch.utils.checkpoint to recompute "
    "activations"
)
_ANOTHER = (
    "a recomputed forward pass calls a layer more often than its first pass did: what is "
    "checkpointed must do the same each time"
)


class Replay:
    """A value that changes from one forward pass to the next, and that recomputation repeats.

    A first pass takes a fresh value; its recomputation gets the same value again.
    """

    def __init__(self) -> None:
        self._latest: Any = None

    def take[T](self, fresh: Callable[[], T]) -> T:
        """Returns fresh(), or in a recomputation what fresh() returned in the first pass.

        Raises RuntimeError where a recomputation takes more values than its first pass did. Warns,
        and returns the last fresh value, in a forward pass that an unknown kind of checkpoint runs
        inside a backward pass, where there was a forward pass before.
        """
        first_passes: list[Checkpoint] = []
        for checkpoint, again in reversed(_passes.running):
            if again:
                value = checkpoint.next_of(self)
                break
            first_passes.append(checkpoint)
        else:
            if torch._C._current_graph_task_id() != -1 and self._latest is not None:
                warn_caller(_UNKNOWN)
            else:
                self._latest = fresh()
            value = self._latest
        for checkpoint in first_passes:
            checkpoint.keep(self, value)
        return cast(T, value)


class Checkpoint:
    """The values that each Replay took in the first pass of one checkpointed function, in order.

    Checkpoints may be nested. The outer one's recomputation then runs the inner one's first pass
    again.
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
        """`function`, wrapped so that each call is a recomputation of the first pass."""

        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            self._next.clear()
            with _passes.of(self, again=True):
                return function(*args, **kwargs)

        return call


class _Passes(threading.local):
    """The checkpoints whose passes are running in this thread, the innermost last."""

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
    """`function`, wrapped for a checkpoint: its first call is the first pass, and each later call
    is a recomputation."""
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
    """Records the first passes of a checkpointing autograd function, and replays their values.

    The function's forward(ctx, run_function, ...) must run the first pass, and its backward must
    run the same run_function again. Replaces `forward` of the class; a second call does nothing.
    """
    forward = checkpointing.forward
    if hasattr(forward, "__wrapped__"):
        return

    @wraps(forward)
    def followed(ctx: Any, run_function: Callable[..., Any], *args: Any) -> Any:
        return forward(ctx, recomputed(run_function), *args)

    checkpointing.forward = staticmethod(followed)  # type: ignore[method-assign]


class _Hook(torch_checkpoint._checkpoint_hook):  # type: ignore[misc]
    """The context of the first pass of torch's checkpoints with use_reentrant=False.

    frame: torch's state of one checkpoint, whose `recompute_fn` runs the pass again.
    """

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


follow(torch_checkpoint.CheckpointFunction)
torch_checkpoint._checkpoint_hook = _Hook  # type: ignore[misc]  # torch reads the name at every checkpoint
