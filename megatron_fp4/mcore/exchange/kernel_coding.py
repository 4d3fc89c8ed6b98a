"""Makes and reads the messages of pieces by kernels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import accumulate

import torch
from torch import Tensor

from megatron_fp4.arithmetic.messages import Rounding
from megatron_fp4.kernels import messages as kernels
from megatron_fp4.kernels.messages import Table, table
from megatron_fp4.mcore.exchange.coding import Piece


@dataclass(frozen=True)
class _Tables:
    """The tables of a piece; see `kernels.messages.Table`.

    sent: of the messages of all shards. owned: of this rank's shard in the buffer. packed: of this
    rank's shard as a vector. shared: of the messages of all shards in rooms of the longest.
    """

    sent: Table
    owned: Table
    packed: Table
    shared: Table


class KernelCoding:
    """`coding.Coding`. Each of its methods launches one kernel; `encode_sums` launches two."""

    def encode(self, piece: Piece, sent: Tensor, rounding: Rounding) -> None:
        kernels.encode(_tables(piece).sent, piece.form, piece.gradients, sent, rounding)

    def sum(self, piece: Piece, received: Tensor) -> None:
        _write_sums(piece, _tables(piece).owned, received, piece.gradients)

    def encode_sums(self, piece: Piece, received: Tensor, rounding: Rounding) -> None:
        total = received.new_empty(sum(map(len, piece.shard)), dtype=torch.float32)
        packed = _tables(piece).packed
        _write_sums(piece, packed, received, total)
        kernels.encode(packed, piece.form, total, received, rounding)

    def decode(self, piece: Piece, sums: Tensor) -> None:
        shared = _tables(piece).shared
        kernels.write_sums(shared, piece.form, sums, 1, 0, piece.gradients)


def _write_sums(piece: Piece, of: Table, received: Tensor, out: Tensor) -> None:
    ranks, stride = len(piece.shards), piece.lengths[piece.own]
    kernels.write_sums(of, piece.form, received, ranks, stride, out)


@cache
def _tables(piece: Piece) -> _Tables:
    shards, form, device = piece.shards, piece.form, piece.gradients.device
    back_to_back = [0, *accumulate(piece.lengths)][:-1]
    in_rooms = [rank * max(piece.lengths) for rank in range(len(shards))]
    return _Tables(
        sent=table(shards, form, back_to_back, device),
        owned=table([piece.shard], form, [0], device),
        packed=table([piece.shard], form, [0], device, is_packed=True),
        shared=table(shards, form, in_rooms, device),
    )
