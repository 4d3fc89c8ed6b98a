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


class RewindingIterator(Iterator[Any]):
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


def rewinding_iterators(data_iterator: Any) -> list[RewindingIterator]:
    """The iterators that rewind what Megatron passes to its train_step as `data_iterator`.

    The first call puts them below C/rerun_state_machine.py:RerunDataIterator, whose own replay of a
    step is not affected. data_iterator: a RerunDataIterator or None, or a list of them, one
    for each model chunk. Empty on a rank without data.
    """
    each = data_iterator if isinstance(data_iterator, list) else [data_iterator]
    return [_below(one) for one in each if one is not None]


def _below(iterator: RerunDataIterator) -> RewindingIterator:
    if not isinstance(iterator.iterable, RewindingIterator):
        iterator.iterable = RewindingIterator(iterator.iterable)
    return iterator.iterable
