"""Microbatches that are drawn, recorded and served again, below Megatron's own data iterators.

A loader cannot go back: its sampler has moved on and its workers prefetch. What a loop draws while
it records is therefore kept in host memory. C stands for megatron/core.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from typing import Any

from megatron.core.rerun_state_machine import RerunDataIterator


class Recording(Iterator[Any]):
    """An iterator that can serve again what was drawn from it.

    Items are handed out as shallow copies, since a script may take entries out of a microbatch.
    """

    def __init__(self, source: Iterator[Any]) -> None:
        self._source = source
        self._ahead: deque[Any] = deque()  # served before anything else is drawn from the source
        self._drawn: list[Any] | None = None  # since `start`; None while nothing is recorded

    def __next__(self) -> Any:
        item = self._ahead.popleft() if self._ahead else next(self._source)
        if self._drawn is not None:
            self._drawn.append(item)
        return copy.copy(item)

    def start(self) -> None:
        """Records all items from the next one on."""
        self._drawn = []

    def rewind(self) -> None:
        """Serves the recorded items again, the first one next, and stops recording."""
        self._ahead.extendleft(reversed(self._drawn or ()))
        self._drawn = None


def recordings(data_iterator: Any) -> list[Recording]:
    """The recordings of what Megatron passes to its train_step as `data_iterator`.

    They are put below C/rerun_state_machine.py:RerunDataIterator, whose own replay of a step is not
    affected, by the first call. data_iterator: a RerunDataIterator or None, or a list of them, one
    for each model chunk. A rank without data has no recordings.
    """
    each = data_iterator if isinstance(data_iterator, list) else [data_iterator]
    return [_below(one) for one in each if one is not None]


def _below(iterator: RerunDataIterator) -> Recording:
    if not isinstance(iterator.iterable, Recording):
        iterator.iterable = Recording(iterator.iterable)
    return iterator.iterable
