"""Makes and reads the messages of pieces by kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from torch import Tensor

from megatron_fp4.arithmetic.messages import GradientForm, RankRounding
from megatron_fp4.arithmetic.segments import Segment
from megatron_fp4.kernels import messages as kernels
from megatron_fp4.kernels.messages import Table, table
from megatron_fp4.mcore.exchange.pieces import Piece


@dataclass(frozen=True)
class _Tables:
    """The tables of a piece (`kernels.messages.Table`), each made when it is first needed.

    With the distributed optimizer `sent` and `owned` are needed, without it `shared` too.
    """

    piece: Piece

    @cached_property
    def sent(self) -> Table:
        """Of the messages of all shards, one after the other."""
        starts = [0, *accumulate(self.piece.lengths)][:-1]
        return self._table(self.piece.shards, starts)

    @cached_property
    def owned(self) -> Table:
        """Of this rank's shard."""
        return self._table([self.piece.shard], [0])

    @cached_property
    def shared(self) -> Table:
        """Of the messages of all shards, each in the room of the longest."""
        longest = max(self.piece.lengths)
        return self._table(self.piece.shards, [i * longest for i in range(len(self.piece.shards))])

    def _table(self, shards: Sequence[Sequence[Segment]], starts: Sequence[int]) -> Table:
        return table(shards, self.piece.form, starts, self.piece.gradients.device)


class KernelCoding:
    """`coding.Coding`. Each of its methods launches one kernel."""

    def __init__(self) -> None:
        self._tables: dict[Piece, _Tables] = {}

    def encode(self, piece: Piece, sent: Tensor, rounding: RankRounding) -> None:
        kernels.encode(self._tables_of(piece).sent, piece.form, piece.gradients, sent, rounding)

    def sum(self, piece: Piece, received: Tensor) -> None:
        kernels.write_sums(*self._summed(piece, received), piece.gradients)

    def encode_sums(self, piece: Piece, received: Tensor, rounding: RankRounding) -> None:
        kernels.encode_sums(*self._summed(piece, received), rounding)

    def decode(self, piece: Piece, sums: Tensor) -> None:
        shared = self._tables_of(piece).shared
        kernels.write_sums(shared, piece.form, sums, 1, 0, piece.gradients)

    def _tables_of(self, piece: Piece) -> _Tables:
        """The tables of a piece, which are made on its first use."""
        if piece not in self._tables:
            self._tables[piece] = _Tables(piece)
        return self._tables[piece]

    def _summed(
        self, piece: Piece, received: Tensor
    ) -> tuple[Table, GradientForm, Tensor, int, int]:
        """The arguments of the kernels that sum the messages which this rank received.

        received: uint8, one axis: from each data-parallel rank the message with its gradients of
        the shard that this rank owns, one after the other. Returns (the segments of the shard, the
        format of gradients, `received`, the number of messages, the bytes of one message).
        """
        ranks, stride = len(piece.shards), piece.lengths[piece.own]
        return self._tables_of(piece).owned, piece.form, received, ranks, stride
