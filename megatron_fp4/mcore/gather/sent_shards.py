"""What each rank sends of a bucket of weights: codes and scales, and the rest as it is.

Each rank owns one shard of the bucket (megatron/core/distributed/param_and_grad_buffer.py). It
quantizes the blocks of sent weights that begin in its shard. Its message has, for each of these
weights, the codes and then the scales, and after them the elements of its shard that belong to
other parameters. Messages are padded to the longest, so that a rank whose shard is a part of an
embedding would make those of all ranks as long as that: long runs of other parameters are broadcast
by their owners instead.

A border may cut a block. The elements after the border are the first of the next shards, and their
owners send these heads before anything is quantized.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from megatron_fp4.arithmetic.owned_blocks import owned_blocks
from megatron_fp4.mcore.model.sent_weights import SentWeight

LONG = 1 << 20  # a run of other parameters of this many bytes or more is broadcast


@dataclass(frozen=True)
class WeightRange:
    """Elements [low, high) of a bucket that belong to `weight`.

    start: the element of the bucket at which the weight begins.
    """

    weight: SentWeight
    start: int
    low: int
    high: int

    @property
    def within(self) -> tuple[int, int]:
        """(first, end): the same elements in the flattened weight."""
        return self.low - self.start, self.high - self.start

    def places(self) -> list[Tensor]:
        """The codes and the scales of the elements, which are whole blocks, where the linear reads
        them: uint8 [elements / 2] and [blocks]."""
        (first, last), block = self.within, self.weight.block
        codes, scales = self.weight.codes.codes.view(-1), self.weight.codes.scales.view(-1)
        return [codes[first // 2 : last // 2], scales[first // block : last // block]]


@dataclass(frozen=True)
class SentShard:
    """The shard of a bucket that one rank owns, and what the rank sends.

    low, high: the elements of the shard. blocks: the blocks that the rank quantizes, of each sent
    weight. sent: what of the shard belongs to sent weights. short, long: the runs [low, high) of
    the shard that belong to other parameters, which the message has, or which are broadcast
    (`LONG`).
    """

    low: int
    high: int
    blocks: list[WeightRange] = field(default_factory=list)
    sent: list[WeightRange] = field(default_factory=list)
    short: list[tuple[int, int]] = field(default_factory=list)
    long: list[tuple[int, int]] = field(default_factory=list)

    @property
    def overshoot(self) -> int:
        """How many elements after the shard belong to its blocks."""
        return max([each.high - self.high for each in self.blocks] + [0])

    def places(self, buffer: Tensor) -> list[Tensor]:
        """Where the message goes, piece by piece, as views of bytes.

        buffer: the elements of the bucket.
        """
        codes = [place for blocks in self.blocks for place in blocks.places()]
        return codes + bytes_of(self.short, buffer)


def bytes_of(runs: Sequence[tuple[int, int]], buffer: Tensor) -> list[Tensor]:
    """Runs [low, high) of the elements of a buffer, as views of bytes."""
    size, of_bytes = buffer.element_size(), buffer.view(torch.uint8)
    return [of_bytes[low * size : high * size] for low, high in runs]


def sent_shards(bucket: Any, ranks: int, weights: Mapping[Any, SentWeight]) -> list[SentShard]:
    """What each data-parallel rank sends of one of Megatron's buckets, in the order of the ranks.

    ranks: the number of ranks among which the bucket is divided. weights: by parameter, the weights
    that are sent as codes; the elements of other parameters are sent as they are.
    """
    size = bucket.param_data.numel()
    borders = [rank * (size // ranks) for rank in range(ranks + 1)]
    found = [SentShard(low, high) for low, high in pairwise(borders)]
    for parameter, (start, stop) in bucket.param_to_index.items():
        weight = weights.get(parameter)
        for shard in found:
            low, high = max(start, shard.low), min(stop, shard.high)
            if low < high and weight is None:
                is_long = (high - low) * bucket.param_data.element_size() >= LONG
                (shard.long if is_long else shard.short).append((low, high))
            elif low < high and weight is not None:
                shard.sent.append(WeightRange(weight, start, low, high))
        if weight is not None:
            owned = owned_blocks(start, stop, weight.block, borders)
            for shard, (first, last) in zip(found, owned, strict=True):
                if first < last:
                    shard.blocks.append(WeightRange(weight, start, start + first, start + last))
    return found


def head_length(shards: Sequence[SentShard]) -> int:
    """How many of its first elements each rank sends to those before it; 0 if no block is cut.

    A block that is longer than a shard takes the whole of the next one.
    """
    return min(max(shard.overshoot for shard in shards), shards[0].high)
