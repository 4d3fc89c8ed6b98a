"""The recorder of what a pass of a linear runs, if one is active.

Kernels, products and collectives tell the recorder of their thread what they launch;
cpp/recorder.py is one. Operators of PyTorch need not: a recorder sees them by itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

# What an int32 argument of a kernel is, where it differs between the calls of a linear: the low
# word of the step, the words of the seed, and the microbatch of a Hadamard transform's signs.
WORDS = STEP, SEED_LOW, SEED_HIGH, DRAW = "step", "seed low", "seed high", "draw"


class Recorder(Protocol):
    """Notes what is launched, in order."""

    def launched(self, launch: Any, arguments: Sequence[Any]) -> None:
        """`launch` (a `kernels.launch.Launch`) was called with these arguments: tensors, addresses,
        integers and None."""
        ...

    def multiplied(self, product: Any) -> None:
        """cuBLASLt ran `product` (a `kernels.cublaslt.LaunchedProduct`)."""
        ...

    def started(self) -> int:
        """The operator that was called last has started a collective. Returns a number for it."""
        ...

    def waited(self, collective: int) -> None:
        """That collective was waited for."""
        ...

    def read(self, tensor: Tensor) -> None:
        """`tensor` was made before and stays as it is: the pass reads it in each of its calls."""
        ...

    def refuse(self, reason: str) -> None:
        """The pass did something that cannot be recorded. reason: in a few words."""
        ...


class _Current(threading.local):
    recorder: Recorder | None = None


current = _Current()


def lasting(make: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """make(*arguments), a tensor that stays as it is and that `make` caches.

    A recorder is told of the tensor, but not of what makes it: later calls find it in the cache.
    """
    if current.recorder is None:
        return make(*arguments)
    with recorded_by(None), _disable_current_modes():
        tensor = make(*arguments)
    current.recorder.read(tensor)
    return tensor


@contextmanager
def recorded_by(recorder: Recorder | None) -> Iterator[None]:
    """The context of a pass that `recorder` follows; of what no recorder follows, if it is None."""
    before, current.recorder = current.recorder, recorder
    try:
        yield
    finally:
        current.recorder = before
