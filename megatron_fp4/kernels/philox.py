"""Philox-4x32-7 in Triton: the bits of megatron_fp4/philox.py."""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_fp4.kernels.encode import permuted


@triton.jit
def philox(index, step, stream, seed_low, seed_high):
    """Four words of Philox-4x32-7 for each 64-bit index."""
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
    """The 64-bit index of a draw's signs: `draw` in the high word, 0 in the low word."""
    return draw.to(tl.int64) << 32


@triton.jit
def sign_words(draw, stream, noise):
    """Those of the first 128 elements as bits of four words, 1 for -1; see `philox.random_signs`.
    noise: (step, the seed's words)."""
    step, seed_low, seed_high = noise
    w0, w1, w2, w3 = philox(_signs_index(draw), step, stream, seed_low, seed_high)
    return (
        w0.to(tl.int32, bitcast=True),
        w1.to(tl.int32, bitcast=True),
        w2.to(tl.int32, bitcast=True),
        w3.to(tl.int32, bitcast=True),
    )


@triton.jit
def rest16(index, step, stream, seed_low, seed_high, INTERPRETED: tl.constexpr):
    """256 r + 0xF000083 of random integers r in [0, 65536), eight for each group's index, along the
    last axis. Element j takes word j // 2 of the draw, the low half if j is even, else the high
    half. See `encode.stochastic`."""
    w0, w1, w2, w3 = philox(index, step, stream, seed_low, seed_high)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [..., 2, 2]: w0 w1, w2 w3
    words = words.to(tl.int32, bitcast=True)
    if INTERPRETED:
        low, high = ((words & 0xFFFF) << 8) + 0xF000083, ((words >> 8) & 0xFFFF00) + 0xF000083
    else:
        added = tl.full(words.shape, 0xF83, tl.int32)  # the other two bytes
        low, high = permuted(words, added, 0x5104), permuted(words, added, 0x5324)
    SHAPE: tl.constexpr = index.shape
    return tl.reshape(tl.join(low, high), SHAPE[:-1] + (SHAPE[-1] * 8,))


@triton.jit
def _hidden(x, beside, INTERPRETED: tl.constexpr):
    """x for each element of `beside`, in whose order the compiler sees none: what it loads there
    lies in its threads as a hint says, and not as the addresses do. It does not see either that x
    repeats along an axis of `beside`, and loads it along all of them."""
    if INTERPRETED:
        return x
    return tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r,r", [x, beside], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def placed(
    place,
    rows,
    groups,
    HAS_GROUPS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Indices in the unsharded matrix of the groups of eight columns that share a draw, rows
    [1, ...] by groups [G, 1 or ...]. place: (where the rows, and the groups, lie there, how many of
    them are here, groups in one of its rows).

    The threads of a warp go over the first axis, then over the second.
    """
    rows_ptr, groups_ptr, n_rows, n_groups, per_row = place
    rows = tl.broadcast_to(rows, groups.shape[:1] + rows.shape[1:])
    rows = _hidden(rows, tl.broadcast_to(groups, rows.shape), INTERPRETED)
    # Threads go over the axes in this order: see `mxfp4.loaded`.
    places = tl.max_contiguous(rows_ptr + rows, [4, 2, 1])
    at_rows = tl.load(places, mask=rows < n_rows, other=0)
    if HAS_GROUPS:
        groups = tl.load(groups_ptr + groups, mask=groups < n_groups, other=0)
    return at_rows * per_row + groups


@triton.jit
def placed_in_tile(
    place,
    row0,
    column0,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_GROUPS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """The same for a tile whose threads hold eight rows of eight columns:
    [COLUMNS / 8, ROWS / 8, 8]."""
    rows = row0 + 8 * tl.arange(0, ROWS // 8)[None, :, None] + tl.arange(0, 8)[None, None, :]
    groups = column0 // 8 + tl.arange(0, COLUMNS // 8)[:, None, None]
    return placed(place, rows, groups, HAS_GROUPS, INTERPRETED)


@triton.jit
def noise_of(random, IN_MEMORY: tl.constexpr):
    """(step, the words of the seed) of a `Random`."""
    step = random.step
    if IN_MEMORY:
        step = tl.load(random.step_in_memory)
    return step, random.seed_low, random.seed_high


@triton.jit
def rest_of_tile(index, noise, stream, INTERPRETED: tl.constexpr):
    """`rest16` of its elements, [ROWS / 8, 8, COLUMNS]. noise: (step, the seed's words)."""
    step, seed_low, seed_high = noise
    rest = rest16(index, step, stream, seed_low, seed_high, INTERPRETED)
    COLUMNS: tl.constexpr = index.shape[0] * 8
    rest = tl.permute(tl.reshape(rest, index.shape + (8,)), (1, 2, 0, 3))
    return tl.reshape(rest, (index.shape[1], 8, COLUMNS))
