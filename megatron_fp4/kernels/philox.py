"""Philox-4x32-7 in Triton, with the bits of megatron_fp4/arithmetic/philox.py.

docs/numerics.md, Random bits, defines counters and streams. In this module `key` is a Key of that
file as the tuple (step, low word of the seed, high word of the seed).
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_fp4.kernels.encode import permuted


@triton.jit
def philox(index, step, stream, seed_low, seed_high):
    """Four uint32 words of Philox-4x32-7 for each index.

    index: int64 of any shape.
    step, stream, seed_low, seed_high: integers, of which the lowest 32 bits are used.

    The counter is (low word of the index, high word of the index, step, stream), and Philox's
    own key is the seed.
    """
    c0 = index.to(tl.uint32)
    c1 = (index >> 32).to(tl.uint32)
    c2 = tl.zeros_like(c0) + step.to(tl.uint32)
    c3 = tl.zeros_like(c0) + stream.to(tl.uint32)
    k0 = seed_low.to(tl.uint32)
    k1 = seed_high.to(tl.uint32)
    for _ in tl.static_range(7):
        # One instruction gives both halves of a 64-bit product.
        first = c0.to(tl.uint64) * 0xD2511F53
        second = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (second >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (first >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = second.to(tl.uint32)
        c3 = first.to(tl.uint32)
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def _signs_index(draw):
    """The 64-bit index of the first 128 signs of a draw: `draw` in the high word, 0 in the low
    word."""
    return draw.to(tl.int64) << 32


@triton.jit
def sign_words(draw, stream, key):
    """The first 128 random signs of a draw, as the bits of four int32 words.

    Sign i is bit i % 32 of word i // 32; a 1 is the sign -1. `arithmetic.philox.random_signs`
    defines them. key: (step, low and high word of the seed).
    """
    step, seed_low, seed_high = key
    w0, w1, w2, w3 = philox(_signs_index(draw), step, stream, seed_low, seed_high)
    return (
        w0.to(tl.int32, bitcast=True),
        w1.to(tl.int32, bitcast=True),
        w2.to(tl.int32, bitcast=True),
        w3.to(tl.int32, bitcast=True),
    )


@triton.jit
def rest16(index, step, stream, seed_low, seed_high, INTERPRETED: tl.constexpr):
    """Random numbers for the eight elements of each group, as `encode.stochastic` takes them.

    index: int64 [..., n], the index of each group.
    step, stream, seed_low, seed_high: see `philox`.

    Returns 256 r + 0xF000083 for random integers r in [0, 65536), int32 [..., 8 n]. The r of
    element j of a group is a half of word j // 2 of the group's draw: the low half if j is even,
    the high half if j is odd.
    """
    w0, w1, w2, w3 = philox(index, step, stream, seed_low, seed_high)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [..., 2, 2], in order: w0, w1, w2, w3
    words = words.to(tl.int32, bitcast=True)
    if INTERPRETED:
        low, high = ((words & 0xFFFF) << 8) + 0xF000083, ((words >> 8) & 0xFFFF00) + 0xF000083
    else:
        added = tl.full(words.shape, 0xF83, tl.int32)  # supplies the bytes 0x0F and 0x83
        low, high = permuted(words, added, 0x5104), permuted(words, added, 0x5324)
    SHAPE: tl.constexpr = index.shape
    return tl.reshape(tl.join(low, high), SHAPE[:-1] + (SHAPE[-1] * 8,))


@triton.jit
def random16(index, step, stream, seed_low, seed_high):
    """Random integers in [0, 65536), int32, of elements by their indices (int64), as
    `arithmetic.fp8_blocks.bits_at` draws them. Each element makes a draw of its own."""
    w0, w1, w2, w3 = philox(index >> 3, step, stream, seed_low, seed_high)
    at = (index & 7).to(tl.int32)
    word = tl.where(at < 4, tl.where(at < 2, w0, w1), tl.where(at < 6, w2, w3))
    return ((word >> ((at & 1) * 16).to(tl.uint32)) & 0xFFFF).to(tl.int32)


@triton.jit
def integers_of(rest):
    """The random integers in [0, 65536), int32, of which `rest` are the words (`rest16`)."""
    return (rest >> 8) - 0xF0000


@triton.jit
def random16_of_groups(group, step, stream, seed_low, seed_high, INTERPRETED: tl.constexpr):
    """`random16` of eight neighbours for each group, int32 [..., 8 n], in one draw.

    group: int64 [..., n], the index of the first of the eight, divided by eight.
    """
    return integers_of(rest16(group, step, stream, seed_low, seed_high, INTERPRETED))


@triton.jit
def _hidden(x, beside, INTERPRETED: tl.constexpr):
    """A copy of x that hides from the compiler how x was computed.

    beside: any tensor of x's shape; it is not read.

    Triton chooses the layout of a load from what it knows of the addresses: their order along each
    axis and whether they repeat. With addresses computed from hidden indices it follows a hint
    instead (`tl.max_contiguous`), and each element is loaded by the thread that needs it.
    """
    if INTERPRETED:
        return x
    return tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r,r", [x, beside], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def group_indices(
    place,
    rows,
    groups,
    HAS_GROUPS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Indices, int64 [G, ...], of groups of eight columns in the unsharded matrix.

    All elements of a group share one random draw. The threads of a warp are spread over the first
    axis, then over the second.

    place: (rows_ptr, groups_ptr, n_rows, n_groups, per_row). rows_ptr: int64 [n_rows], the place of
        each local row in the unsharded matrix. groups_ptr: int64 [n_groups], the place of each
        local group in its unsharded row. per_row: the number of groups in an unsharded row.
    rows, groups: int32 [1, ...] and [G, 1 or ...], which count in the local matrix and are
        broadcast to each other.
    HAS_GROUPS: whether groups_ptr is read; if not, the indices in `groups` are the places.
    """
    rows_ptr, groups_ptr, n_rows, n_groups, per_row = place
    rows = tl.broadcast_to(rows, groups.shape[:1] + rows.shape[1:])
    rows = _hidden(rows, tl.broadcast_to(groups, rows.shape), INTERPRETED)
    # This hint spreads threads over the axes in this order; see `source.loaded`.
    places = tl.max_contiguous(rows_ptr + rows, [4, 2, 1])
    at_rows = tl.load(places, mask=rows < n_rows, other=0)
    if HAS_GROUPS:
        groups = tl.load(groups_ptr + groups, mask=groups < n_groups, other=0)
    return at_rows * per_row + groups


