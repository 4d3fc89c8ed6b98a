"""Segments of buffers, and the places of their elements, against tensors that are cut by torch."""

from __future__ import annotations

import random

import pytest
import torch

from megatron_fp4.arithmetic.philox import GROUP
from megatron_fp4.arithmetic.segments import Place, Segment, begins, pieces, place_of, segments


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(
    ("axis", "ranges", "shape"), [(0, 1, (12, 5)), (0, 2, (16, 5)), (1, 1, (6, 8)), (0, 1, (24,))]
)
def test_a_place_is_that_of_the_unsharded_parameter(
    axis: int, ranges: int, shape: tuple[int, ...], ranks: int
) -> None:
    size, begin = torch.Size(shape).numel(), 48
    whole = begin + torch.arange(size).view(shape)
    seen = []
    for rank in range(ranks):
        parts = [part.chunk(ranks, axis)[rank] for part in whole.chunk(ranges, 0)]
        own = torch.cat(parts)
        place = place_of(own.shape, begin, axis=axis, ranks=ranks, rank=rank, ranges=ranges)
        assert torch.equal(place.indices(0, own.numel()), own.flatten())
        assert torch.equal(place.indices(3, 6), own.flatten()[3:6])
        seen.append(own.flatten())
    assert torch.equal(torch.cat(seen).sort().values, whole.flatten())


def test_a_place_that_forgets_the_ranges_is_another() -> None:
    """Negative control: the halves of SwiGLU's fc1 are apart."""
    right = place_of((8, 5), 0, ranks=2, rank=1, ranges=2)
    wrong = place_of((8, 5), 0, ranks=2, rank=1)
    assert not torch.equal(right.indices(0, 40), wrong.indices(0, 40))


def test_parameters_begin_at_groups_of_their_own() -> None:
    sizes = [5, 8, 17, 1, 64]
    found = begins(sizes)
    groups = [
        set(range(first // GROUP, (first + size - 1) // GROUP + 1))
        for first, size in zip(found, sizes, strict=True)
    ]
    assert found == [0, 8, 16, 40, 48]
    assert sum(map(len, groups)) == len(set.union(*groups))


def layout(seed: int) -> tuple[list[tuple[int, int, Place]], int]:
    """Random parameters in a buffer, with gaps between them, and the size of the buffer."""
    draw, at = random.Random(seed), 0
    found: list[tuple[int, int, Place]] = []
    for _ in range(draw.randint(1, 12)):
        at += draw.choice((0, 0, 3, 60))
        size = draw.randint(1, 400)
        found.append((at, at + size, Place(1000 * len(found), size, size)))
        at += size
    draw.shuffle(found)
    return found, at + draw.choice((0, 5, 100))


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 128])
@pytest.mark.parametrize("seed", range(8))
def test_every_element_is_in_one_segment(seed: int, ranks: int) -> None:
    parameters, size = layout(seed)
    length = -(-size // ranks)
    borders = [min(rank * length, size) for rank in range(ranks + 1)]
    found = segments(parameters, borders)
    assert len(found) == ranks
    buffer = torch.full((size,), -1)
    for start, stop, place in parameters:
        buffer[start:stop] = place.indices(0, stop - start)
    for shard, low, high in zip(found, borders, borders[1:], strict=False):
        for part in shard:
            assert low <= part.start < part.stop <= high
            assert torch.equal(buffer[part.start : part.stop], part.indices())
            buffer[part.start : part.stop] = -1
        assert [part.start for part in shard] == sorted(part.start for part in shard)
    assert (buffer == -1).all()


def test_a_segment_ends_at_the_border_of_a_shard() -> None:
    [left], [right] = segments([(0, 100, Place(0, 100, 100))], [0, 40, 100])
    assert (len(left), len(right), right.within) == (40, 60, 40)


# --- pieces ------------------------------------------------------------------------------------


def blocks(shard: list[Segment], block: int) -> set[tuple[int, int]]:
    """(first element, element behind the last) in the buffer of each block of a shard."""
    return {
        (start, min(start + block, part.stop))
        for part in shard
        for start in range(part.start, part.stop, block)
    }


@pytest.mark.parametrize("most", [16, 50, 127, 10_000])
@pytest.mark.parametrize("seed", range(6))
def test_pieces_have_the_elements_and_blocks_of_the_whole(seed: int, most: int) -> None:
    parameters, size = layout(seed)
    borders = [0, size // 3, size // 2, size]
    shards = segments(parameters, borders)
    found = pieces(shards, most, 16)
    for rank, shard in enumerate(shards):
        parts = [list(piece[rank]) for piece in found]
        assert all(sum(map(len, part)) <= most for part in parts)
        assert torch.equal(indices(sum(parts, [])), indices(shard))
        assert set.union(*(blocks(part, 16) for part in parts)) == blocks(shard, 16)
    lengths = [len([piece for piece in found if piece[rank]]) for rank in range(3)]
    assert len(found) == max(*lengths, 1)
    if most == 10_000:
        assert [list(map(list, piece)) for piece in found] == [shards]


def indices(shard: list[Segment]) -> torch.Tensor:
    return torch.cat([torch.empty(0, dtype=torch.int64), *(part.indices() for part in shard)])


def test_pieces_that_end_within_a_block_are_noticed() -> None:
    """Negative control: the blocks behind the cut are others."""
    [shard] = segments([(0, 100, Place(0, 100, 100))], [0, 100])
    parts = [list(piece[0]) for piece in pieces([shard], 24, 8)]
    assert set.union(*(blocks(part, 16) for part in parts)) != blocks(shard, 16)
