"""Quantization to E2M1 codes with an E8M0 scale for each block of 16 or 32, in Triton.

docs/numerics.md defines the bits, and arithmetic/quantizer.py is the reference. A tile of the
matrix is read once and quantized in blocks along its rows, along its columns, or both.

Tiles are [rows / 8, 8, columns]. A hint (`source.loaded`) spreads the threads of a warp over the
last axis first and then over the first axis, and each thread holds all of the middle axis. So a
thread holds eight rows of eight columns, which are one word of codes for each row and for each
column, and the rows of a block lie in one warp.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_fp4.kernels import encode, exponents, fp8
from megatron_fp4.kernels.launch import kernel
from megatron_fp4.kernels.philox import key_of, rest_of_tile, tile_group_indices
from megatron_fp4.kernels.source import loaded, read_tile


@triton.jit
def _maxima(pairs, AXIS: tl.constexpr, INTERPRETED: tl.constexpr):
    """The largest magnitudes along AXIS of words of two BF16, for each half of the words.

    NaN is larger than Inf. Returns words of two BF16 magnitudes.
    """
    magnitudes = pairs & 0x7FFF7FFF
    if INTERPRETED:
        return tl.max(magnitudes & 0xFFFF, AXIS) | (tl.max(magnitudes >> 16, AXIS) << 16)
    return tl.reduce(magnitudes, AXIS, encode.larger)


@triton.jit
def _live(average):
    """-1 (all bits set) where the float32 `average` is finite, else 0."""
    return encode.live(average.to(tl.int32, bitcast=True) & 0x7FFFFFFF)


@triton.jit
def _stored(values, ptr, rows, columns, n_rows, n_columns, EVEN: tl.constexpr):
    """Stores values [..., i, j] at [rows[..., i], columns[j]] of a row-major matrix.

    n_rows, n_columns: the size of the matrix. EVEN: whether all indices are inside.
    """
    rows = tl.expand_dims(rows, len(rows.shape))
    places = ptr + rows.to(tl.int64) * n_columns + columns
    if EVEN:
        tl.store(places, values)
    else:
        tl.store(places, values, mask=(rows < n_rows) & (columns < n_columns))


@triton.jit
def quantize_along_rows(
    pairs,
    rest,
    average,
    out,
    exponent,
    rows,
    column0,
    n_rows,
    n_columns,
    CARRIER: tl.constexpr,
    ROUNDING: tl.constexpr,
    EVEN: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Quantizes a tile in blocks along its rows, and stores codes, scales and carriers.

    pairs: words of two BF16 [rows / 8, 8, columns / 2], the tile.
    rest: int32 [rows / 8, 8, columns], random bits from `philox.rest16`; read by stochastic
        rounding.
    average: float32 [rows / 8, 8, columns]; read by rounding ema.
    out: an Output, with codes [n_rows, n_columns / 2] and scales [n_rows, n_columns / BLOCK].
    exponent: the row exponent of all carriers, with its bias of 127.
    rows: int32 [rows / 8, 8], the indices of the tile's rows. column0: its first column.
    CARRIER: the mantissa bits of the carriers' FP8 format; 0 writes none.
    ROUNDING: a Rounding. EVEN: whether tiles fill the matrix.

    A block with Inf or NaN, in the tile or in its average, gets codes 0 and the scale NaN (255).
    Its carriers are left for `carrier.carry_kernel` to convert.
    """
    L: tl.constexpr = pairs.shape[0]
    C: tl.constexpr = pairs.shape[2] * 2
    B: tl.constexpr = ROUNDING.BLOCK
    blocked = tl.reshape(pairs, (L, 8, C // B, B // 2))
    maxima = _maxima(blocked, 3, INTERPRETED)
    swapped = (maxima << 16) | ((maxima >> 16) & 0xFFFF)
    maxima = encode.larger_of(maxima, swapped, INTERPRETED)  # in both halves
    found = exponents.of_maxima(maxima, ROUNDING.CEIL, INTERPRETED)
    byte, whole, half = exponents.powers(found, INTERPRETED)
    if ROUNDING.MSE:
        both = tl.broadcast_to(whole[:, :, :, None], (L, 8, C // B, B // 2))
        more = tl.sum(exponents.more_errors(blocked, both), 3)
        found += tl.where(more < 0, 0x00800080, 0)
        byte, whole, half = exponents.powers(found, INTERPRETED)
    byte, live = byte & 0xFF, encode.live(maxima)
    if ROUNDING.AVERAGED:
        live &= tl.max(_live(tl.reshape(average, (L, 8, C // B, B))), 3)
    half = tl.broadcast_to(half[:, :, :, None], (L, 8, C // B, B // 2))
    clips: tl.constexpr = not ROUNDING.CEIL and ROUNDING.PRESCALE == 1.0
    if ROUNDING.STOCHASTIC or ROUNDING.AVERAGED:
        scaled = encode.halved(blocked, half, clips, INTERPRETED)
        if ROUNDING.STOCHASTIC:
            eights = tl.reshape(encode.unpacked(scaled), (L, 8, C // 8, 2, 2, 2))
            rest = tl.reshape(rest, (L, 8, C // 8, 2, 2, 2))
            codes = encode.stochastic(eights, rest, ROUNDING.PRESCALE, INTERPRETED)
            words = encode.words_of_highest(codes, INTERPRETED)
        else:
            average = tl.reshape(average, (L, 8, C // B, B))
            codes = encode.nearer(scaled, blocked, half, average)
            words = encode.words(tl.reshape(codes, (L, 8, C // 8, 2, 2, 2)))
        even, odd = encode.sign_bytes(tl.reshape(pairs, (L, 8, C // 8, 2, 2)), INTERPRETED)
        words |= encode.signs(even, odd)
    else:
        whole = tl.broadcast_to(whole[:, :, :, None], (L, 8, C // B, B // 2))
        codes = encode.nearest_pairs(blocked & 0x7FFF7FFF, blocked, whole, half, clips, INTERPRETED)
        words = encode.words_of_pairs(tl.reshape(codes, (L, 8, C // 8, 2, 2)), INTERPRETED)
    lives = tl.broadcast_to(live[:, :, :, None], (L, 8, C // B, B // 2))
    lives, _ = tl.split(tl.reshape(lives, (L, 8, C // 8, 2, 2)))
    lives, _ = tl.split(lives)
    words &= lives
    at = column0 // 8 + tl.arange(0, C // 8)[None, None, :]
    _stored(words, out.codes, rows, at, n_rows, n_columns // 8, EVEN)
    if CARRIER > 0:
        k = tl.broadcast_to((byte - exponent)[:, :, :, None], (L, 8, C // B, B // 2))
        k, _ = tl.split(tl.reshape(k, (L, 8, C // 8, 2, 2)))
        k, _ = tl.split(k)
        low, high = fp8.quick_table(k, CARRIER)
        first, second = fp8.looked_up(words, low, high, INTERPRETED)
        both = tl.reshape(tl.join(first, second), (L, 8, C // 4))
        at = column0 // 4 + tl.arange(0, C // 4)[None, None, :]
        _stored(both, out.carriers, rows, at, n_rows, n_columns // 4, EVEN)
    at = column0 // B + tl.arange(0, C // B)[None, None, :]
    byte = (byte | ~live).to(tl.uint8)
    _stored(byte, out.scales, rows, at, n_rows, n_columns // B, EVEN)


@triton.jit
def quantize_along_columns(
    pairs,
    rest,
    average,
    out,
    exponent,
    row0,
    column0,
    n_rows,
    n_columns,
    CARRIER: tl.constexpr,
    ROUNDING: tl.constexpr,
    EVEN: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Quantizes a tile in blocks along its columns, and stores codes, scales and carriers
    transposed.

    out: an Output, with codes [n_columns, n_rows / 2] and scales [n_columns, n_rows / BLOCK].
    row0, column0: the first row and column of the tile.

    The other arguments are as in `quantize_along_rows`, and so are blocks with Inf or NaN.
    """
    L: tl.constexpr = pairs.shape[0]
    C: tl.constexpr = pairs.shape[2] * 2
    B: tl.constexpr = ROUNDING.BLOCK
    E: tl.constexpr = B // 8  # groups of eight rows in a block
    maxima = tl.reshape(_maxima(pairs, 1, INTERPRETED), (L // E, E, C // 2))
    maxima = _maxima(maxima, 1, INTERPRETED)
    found = exponents.of_maxima(maxima, ROUNDING.CEIL, INTERPRETED)
    byte, whole, half = exponents.powers(found, INTERPRETED)
    low_live, high_live = encode.live(maxima << 16), encode.live(maxima)
    blocked = tl.reshape(pairs, (L // E, E, 8, C // 2))
    if ROUNDING.MSE:
        both = tl.broadcast_to(whole[:, None, None, :], (L // E, E, 8, C // 2))
        more = tl.sum(tl.sum(exponents.more_errors(blocked, both), 2), 1)
        low, high = tl.split(tl.reshape(more, (L // E, C // 2, 2)))
        # A block with an Inf keeps its exponent, which would carry into the other half.
        low, high = tl.where(low_live != 0, low, 0.0), tl.where(high_live != 0, high, 0.0)
        found += tl.where(low < 0, 0x80, 0) + tl.where(high < 0, 0x800000, 0)
        byte, whole, half = exponents.powers(found, INTERPRETED)
    if ROUNDING.AVERAGED:
        average = tl.reshape(average, (L // E, E, 8, C))
        alive = tl.max(tl.max(_live(average), 2), 1)
        low, high = tl.split(tl.reshape(alive, (L // E, C // 2, 2)))
        low_live, high_live = low_live & low, high_live & high
    half = tl.broadcast_to(half[:, None, None, :], (L // E, E, 8, C // 2))
    clips: tl.constexpr = not ROUNDING.CEIL and ROUNDING.PRESCALE == 1.0
    if ROUNDING.STOCHASTIC or ROUNDING.AVERAGED:
        scaled = encode.halved(blocked, half, clips, INTERPRETED)
        if ROUNDING.STOCHASTIC:
            eights = tl.reshape(encode.unpacked(scaled), (L, 2, 2, 2, C))
            eights = tl.permute(eights, (0, 4, 1, 2, 3))
            rest = tl.permute(tl.reshape(rest, (L, 2, 2, 2, C)), (0, 4, 1, 2, 3))
            codes = encode.stochastic(eights, rest, ROUNDING.PRESCALE, INTERPRETED)
            words = encode.words_of_highest(codes, INTERPRETED)
        else:
            codes = tl.reshape(encode.nearer(scaled, blocked, half, average), (L, 2, 2, 2, C))
            words = encode.words(tl.permute(codes, (0, 4, 1, 2, 3)))
        even, odd = tl.split(tl.permute(tl.reshape(pairs, (L, 2, 2, 2, C // 2)), (0, 4, 1, 2, 3)))
        low_even, high_even = encode.sign_bytes(even, INTERPRETED)
        low_odd, high_odd = encode.sign_bytes(odd, INTERPRETED)
        signs = tl.join(encode.signs(low_even, low_odd), encode.signs(high_even, high_odd))
        words |= tl.reshape(signs, (L, C))
    else:
        whole = tl.broadcast_to(whole[:, None, None, :], (L // E, E, 8, C // 2))
        # The halves of a word belong to two blocks. Inf or NaN in one would change the codes of the
        # other, so blocks that are not finite are set to zero.
        finite = (low_live & 0xFFFF) | (high_live & -0x10000)
        finite = tl.broadcast_to(finite[:, None, None, :], (L // E, E, 8, C // 2))
        finite = blocked & 0x7FFF7FFF & finite
        codes = encode.nearest_pairs(finite, blocked, whole, half, clips, INTERPRETED)
        codes = tl.permute(tl.reshape(codes, (L, 2, 2, 2, C // 2)), (0, 4, 1, 2, 3))
        words = encode.words_below(codes, INTERPRETED)
    byte = tl.reshape(tl.join(byte & 0xFF, byte >> 16), (L // E, 1, C))
    live = tl.reshape(tl.join(low_live, high_live), (L // E, 1, C))
    words &= tl.reshape(tl.broadcast_to(live, (L // E, E, C)), (L, C))
    columns = column0 + tl.arange(0, C)
    at = row0 // 8 + tl.arange(0, L)[None, :]
    _stored(tl.trans(words), out.codes, columns, at, n_columns, n_rows // 8, EVEN)
    if CARRIER > 0:
        k = byte - exponent
        k = tl.reshape(tl.broadcast_to(k, (L // E, E, C)), (L, C))
        low, high = fp8.quick_table(k, CARRIER)
        first, second = fp8.looked_up(words, low, high, INTERPRETED)
        both = tl.reshape(tl.permute(tl.join(first, second), (1, 0, 2)), (C, 2 * L))
        at = row0 // 4 + tl.arange(0, 2 * L)[None, :]
        _stored(both, out.carriers, columns, at, n_columns, n_rows // 4, EVEN)
    at = row0 // B + tl.arange(0, L // E)[None, :]
    byte = tl.trans(tl.reshape((byte | ~live).to(tl.uint8), (L // E, C)))
    _stored(byte, out.scales, columns, at, n_columns, n_rows // B, EVEN)


@triton.jit
def _shared_exponent(largest, counts_ptr, CARRIER: tl.constexpr):
    """The row exponent that all carriers of a copy share, with its bias of 127; 0 without carriers.

    The first program of the launch writes it to the counts, and zeros to the counts that
    `carry_kernel` adds to. largest: of `fp8.largest_of_sample`. CARRIER: the mantissa bits of the
    FP8 format, 0 for none.
    """
    exponent = 0
    if CARRIER > 0:
        exponent = fp8.likely_exponent(largest, CARRIER)
        is_first = (tl.program_id(0) == 0) & (tl.program_id(1) == 0)
        i = tl.arange(0, 4)
        tl.store(counts_ptr + i, tl.where(i == 2, exponent, 0), mask=is_first)
    return exponent


@kernel(fp_fusion=True)
def quantize_kernel(
    x,
    along_rows,
    along_columns,
    average_ptr,
    random,
    n_rows,
    n_columns,
    PACKED: tl.constexpr,
    READS: tl.constexpr,
    ROWS_CARRIER: tl.constexpr,
    COLUMNS_CARRIER: tl.constexpr,
    ROUNDING: tl.constexpr,
    DRAWS: tl.constexpr,
    TILE: tl.constexpr,
    DOWN: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Quantizes x [n_rows, n_columns], row-major, along its rows, along its columns, or both.

    x: a Source, which is read once. PACKED: the block size of its codes, whose blocks lie along the
        rows; 0 if it is BF16. READS: what is computed as it is read; see source.py.
    along_rows: an Output of blocks along the rows, with codes [n_rows, n_columns / 2].
    along_columns: an Output of blocks along the columns, with codes [n_columns, n_rows / 2].
    average_ptr: float32 [n_rows, n_columns], the average towards which rounding ema rounds.
    ROWS_CARRIER, COLUMNS_CARRIER: mantissa bits of the FP8 carriers that are written with each
        output; 0 for none. None if the output itself is not made.
    random, ROUNDING, DRAWS, TILE: see arguments.py.
    DOWN: whether programs with consecutive ids have tiles below each other, instead of beside each
        other.

    A program quantizes one tile. The tiles with the same columns of both halves of a SwiGLU's
    gradient read the same numbers. Their programs have consecutive ids along the columns, so that
    the second finds them in the L2 cache.
    """
    HALVES: tl.constexpr = 2 if READS == "swiglu gradient" else 1
    across = tl.program_id(1 if DOWN else 0)
    row0 = tl.program_id(0 if DOWN else 1) * TILE.ROWS
    column0 = across // HALVES * TILE.COLUMNS + across % HALVES * (n_columns // 2)
    rows = row0 + 8 * tl.arange(0, TILE.ROWS // 8)[:, None] + tl.arange(0, 8)[None, :]
    pairs = read_tile(
        x, rows, column0, n_rows, n_columns, PACKED, READS, TILE.COLUMNS, TILE.EVEN, INTERPRETED
    )
    key = key_of(random, DRAWS.IN_MEMORY)
    largest = 0
    if ROWS_CARRIER or COLUMNS_CARRIER:
        largest = fp8.largest_of_sample(x, n_rows, n_columns, PACKED, READS, INTERPRETED)
    index = 0
    rest = 0
    average = 0
    if ROUNDING.AVERAGED:
        at = column0 + tl.arange(0, TILE.COLUMNS)[None, None, :]
        average = loaded(average_ptr, rows[:, :, None], at, n_rows, n_columns, TILE.EVEN)
    if ROUNDING.STOCHASTIC:
        place = random.rows, random.groups, n_rows, n_columns // 8, random.groups_per_row
        index = tile_group_indices(
            place, row0, column0, TILE.ROWS, TILE.COLUMNS, DRAWS.HAS_GROUPS, INTERPRETED
        )
    if ROWS_CARRIER is not None:
        if ROUNDING.STOCHASTIC:
            rest = rest_of_tile(index, key, along_rows.stream, INTERPRETED)
        exponent = _shared_exponent(largest, along_rows.counts, ROWS_CARRIER)
        quantize_along_rows(
            pairs, rest, average, along_rows, exponent, rows, column0,
            n_rows, n_columns, ROWS_CARRIER, ROUNDING, TILE.EVEN, INTERPRETED,
        )  # fmt: skip
    if COLUMNS_CARRIER is not None:
        if ROUNDING.STOCHASTIC and not DRAWS.SHARED:
            rest = rest_of_tile(index, key, along_columns.stream, INTERPRETED)
        exponent = _shared_exponent(largest, along_columns.counts, COLUMNS_CARRIER)
        quantize_along_columns(
            pairs, rest, average, along_columns, exponent, row0, column0,
            n_rows, n_columns, COLUMNS_CARRIER, ROUNDING, TILE.EVEN, INTERPRETED,
        )  # fmt: skip
