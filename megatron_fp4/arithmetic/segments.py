"""Where the parts of a buffer of gradients lie: in its parameters, and in the unsharded parameters.

Data-parallel ranks exchange the gradients of many parameters in one buffer, of which each rank owns
one shard. Neither a block of FP8 codes nor a random draw may depend on how the buffer is laid out.
So a shard is sent in segments, each the part of one parameter, with blocks that begin at a
segment's first element, and an element draws its random bits by its place in the unsharded
parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import torch
from torch import Tensor

from megatron_fp4.arithmetic.philox import GROUP


@dataclass(frozen=True)
class Place:
    """Where the elements of a rank's parameter, flattened, lie in a vector of unsharded parameters.

    Local element i is element first + (i // columns) * stride + i % columns of that vector: `first`
    is that of local element 0, and each run of `columns` elements is followed by a gap that
    belongs to other ranks.
    """

    first: int
    columns: int
    stride: int

    def indices(self, start: int, stop: int, device: torch.device | str = "cpu") -> Tensor:
        """The places of local elements start, ..., stop - 1: int64 [stop - start]."""
        local = torch.arange(start, stop, device=device)
        return self.first + local // self.columns * self.stride + local % self.columns


def place_of(
    shape: Sequence[int],
    begin: int,
    *,
    axis: int = 0,
    ranks: int = 1,
    rank: int = 0,
    ranges: int = 1,
) -> Place:
    """The Place of a parameter that tensor parallelism shards along an axis.

    shape: of this rank's part, with one axis or two. begin: of the unsharded parameter in the
    vector. ranks, rank: of the tensor-parallel group; 1 and 0 where the parameter is not sharded.
    ranges: the separate ranges along axis 0 of which each rank has a part: 2 for the gate and the
    up projection of SwiGLU's fc1.
    """
    columns = shape[-1] if axis == 1 else torch.Size(shape).numel() // ranges
    return Place(begin + rank * columns, columns, ranks * columns)


def begins(sizes: Iterable[int]) -> list[int]:
    """The index of each parameter's first element, where parameters of these sizes (numbers of
    elements) are laid one after the other in a vector.

    Each index is a multiple of 8: eight elements share a draw of random bits, and so none is shared
    by two parameters.
    """
    found, at = [], 0
    for size in sizes:
        found.append(at)
        at += -(-size // GROUP) * GROUP
    return found


@dataclass(frozen=True)
class Segment:
    """A part of one parameter that lies in one shard of a buffer.

    start, stop: its elements in the buffer. within: its first element in the rank's parameter.
    place: of the parameter.
    """

    start: int
    stop: int
    within: int
    place: Place

    def __len__(self) -> int:
        return self.stop - self.start

    def indices(self, device: torch.device | str = "cpu") -> Tensor:
        """The places of its elements in the vector of unsharded parameters: int64 [len(self)]."""
        return self.place.indices(self.within, self.within + len(self), device)

    def cut(self, elements: int) -> tuple[Segment, Segment]:
        """Its first elements, and the rest."""
        at = self.start + elements
        return replace(self, stop=at), replace(self, start=at, within=self.within + elements)


def segments(
    parameters: Iterable[tuple[int, int, Place]], borders: Sequence[int]
) -> list[list[Segment]]:
    """The segments of each shard of a buffer, in their order there.

    parameters: (first element in the buffer, element after the last, Place) of each, in any order.
    What lies between them is padding, and belongs to no segment. borders: the first element of each
    shard, and the number of elements of the buffer.
    """
    ordered = sorted(parameters, key=lambda parameter: parameter[0])
    return [
        [
            Segment(max(start, low), min(stop, high), max(low - start, 0), place)
            for start, stop, place in ordered
            if max(start, low) < min(stop, high)
        ]
        for low, high in zip(borders, borders[1:], strict=False)
    ]


def pieces(
    shards: Sequence[Sequence[Segment]], most: int, block: int
) -> list[list[Sequence[Segment]]]:
    """Cuts the shards of a buffer into pieces, each with a part of every shard.

    most: the most elements of a part, at least `block`. A segment is cut at a multiple of `block`
    elements from its beginning, so that its blocks are the same however it is cut. A shard that has
    fewer parts than another has no segments in the last pieces.
    """
    parts = [_parts(shard, most, block) for shard in shards]
    return [list(piece) for piece in zip_longest(*parts, fillvalue=())]


def _parts(shard: Sequence[Segment], most: int, block: int) -> list[Sequence[Segment]]:
    found: list[list[Segment]] = [[]]
    room = most
    for segment in shard:
        while len(segment) > room:
            if fits := room // block * block:
                head, segment = segment.cut(fits)
                found[-1].append(head)
            found.append([])
            room = most
        found[-1].append(segment)
        room -= len(segment)
    return list(found)
