"""Sums of the operands of a whole step, with few launches of kernels."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from megatron_fp4.arithmetic.quantized_tensor import QuantizedTensor
from megatron_fp4.metrics import operands

# Elements of one kind that wait at most. Their sums take some 100 bytes of memory for each.
MOST_WAITING = 2**21
# Carriers that wait at most. A count that waits keeps the carriers' other counts, 4 bytes a row.
MOST_CARRIERS = 256


@dataclass
class _Waiting:
    """Parts of operands of one shape and quantizer: the places of their sums, and the parts."""

    places: list[int] = field(default_factory=list)
    exact: list[Tensor] = field(default_factory=list)
    quantized: list[QuantizedTensor] = field(default_factory=list)
    elements: int = 0


class Tally:
    """A table of sums of operands (`operands.operand_sums`), to which parts of operands are added.

    Parts of one shape wait for each other and are summed together, since the sums of one part
    launch some sixty kernels, whatever its size.
    """

    def __init__(self, places: int, device: torch.device) -> None:
        """places: the number of rows of the table. device: that of the operands."""
        self._table = torch.zeros(places, operands.WIDTH, dtype=torch.float64, device=device)
        self._waiting = defaultdict[Any, _Waiting](_Waiting)
        self._carriers: list[tuple[int, Tensor, int]] = []  # (place, rounded, elements)

    def add(self, place: int, x: Tensor, quantized: QuantizedTensor, share: float) -> None:
        """Adds a part that is small, or that is one of few; see `operands.operand_sums`."""
        self._table[place] += operands.operand_sums(x, quantized, share)

    def add_rows(self, place: int, x: Tensor, quantized: QuantizedTensor, share: float) -> None:
        """Adds rows [n, K] of an operand, such as those of `lines.rows_of`."""
        has_tensor_scale = quantized.tensor_scale is not None
        kind = quantized.quantizer, quantized.shape, x.dtype, has_tensor_scale, share
        waiting = self._waiting[kind]
        waiting.places.append(place)
        waiting.exact.append(x)
        waiting.quantized.append(quantized)
        waiting.elements += x.numel()
        if waiting.elements >= MOST_WAITING:
            self._sum(self._waiting.pop(kind), share)

    def add_carriers(self, place: int, rounded: Tensor, elements: int) -> None:
        """Adds carriers of an operand. rounded: [], how many of the elements they rounded."""
        self._carriers.append((place, rounded, elements))
        if len(self._carriers) >= MOST_CARRIERS:
            self._sum_carriers()

    def take(self) -> Tensor:
        """The table, float64 [places, WIDTH]. It begins anew after that."""
        for (*_, share), waiting in self._waiting.items():
            self._sum(waiting, share)
        self._waiting.clear()
        if self._carriers:
            self._sum_carriers()
        found, self._table = self._table, torch.zeros_like(self._table)
        return found

    def _sum(self, waiting: _Waiting, share: float) -> None:
        sums = operands.sums_of_parts(
            torch.cat(waiting.exact), _stacked(waiting.quantized), len(waiting.places), share
        )
        self._add(waiting.places, sums)

    def _sum_carriers(self) -> None:
        places, rounded, elements = zip(*self._carriers, strict=True)
        self._add(places, operands.carrier_sums(torch.stack(rounded), self._tensor(elements)))
        self._carriers.clear()

    def _add(self, places: Sequence[int], sums: Tensor) -> None:
        """Adds row i of `sums` to row places[i] of the table. A place may occur more than once."""
        for parts in _turns(places):
            rows = self._tensor([places[part] for part in parts])
            self._table.index_add_(0, rows, sums[self._tensor(parts)])

    def _tensor(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, device=self._table.device)


def _turns(places: Sequence[int]) -> list[list[int]]:
    """The parts of each turn: in one turn every place has a part at most, so that the order of the
    sums is the same in every run."""
    turns: list[list[int]] = []
    count = Counter[int]()
    for part, place in enumerate(places):
        if count[place] == len(turns):
            turns.append([])
        turns[count[place]].append(part)
        count[place] += 1
    return turns


def _stacked(each: list[QuantizedTensor]) -> QuantizedTensor:
    """One quantized matrix with the rows of several of one shape and quantizer, one below the
    other. Each row keeps its own tensor scale."""
    rows, k = each[0].shape
    scales = [part.tensor_scale.expand(rows, 1) for part in each if part.tensor_scale is not None]
    return replace(
        each[0],
        codes=torch.cat([part.codes for part in each]),
        scales=torch.cat([part.scales for part in each]),
        tensor_scale=torch.cat(scales) if scales else None,
        counts=None,
        shape=torch.Size((rows * len(each), k)),
    )
