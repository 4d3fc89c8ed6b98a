"""How the messages of pieces are made and read."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from megatron_fp4.arithmetic import messages
from megatron_fp4.arithmetic.messages import RankRounding
from megatron_fp4.mcore.exchange.pieces import Piece


class Coding(Protocol):
    """Encodes gradients to the messages that data-parallel ranks exchange, and decodes them.

    A message has the gradients of one shard of a piece, in few bits. In all methods:
    sent: uint8, one axis: this rank's message of each shard, one after the other.
    received: uint8, one axis: from each rank its message of the shard that this rank owns, one
        after the other.
    """

    def encode(self, piece: Piece, sent: Tensor, rounding: RankRounding) -> None:
        """Writes the messages of all shards, one after the other."""
        ...

    def sum(self, piece: Piece, received: Tensor) -> None:
        """Writes the sums of this rank's shard to the piece's buffer."""
        ...

    def encode_sums(self, piece: Piece, received: Tensor, rounding: RankRounding) -> None:
        """Writes the message of the sums of this rank's shard to the beginning of `received`."""
        ...

    def decode(self, piece: Piece, sums: Tensor) -> None:
        """Writes the sums of all shards to the piece's buffer.

        sums: uint8, one axis: the message of each shard, in rooms of the longest.
        """
        ...


class TorchCoding:
    """`Coding` by the functions of arithmetic/messages.py, in PyTorch's operators."""

    def encode(self, piece: Piece, sent: Tensor, rounding: RankRounding) -> None:
        for shard, part in zip(piece.shards, sent.split(piece.lengths), strict=True):
            values = messages.of_shard(piece.gradients, shard)
            part.copy_(messages.encoded(values, shard, piece.form, rounding))

    def sum(self, piece: Piece, received: Tensor) -> None:
        messages.store(self._sums(piece, received), piece.shard, piece.gradients)

    def encode_sums(self, piece: Piece, received: Tensor, rounding: RankRounding) -> None:
        total = self._sums(piece, received)
        message = messages.encoded(total, piece.shard, piece.form, rounding)
        received[: len(message)] = message

    def decode(self, piece: Piece, sums: Tensor) -> None:
        longest = max(piece.lengths)
        for rank, shard in enumerate(piece.shards):
            message = sums[rank * longest :][: piece.lengths[rank]]
            values = messages.decoded(message, shard, piece.form)
            messages.store(values, shard, piece.gradients)

    def _sums(self, piece: Piece, received: Tensor) -> Tensor:
        own = piece.lengths[piece.own]
        arrived = [received[rank * own :][:own] for rank in range(len(piece.shards))]
        return messages.summed(arrived, piece.shard, piece.form)


def coding_on(device: torch.device) -> Coding:
    """The `Coding` of gradients on a device: by kernels on a GPU, else by PyTorch's operators. Both
    make the same bits."""
    if device.type != "cuda":
        return TorchCoding()
    from megatron_fp4.mcore.exchange.kernel_coding import KernelCoding  # imports Triton

    return KernelCoding()
