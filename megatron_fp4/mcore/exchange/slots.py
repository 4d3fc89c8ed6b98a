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
from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

from megatron_fp4.arithmetic.messages import SLOTS, RankRounding
from megatron_fp4.arithmetic.philox import Key, stream_id
from megatron_fp4.execution.communication import Pending
from megatron_fp4.mcore.exchange.coding import Coding, coding_on
from megatron_fp4.mcore.exchange.pieces import Piece

SENT, SUMMED = stream_id("gradients:sent"), stream_id("gradients:sum")


class Slot(NamedTuple):
    """Two buffers of bytes: what a rank sends of a piece, and what it receives."""

    sent: Tensor
    received: Tensor


class Slots:
    """Sends pieces through the slots of this process, and keeps those that are on their way.

    capacity: the bytes of each buffer of a slot; the largest piece has to fit (`Piece.room`).
    device: the device of the gradients.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        self._coding = coding_on(device)
        self._flights: deque[_Flight] = deque()
        self._count = 0  # of pieces so far
        self._stream = torch.cuda.Stream(device)
        empty = partial(torch.empty, capacity, dtype=torch.uint8, device=device)
        with torch.cuda.stream(self._stream):
            self._slots = [Slot(empty(), empty()) for _ in range(SLOTS)]

    @property
    def bytes(self) -> int:
        """The bytes of all slots."""
        return sum(buffer.nbytes for slot in self._slots for buffer in slot)

    def send(self, pieces: Iterable[Piece], key: Key) -> Pending[None]:
        """Starts to send pieces, in their order.

        key: the key of the random bits by which they are rounded. Returns what waits until the sums
        are in the pieces' buffers.
        """
        sent = [self._send(piece, key) for piece in pieces]
        return Pending(lambda: self._finish(sent[-1]))

    @torch.no_grad()
    def _send(self, piece: Piece, key: Key) -> _Flight:
        self._stream.wait_stream(torch.cuda.current_stream())  # which made the gradients
        with torch.cuda.stream(self._stream):
            if len(self._flights) == SLOTS:
                self._flights.popleft().finish()
            flight = _Flight(piece, key, self._coding, self._slots[self._count % SLOTS])
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

    def __init__(self, piece: Piece, key: Key, coding: Coding, slot: Slot) -> None:
        """Encodes the piece, and sends each rank its shard."""
        self._piece, self._key, self._coding, self._slot = piece, key, coding, slot
        self._is_summed = False
        sent = slot.sent[: sum(piece.lengths)]
        coding.encode(piece, sent, RankRounding(key, SENT, piece.own))
        own, ranks = piece.lengths[piece.own], len(piece.lengths)
        self._received = slot.received[: ranks * own]
        self._work = dist.all_to_all_single(
            self._received, sent, [own] * ranks, piece.lengths, group=piece.group, async_op=True
        )

    def sum(self) -> None:
        """Sums what has arrived of this rank's shard; starts sending the sums, if all need them."""
        if self._is_summed:
            return
        self._is_summed = True
        self._work.wait()
        piece = self._piece
        if not piece.to_all:
            self._coding.sum(piece, self._received)
            return
        # Both buffers are free: what was sent has been received, and this rank's part is summed.
        rounding = RankRounding(self._key, SUMMED, piece.own)
        self._coding.encode_sums(piece, self._received, rounding)
        self._work = dist.all_gather_into_tensor(
            self._slot.sent[: piece.room], self._slot.received[: max(piece.lengths)],
            group=piece.group, async_op=True,
        )  # fmt: skip

    def finish(self) -> None:
        """Writes the sums into the buffer.

        All ranks, the owner of a shard too, go on with the values that were sent, so that their
        weights stay equal.
        """
        self.sum()
        if self._piece.to_all:
            self._work.wait()
            self._coding.decode(self._piece, self._slot.sent[: self._piece.room])