@triton.jit
def tile_group_indices(
    place,
    row0,
    column0,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_GROUPS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Group indices, int64 [COLUMNS / 8, ROWS / 8, 8], of a tile in which a thread holds eight rows
    of eight columns.

    place: see `group_indices`. row0, column0: the first row and column of the tile.
    """
    rows = row0 + 8 * tl.arange(0, ROWS // 8)[None, :, None] + tl.arange(0, 8)[None, None, :]
    groups = column0 // 8 + tl.arange(0, COLUMNS // 8)[:, None, None]
    return group_indices(place, rows, groups, HAS_GROUPS, INTERPRETED)


@triton.jit
def neighbour_group_indices(
    place,
    row0,
    column0,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_GROUPS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Group indices, int64 [COLUMNS / 16, ROWS, 2], of a tile in which a thread holds 16 neighbours
    of a row. For the arguments see `tile_group_indices`."""
    two = tl.arange(0, 2)[None, None, :]
    # `group_indices` broadcasts rows along the first axis alone, so they have the last one here.
    rows = row0 + tl.arange(0, ROWS)[None, :, None] + 0 * two
    groups = column0 // 8 + 2 * tl.arange(0, COLUMNS // 16)[:, None, None] + two
    return group_indices(place, rows, groups, HAS_GROUPS, INTERPRETED)


@triton.jit
def key_of(random, IN_MEMORY: tl.constexpr):
    """(step, low word of the seed, high word of the seed) of a `Random`.

    IN_MEMORY: whether the step is read from memory.
    """
    step = random.step
    if IN_MEMORY:
        step = tl.load(random.step_in_memory)
    return step, random.seed_low, random.seed_high


@triton.jit
def rest_of_tile(index, key, stream, INTERPRETED: tl.constexpr):
    """`rest16` of a tile's elements, int32 [ROWS / 8, 8, COLUMNS].

    index: int64 [COLUMNS / 8, ROWS / 8, 8], from `tile_group_indices`.
    key: (step, low and high word of the seed).
    stream: the number of the random stream.
    """
    step, seed_low, seed_high = key
    rest = rest16(index, step, stream, seed_low, seed_high, INTERPRETED)
    COLUMNS: tl.constexpr = index.shape[0] * 8
    rest = tl.permute(tl.reshape(rest, index.shape + (8,)), (1, 2, 0, 3))
    return tl.reshape(rest, (index.shape[1], 8, COLUMNS))


@triton.jit
def rest_of_neighbours(index, key, stream, INTERPRETED: tl.constexpr):
    """As `rest_of_tile`, int32 [ROWS, COLUMNS]. index: from `neighbour_group_indices`."""
    step, seed_low, seed_high = key
    rest = rest16(index, step, stream, seed_low, seed_high, INTERPRETED)
    return tl.reshape(tl.permute(rest, (1, 0, 2)), (index.shape[1], index.shape[0] * 16))
