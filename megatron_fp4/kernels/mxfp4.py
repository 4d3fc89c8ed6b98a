"""MXFP4 quantization in Triton: E2M1 codes two a byte and E8M0 scales, bit for bit the reference's.

The bits are those of docs/numerics.md; `quantizer.py` is the oracle. A tile of the matrix is read
once, and cut into blocks of 32 along its rows, along its columns, or both.

Tiles are [R / 8, 8, C]. The threads of a warp go over the last axis and then over the first, by a
hint (`loaded`), and each goes over the one between, so that a thread holds the eight rows, and the
eight columns, that become one word of codes, and the 32 rows of a block lie in one warp.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_fp4.kernels import decode, encode, fp8
from megatron_fp4.kernels.launch import kernel
from megatron_fp4.kernels.philox import placed_in_tile, rest_of_tile

BLOCK = 32  # elements that share a scale
GROUP = 8  # elements that share a random draw, and a word


@triton.jit
def loaded(ptr, rows, columns, n_rows, n_columns, EVEN: tl.constexpr):
    """What stands at [rows, columns] of a row-major matrix, of three axes; zeros beyond it.

    Threads of a warp go over the last axis and then over the first. Triton orders the axes by how
    many addresses lie together along them, and what is equal by a rule that changed between 3.6
    and 3.9: the hint says 2 of the first axis, which nothing else reads, so that none are equal.
    """
    K: tl.constexpr = columns.shape[2]
    places = ptr + rows.to(tl.int64) * n_columns + columns
    places = tl.max_contiguous(places, [2 if K > 2 else 1, 1, K])
    if EVEN:  # tiles fill the matrix
        return tl.load(places)
    return tl.load(places, mask=(rows < n_rows) & (columns < n_columns), other=0)


@triton.jit
def _largest(pairs, AXIS: tl.constexpr, INTERPRETED: tl.constexpr):
    """The bits of the largest magnitudes along an axis, for each half of the words."""
    magnitudes = pairs & 0x7FFF7FFF
    if INTERPRETED:
        return tl.max(magnitudes & 0xFFFF, AXIS) | (tl.max(magnitudes >> 16, AXIS) << 16)
    return tl.reduce(magnitudes, AXIS, encode.larger)


@triton.jit
def _live(average):
    """-1 where it is finite, else 0."""
    return encode.live(average.to(tl.int32, bitcast=True) & 0x7FFFFFFF)


@triton.jit
def _stored(values, ptr, rows, columns, n_rows, n_columns, EVEN: tl.constexpr):
    """Stores values [..., i, j] at [rows[..., i], columns[j]] of a row-major matrix."""
    rows = tl.expand_dims(rows, len(rows.shape))
    places = ptr + rows.to(tl.int64) * n_columns + columns
    if EVEN:
        tl.store(places, values)
    else:
        tl.store(places, values, mask=(rows < n_rows) & (columns < n_columns))


@triton.jit
def along(
    pairs,
    rest,
    average,
    out,
    fold,
    rows,
    column0,
    n_rows,
    n_columns,
    CARRIED: tl.constexpr,
    CEIL: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    AVERAGED: tl.constexpr,
    PRESCALE: tl.constexpr,
    EVEN: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """The copy with blocks along the rows of a tile: codes [rows, columns / 2]. out: where codes,
    scales and carriers go; CARRIED: the mantissa bits of these, which are under `fold`, or 0."""
    codes_ptr, scales_ptr, carriers_ptr = out
    L: tl.constexpr = pairs.shape[0]
    C: tl.constexpr = pairs.shape[2] * 2
    blocked = tl.reshape(pairs, (L, 8, C // 32, 16))
    widest = _largest(blocked, 3, INTERPRETED)
    turned = (widest << 16) | ((widest >> 16) & 0xFFFF)
    widest = encode.larger_of(widest, turned, INTERPRETED)  # in both halves
    byte, whole, half = encode.scales(widest, CEIL, INTERPRETED)
    byte, live = byte & 0xFF, encode.live(widest)
    if AVERAGED:
        live &= tl.max(_live(tl.reshape(average, (L, 8, C // 32, 32))), 3)
    half = tl.broadcast_to(half[:, :, :, None], (L, 8, C // 32, 16))
    clips: tl.constexpr = not CEIL and PRESCALE == 1.0
    if STOCHASTIC or AVERAGED:
        scaled = encode.halved(blocked, half, clips, INTERPRETED)
        if STOCHASTIC:
            eights = tl.reshape(encode.unpacked(scaled), (L, 8, C // 8, 2, 2, 2))
            rest = tl.reshape(rest, (L, 8, C // 8, 2, 2, 2))
            codes = encode.stochastic(eights, rest, PRESCALE, INTERPRETED)
            words = encode.words_of_highest(codes, INTERPRETED)
        else:
            average = tl.reshape(average, (L, 8, C // 32, 32))
            codes = encode.nearer(scaled, blocked, half, average)
            words = encode.words(tl.reshape(codes, (L, 8, C // 8, 2, 2, 2)))
        even, odd = encode.gathered(tl.reshape(pairs, (L, 8, C // 8, 2, 2)), INTERPRETED)
        words |= encode.signs(even, odd)
    else:
        whole = tl.broadcast_to(whole[:, :, :, None], (L, 8, C // 32, 16))
        codes = encode.nearest_pairs(blocked & 0x7FFF7FFF, blocked, whole, half, clips, INTERPRETED)
        words = encode.words_of_pairs(tl.reshape(codes, (L, 8, C // 8, 2, 2)), INTERPRETED)
    lives = tl.broadcast_to(live[:, :, :, None], (L, 8, C // 32, 16))
    lives, _ = tl.split(tl.reshape(lives, (L, 8, C // 8, 2, 2)))
    lives, _ = tl.split(lives)
    words &= lives
    at = column0 // 8 + tl.arange(0, C // 8)[None, None, :]
    _stored(words, codes_ptr, rows, at, n_rows, n_columns // 8, EVEN)
    if CARRIED > 0:
        k = tl.broadcast_to((byte - fold)[:, :, :, None], (L, 8, C // 32, 16))
        k, _ = tl.split(tl.reshape(k, (L, 8, C // 8, 2, 2)))
        k, _ = tl.split(k)
        low, high = fp8.quick_table(k, CARRIED)
        first, second = fp8.looked_up(words, low, high, INTERPRETED)
        both = tl.reshape(tl.join(first, second), (L, 8, C // 4))
        at = column0 // 4 + tl.arange(0, C // 4)[None, None, :]
        _stored(both, carriers_ptr, rows, at, n_rows, n_columns // 4, EVEN)
    at = column0 // 32 + tl.arange(0, C // 32)[None, None, :]
    byte = (byte | ~live).to(tl.uint8)
    _stored(byte, scales_ptr, rows, at, n_rows, n_columns // 32, EVEN)


@triton.jit
def across(
    pairs,
    rest,
    average,
    out,
    fold,
    row0,
    column0,
    n_rows,
    n_columns,
    CARRIED: tl.constexpr,
    CEIL: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    AVERAGED: tl.constexpr,
    PRESCALE: tl.constexpr,
    EVEN: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """The copy with blocks along the columns of a tile: codes [columns, rows / 2]."""
    codes_ptr, scales_ptr, carriers_ptr = out
    L: tl.constexpr = pairs.shape[0]
    C: tl.constexpr = pairs.shape[2] * 2
    widest = tl.reshape(_largest(pairs, 1, INTERPRETED), (L // 4, 4, C // 2))
    widest = _largest(widest, 1, INTERPRETED)
    byte, whole, half = encode.scales(widest, CEIL, INTERPRETED)
    low_live, high_live = encode.live(widest << 16), encode.live(widest)
    if AVERAGED:
        average = tl.reshape(average, (L // 4, 4, 8, C))
        alive = tl.max(tl.max(_live(average), 2), 1)
        low, high = tl.split(tl.reshape(alive, (L // 4, C // 2, 2)))
        low_live, high_live = low_live & low, high_live & high
    half = tl.broadcast_to(half[:, None, None, :], (L // 4, 4, 8, C // 2))
    blocked = tl.reshape(pairs, (L // 4, 4, 8, C // 2))
    clips: tl.constexpr = not CEIL and PRESCALE == 1.0
    if STOCHASTIC or AVERAGED:
        scaled = encode.halved(blocked, half, clips, INTERPRETED)
        if STOCHASTIC:
            eights = tl.reshape(encode.unpacked(scaled), (L, 2, 2, 2, C))
            eights = tl.permute(eights, (0, 4, 1, 2, 3))
            rest = tl.permute(tl.reshape(rest, (L, 2, 2, 2, C)), (0, 4, 1, 2, 3))
            codes = encode.stochastic(eights, rest, PRESCALE, INTERPRETED)
            words = encode.words_of_highest(codes, INTERPRETED)
        else:
            codes = tl.reshape(encode.nearer(scaled, blocked, half, average), (L, 2, 2, 2, C))
            words = encode.words(tl.permute(codes, (0, 4, 1, 2, 3)))
        even, odd = tl.split(tl.permute(tl.reshape(pairs, (L, 2, 2, 2, C // 2)), (0, 4, 1, 2, 3)))
        low_even, high_even = encode.gathered(even, INTERPRETED)
        low_odd, high_odd = encode.gathered(odd, INTERPRETED)
        signs = tl.join(encode.signs(low_even, low_odd), encode.signs(high_even, high_odd))
        words |= tl.reshape(signs, (L, C))
    else:
        whole = tl.broadcast_to(whole[:, None, None, :], (L // 4, 4, 8, C // 2))
        # What is not finite would reach into its neighbour in the word.
        kept = (low_live & 0xFFFF) | (high_live & -0x10000)
        kept = tl.broadcast_to(kept[:, None, None, :], (L // 4, 4, 8, C // 2))
        kept = blocked & 0x7FFF7FFF & kept
        codes = encode.nearest_pairs(kept, blocked, whole, half, clips, INTERPRETED)
        codes = tl.permute(tl.reshape(codes, (L, 2, 2, 2, C // 2)), (0, 4, 1, 2, 3))
        words = encode.words_below(codes, INTERPRETED)
    byte = tl.reshape(tl.join(byte & 0xFF, byte >> 16), (L // 4, 1, C))
    live = tl.reshape(tl.join(low_live, high_live), (L // 4, 1, C))
    words &= tl.reshape(tl.broadcast_to(live, (L // 4, 4, C)), (L, C))
    columns = column0 + tl.arange(0, C)
    at = row0 // 8 + tl.arange(0, L)[None, :]
    _stored(tl.trans(words), codes_ptr, columns, at, n_columns, n_rows // 8, EVEN)
    if CARRIED > 0:
        k = byte - fold
        k = tl.reshape(tl.broadcast_to(k, (L // 4, 4, C)), (L, C))
        low, high = fp8.quick_table(k, CARRIED)
        first, second = fp8.looked_up(words, low, high, INTERPRETED)
        both = tl.reshape(tl.permute(tl.join(first, second), (1, 0, 2)), (C, 2 * L))
        at = row0 // 4 + tl.arange(0, 2 * L)[None, :]
        _stored(both, carriers_ptr, columns, at, n_columns, n_rows // 4, EVEN)
    at = row0 // 32 + tl.arange(0, L // 4)[None, :]
    byte = tl.trans(tl.reshape((byte | ~live).to(tl.uint8), (L // 4, C)))
    _stored(byte, scales_ptr, columns, at, n_columns, n_rows // 32, EVEN)


@triton.jit
def _read(
    x_ptr,
    x_scales_ptr,
    rows,
    column0,
    n_rows,
    n_columns,
    PACKED: tl.constexpr,
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Words of two BF16 of a tile, of BF16 or of MXFP4 in blocks along its rows."""
    at_rows = rows[:, :, None]
    if PACKED:
        at = column0 // 8 + tl.arange(0, COLUMNS // 8)[None, None, :]
        # A word a thread, as if their places were odd: more would be more than its eight columns.
        at = tl.multiple_of(at, [1, 1, 1])
        words = loaded(x_ptr, at_rows, at, n_rows, n_columns // 8, EVEN)
        at = column0 // 32 + tl.arange(0, COLUMNS // 32)[None, None, :]
        byte = loaded(x_scales_ptr, at_rows, at, n_rows, n_columns // 32, EVEN)
        return decode.pairs(words, byte.to(tl.int32), INTERPRETED)
    at = column0 // 2 + tl.arange(0, COLUMNS // 2)[None, None, :]
    return loaded(x_ptr, at_rows, at, n_rows, n_columns // 2, EVEN)


@triton.jit
def folded(
    x_ptr, scales_ptr, tally_ptr, n_rows, n_columns, CARRIED: tl.constexpr, PACKED: tl.constexpr
):
    """The fold of all of a copy's carriers, if it has any, which goes to its tally."""
    fold = 0
    if CARRIED > 0:
        fold = fp8.likely_fold(x_ptr, scales_ptr, n_rows, n_columns, CARRIED, PACKED)
        is_first = (tl.program_id(0) == 0) & (tl.program_id(1) == 0)
        tl.store(tally_ptr + 2, fold, mask=is_first)
    return fold


# Else every step, stream and seed that is 1 or a multiple of 16 would be another kernel.
_NUMBERS = ["along_stream", "across_stream", "per_row", "step", "seed_low", "seed_high"]


@kernel(fp_fusion=True, do_not_specialize=_NUMBERS)
def quantize_kernel(
    x_ptr,
    x_scales_ptr,
    along_codes_ptr,
    along_scales_ptr,
    along_carriers_ptr,
    along_tally_ptr,
    along_stream,
    across_codes_ptr,
    across_scales_ptr,
    across_carriers_ptr,
    across_tally_ptr,
    across_stream,
    average_ptr,
    rows_ptr,
    groups_ptr,
    n_rows,
    n_columns,
    per_row,
    step,
    step_ptr,
    seed_low,
    seed_high,
    PACKED: tl.constexpr,
    ALONG: tl.constexpr,
    ALONG_CARRIED: tl.constexpr,
    ACROSS: tl.constexpr,
    ACROSS_CARRIED: tl.constexpr,
    CEIL: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    AVERAGED: tl.constexpr,
    PRESCALE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    HAS_GROUPS: tl.constexpr,
    EVEN: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    DOWN: tl.constexpr,
    IN_MEMORY: tl.constexpr,
):
    """x [n_rows, n_columns], row-major BF16 in words of two, is read once. PACKED: it is MXFP4, in
    blocks along its rows. ALONG: blocks along its rows, codes [n_rows, n_columns / 2]; ACROSS:
    blocks along its columns, codes [n_columns, n_rows / 2]. ..._CARRIED: the mantissa bits of FP8
    carriers that are written too, or 0; see `carry_kernel`. AVERAGED: rounded towards float32
    averages [n_rows, n_columns]."""
    # Programs that run together have tiles below each other, or beside each other.
    row0 = tl.program_id(0 if DOWN else 1) * TILE_ROWS
    column0 = tl.program_id(1 if DOWN else 0) * TILE_COLUMNS
    rows = row0 + 8 * tl.arange(0, TILE_ROWS // 8)[:, None] + tl.arange(0, 8)[None, :]
    pairs = _read(
        x_ptr, x_scales_ptr, rows, column0, n_rows, n_columns, PACKED, TILE_COLUMNS, EVEN,
        INTERPRETED,
    )  # fmt: skip
    index = 0
    rest = 0
    average = 0
    if AVERAGED:
        at = column0 + tl.arange(0, TILE_COLUMNS)[None, None, :]
        average = loaded(average_ptr, rows[:, :, None], at, n_rows, n_columns, EVEN)
    if IN_MEMORY:
        step = tl.load(step_ptr)
    noise = step, seed_low, seed_high
    if STOCHASTIC:
        place = rows_ptr, groups_ptr, n_rows, n_columns // 8, per_row
        index = placed_in_tile(
            place, row0, column0, TILE_ROWS, TILE_COLUMNS, HAS_GROUPS, INTERPRETED
        )
    if ALONG:
        if STOCHASTIC:
            rest = rest_of_tile(index, noise, along_stream, INTERPRETED)
        fold = folded(
            x_ptr, x_scales_ptr, along_tally_ptr, n_rows, n_columns, ALONG_CARRIED, PACKED
        )
        out = along_codes_ptr, along_scales_ptr, along_carriers_ptr
        along(
            pairs, rest, average, out, fold, rows, column0, n_rows, n_columns,
            ALONG_CARRIED, CEIL, STOCHASTIC, AVERAGED, PRESCALE, EVEN, INTERPRETED,
        )  # fmt: skip
    if ACROSS:
        if STOCHASTIC:
            rest = rest_of_tile(index, noise, across_stream, INTERPRETED)
        fold = folded(
            x_ptr, x_scales_ptr, across_tally_ptr, n_rows, n_columns, ACROSS_CARRIED, PACKED
        )
        out = across_codes_ptr, across_scales_ptr, across_carriers_ptr
        across(
            pairs, rest, average, out, fold, row0, column0, n_rows, n_columns,
            ACROSS_CARRIED, CEIL, STOCHASTIC, AVERAGED, PRESCALE, EVEN, INTERPRETED,
        )  # fmt: skip
