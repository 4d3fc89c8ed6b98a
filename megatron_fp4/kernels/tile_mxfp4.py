"""Quantizes a tile to E2M1 codes with an E8M0 scale for each block of 16 or 32, in Triton.

docs/numerics.md defines the bits, and arithmetic/quantize.py is the reference. The blocks of a
tile lie along its rows or along its columns. Kernels of mxfp4.py and hadamard.py call this.

Tiles are [rows / 8, 8, columns]. A hint (`source.loaded`) spreads the threads of a warp over the
last axis first and then over the first axis, and each thread holds all of the middle axis. So a
thread holds eight rows of eight columns, which are one word of codes for each row and for each
column, and the rows of a block lie in one warp.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_fp4.kernels import encode, exponents, fp8


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
    byte, whole, half, live = _scales_of_rows(blocked, average, ROUNDING, INTERPRETED)
    words = _words_of_rows(pairs, rest, average, whole, half, ROUNDING, INTERPRETED)
    words &= _of_words(live, B)
    at = column0 // 8 + tl.arange(0, C // 8)[None, None, :]
    _stored(words, out.codes, rows, at, n_rows, n_columns // 8, EVEN)
    if CARRIER > 0:
        low, high = fp8.quick_table(_of_words(byte - exponent, B), CARRIER)
        first, second = fp8.looked_up(words, low, high, INTERPRETED)
        both = tl.reshape(tl.join(first, second), (L, 8, C // 4))
        at = column0 // 4 + tl.arange(0, C // 4)[None, None, :]
        _stored(both, out.carriers, rows, at, n_rows, n_columns // 4, EVEN)
    at = column0 // B + tl.arange(0, C // B)[None, None, :]
    byte = (byte | ~live).to(tl.uint8)
    _stored(byte, out.scales, rows, at, n_rows, n_columns // B, EVEN)


@triton.jit
def _scales_of_rows(blocked, average, ROUNDING: tl.constexpr, INTERPRETED: tl.constexpr):
    """The scales of blocks along the rows.

    blocked: words of two BF16 [rows / 8, 8, blocks, BLOCK / 2], the tile.

    Returns int32 [rows / 8, 8, blocks] each: the bytes of the scales; whole and half, the factors
    of `exponents.powers`; -1 for a block without Inf and NaN, else 0.
    """
    L: tl.constexpr = blocked.shape[0]
    N: tl.constexpr = blocked.shape[2]
    B: tl.constexpr = ROUNDING.BLOCK
    maxima = _maxima(blocked, 3, INTERPRETED)
    swapped = (maxima << 16) | ((maxima >> 16) & 0xFFFF)
    maxima = encode.larger_of(maxima, swapped, INTERPRETED)  # in both halves
    found = exponents.of_maxima(maxima, ROUNDING, INTERPRETED)
    byte, whole, half = exponents.powers(found, INTERPRETED)
    if ROUNDING.RULE == "mse":
        both = tl.broadcast_to(whole[:, :, :, None], (L, 8, N, B // 2))
        more = tl.sum(exponents.more_errors(blocked, both), 3)
        found += tl.where(more < 0, 0x00800080, 0)
        byte, whole, half = exponents.powers(found, INTERPRETED)
    byte, live = byte & 0xFF, encode.live(maxima)
    if ROUNDING.AVERAGED:
        live &= tl.max(_live(tl.reshape(average, (L, 8, N, B))), 3)
    return byte, whole, half, live


@triton.jit
def _words_of_rows(
    pairs, rest, average, whole, half, ROUNDING: tl.constexpr, INTERPRETED: tl.constexpr
):
    """int32 [rows / 8, 8, columns / 8]: words of eight codes, of blocks along the rows.

    whole, half: of `_scales_of_rows`. The other arguments are as in `quantize_along_rows`.
    """
    L: tl.constexpr = pairs.shape[0]
    C: tl.constexpr = pairs.shape[2] * 2
    B: tl.constexpr = ROUNDING.BLOCK
    blocked = tl.reshape(pairs, (L, 8, C // B, B // 2))
    half = tl.broadcast_to(half[:, :, :, None], (L, 8, C // B, B // 2))
    clips: tl.constexpr = ROUNDING.RULE != "ceil" and ROUNDING.PRESCALE == 1.0
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
    return words


@triton.jit
def _of_words(of_blocks, B: tl.constexpr):
    """Repeats a number of each block for all its words of eight codes: [rows / 8, 8, columns / 8].

    of_blocks: [rows / 8, 8, columns / B], a number for each block of B along the rows.
    """
    L: tl.constexpr = of_blocks.shape[0]
    N: tl.constexpr = of_blocks.shape[2]
    each = tl.broadcast_to(of_blocks[:, :, :, None], (L, 8, N, B // 2))
    each, _ = tl.split(tl.reshape(each, (L, 8, N * B // 8, 2, 2)))
    each, _ = tl.split(each)
    return each


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
    byte, whole, half, low_live, high_live = _scales_of_columns(
        pairs, average, ROUNDING, INTERPRETED
    )
    # In a function of its own, as `_words_of_rows`, this would spill registers of a SwiGLU's
    # gradient whose Y is in E4M3.
    blocked = tl.reshape(pairs, (L // E, E, 8, C // 2))
    half = tl.broadcast_to(half[:, None, None, :], (L // E, E, 8, C // 2))
    clips: tl.constexpr = ROUNDING.RULE != "ceil" and ROUNDING.PRESCALE == 1.0
    if ROUNDING.STOCHASTIC or ROUNDING.AVERAGED:
        scaled = encode.halved(blocked, half, clips, INTERPRETED)
        if ROUNDING.STOCHASTIC:
            eights = tl.reshape(encode.unpacked(scaled), (L, 2, 2, 2, C))
            eights = tl.permute(eights, (0, 4, 1, 2, 3))
            rest = tl.permute(tl.reshape(rest, (L, 2, 2, 2, C)), (0, 4, 1, 2, 3))
            codes = encode.stochastic(eights, rest, ROUNDING.PRESCALE, INTERPRETED)
            words = encode.words_of_highest(codes, INTERPRETED)
        else:
            average = tl.reshape(average, (L // E, E, 8, C))
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
def _scales_of_columns(pairs, average, ROUNDING: tl.constexpr, INTERPRETED: tl.constexpr):
    """The scales of blocks along the columns.

    pairs, average: as in `quantize_along_rows`.

    Returns int32 [blocks, columns / 2] each. The bytes of the scales, and whole and half, the
    factors of `exponents.powers`: those of two columns in each word. Then -1 for a block without
    Inf and NaN, else 0: of the even columns, and of the odd ones.
    """
    L: tl.constexpr = pairs.shape[0]
    C: tl.constexpr = pairs.shape[2] * 2
    E: tl.constexpr = ROUNDING.BLOCK // 8
    maxima = tl.reshape(_maxima(pairs, 1, INTERPRETED), (L // E, E, C // 2))
    maxima = _maxima(maxima, 1, INTERPRETED)
    found = exponents.of_maxima(maxima, ROUNDING, INTERPRETED)
    byte, whole, half = exponents.powers(found, INTERPRETED)
    low_live, high_live = encode.live(maxima << 16), encode.live(maxima)
    if ROUNDING.RULE == "mse":
        blocked = tl.reshape(pairs, (L // E, E, 8, C // 2))
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
    return byte, whole, half, low_live, high_live
