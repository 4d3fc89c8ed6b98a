"""Segments of buffers, and the places of their elements, against tensors that are cut by torch."""

from __future__ import annotations

import random

import pytest
import torch

from megatron_fp4.arithmetic.philox import GROUP
from megatron_fp4.arithmetic.segments import Place, begins, place_of, segments


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
