"""Pieces of gradient buckets on their way between data-parallel ranks, in a few buffers.

A bucket may be the whole model, so it is exchanged in pieces. Each piece has a slot, a pair of
buffers of bytes, until it has arrived; all groups of a process share the slots. A piece

1. is encoded and sent, each rank's shard to its owner (an all-to-all);
2. is summed by the owners. Without the distributed optimizer the sums are encoded and sent to all
   ranks (an all-gather);
3. is then decoded by all ranks.

All ranks have to start collectives in the same order. So pieces advance at points that the program
fixes, never where a collective is seen to have ended: before piece k is sent, piece k - 2, whose
slot it takes, goes through all of its stages; after that, piece k - 1 is summed. What waits for a
collective on a GPU is thereby enqueued as late as it may be.

Everything that is computed here runs on a stream of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

from megatron_fp4.arithmetic import messages
from megatron_fp4.arithmetic.messages import PIECES, GradientForm, Rounding
from megatron_fp4.arithmetic.philox import Key, stream_id
from megatron_fp4.arithmetic.segments import Segment
from megatron_fp4.execution.communication import Pending

SENT, SUMMED = stream_id("gradients:sent"), stream_id("gradients:sum")


class Slot(NamedTuple):
    """Two buffers of bytes: what a rank sends of a piece, and what it receives."""

    sent: Tensor
    received: Tensor


@dataclass(frozen=True)
class Piece:
    """What is exchanged at once.

    gradients: the buffer that it is a part of, one axis. shards: its segments, for each rank those
    that the rank owns. group: the ranks. to_all: whether all ranks get the sums, and not only the
    owners. key: of the random bits.
    """

    gradients: Tensor
    shards: Sequence[Sequence[Segment]]
    group: dist.ProcessGroup
    to_all: bool
    key: Key


class Slots:
    """The slots of a process, and the pieces in them.

    form: how gradients travel. capacity: the bytes that a buffer needs for the largest piece; see
    `room`. device: of the gradients.
    """

    def __init__(self, form: GradientForm, capacity: int, device: torch.device) -> None:
        self._form = form
        self._flights: deque[_Flight] = deque()
        self._count = 0  # of pieces so far
        self._stream = torch.cuda.Stream(device)
        empty = partial(torch.empty, capacity, dtype=torch.uint8, device=device)
        with torch.cuda.stream(self._stream):
            self._slots = [Slot(empty(), empty()) for _ in range(PIECES)]

    @property
    def bytes(self) -> int:
        """The bytes of all slots."""
        return sum(buffer.nbytes for slot in self._slots for buffer in slot)

    def send(self, pieces: Iterable[Piece]) -> Pending[None]:
        """Sends pieces. Once they are waited for, the sums are in their buffers."""
        sent = [self._send(piece) for piece in pieces]
        return Pending(lambda: self._finish(sent[-1]))

    @torch.no_grad()
    def _send(self, piece: Piece) -> _Flight:
        self._stream.wait_stream(torch.cuda.current_stream())  # which made the gradients
        with torch.cuda.stream(self._stream):
            if len(self._flights) == PIECES:
                self._flights.popleft().finish()
            flight = _Flight(piece, self._form, self._slots[self._count % PIECES])
            self._count += 1
            if self._flights:
                self._flights[-1].sum()
            self._flights.append(flight)
        return flight

    @torch.no_grad()
    def _finish(self, last: _Flight) -> None:
        """Takes the pieces up to this one through all of their stages, in their order."""
        with torch.cuda.stream(self._stream):
            while last in self._flights:
                self._flights.popleft().finish()
        torch.cuda.current_stream().wait_stream(self._stream)


class _Flight:
    """A piece on its way, in a slot."""

    def __init__(self, piece: Piece, form: GradientForm, slot: Slot) -> None:
        """Encodes the piece, and sends each rank its shard."""
        self._piece, self._form, self._slot = piece, form, slot
        self._ranks, self._own = piece.group.size(), piece.group.rank()
        self._lengths = [messages.length(shard, form) for shard in piece.shards]
        self._is_summed = False
        rounding = Rounding(piece.key, SENT, self._own)
        sent = slot.sent[: sum(self._lengths)]
        for shard, part in zip(piece.shards, sent.split(self._lengths), strict=True):
            values = messages.of_shard(piece.gradients, shard)
            part.copy_(messages.encoded(values, shard, form, rounding))
        own = self._lengths[self._own]
        self._work = dist.all_to_all_single(
            slot.received[: self._ranks * own], sent, [own] * self._ranks, self._lengths,
            group=piece.group, async_op=True,
        )  # fmt: skip

    def sum(self) -> None:
        """Sums what has arrived of this rank's shard; starts sending the sums, if all need them."""
        if self._is_summed:
            return
        self._is_summed = True
        self._work.wait()
        piece, form, own = self._piece, self._form, self._lengths[self._own]
        shard, received = piece.shards[self._own], self._slot.received
        arrived = [received[rank * own : (rank + 1) * own] for rank in range(self._ranks)]
        total = messages.summed(arrived, shard, form)
        if not piece.to_all:
            messages.store(total, shard, piece.gradients)
            return
        # Both buffers are free: what was sent has been received, and this rank's part is summed.
        rounding = Rounding(piece.key, SUMMED, self._own)
        received[:own] = messages.encoded(total, shard, form, rounding)
        longest = max(self._lengths)
        self._work = dist.all_gather_into_tensor(
            self._slot.sent[: self._ranks * longest], received[:longest],
            group=piece.group, async_op=True,
        )  # fmt: skip

    def finish(self) -> None:
        """Writes the sums into the buffer.

        All ranks, the owner of a shard too, go on with the values that were sent, so that their
        weights stay equal.
        """
        self.sum()
        if not self._piece.to_all:
            return
        self._work.wait()
        longest = max(self._lengths)
        for rank, shard in enumerate(self._piece.shards):
            message = self._slot.sent[rank * longest :][: self._lengths[rank]]
            values = messages.decoded(message, shard, self._form)
            messages.store(values, shard, self._piece.gradients)


def room(shards: Sequence[Sequence[Segment]], form: GradientForm) -> int:
    """The bytes that a buffer needs for a piece: messages of all ranks, padded to the longest."""
    return len(shards) * max(messages.length(shard, form) for shard in shards)
