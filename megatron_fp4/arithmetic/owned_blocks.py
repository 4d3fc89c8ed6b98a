"""Which blocks of a weight each rank quantizes, where ranks own shards of a buffer of weights."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise


def owned_blocks(
    start: int, stop: int, block: int, borders: Sequence[int]
) -> list[tuple[int, int]]:
    """For each shard the elements [first, last) of a weight, flattened, that its owner quantizes.

    The owner of a block's first element quantizes the whole block, of which a border may cut the
    end off. start, stop: the weight's elements in the buffer. block: elements of a block, of which
    the weight has a whole number. borders: the first element of each shard, and the number of
    elements of the buffer.
    """

    def first_from(border: int) -> int:
        """The first element of the first block that begins at `border` or behind it."""
        return min(max(-(-(border - start) // block) * block, 0), stop - start)

    return [(first_from(low), first_from(high)) for low, high in pairwise(borders)]
