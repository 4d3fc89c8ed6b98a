"""MXFP4 quantization in Triton: E2M1 codes two a byte and E8M0 scales, bit for bit the reference's.

The bits are those of docs/numerics.md; `quantizer.py` is the oracle. A tile of the matrix is read
once and its blocks of 32 are cut along the rows or along the columns.
"""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = 32  # elements that share a scale
GROUP = 8  # elements that share a random draw


@triton.jit
def _philox(index, step, stream, seed_low, seed_high):
    """Four words of Philox-4x32-7 for each 64-bit index (megatron_fp4/philox.py)."""
    c0 = index.to(tl.uint32)
    c1 = (index >> 32).to(tl.uint32)
    c2 = tl.zeros_like(c0) + step.to(tl.uint32)
    c3 = tl.zeros_like(c0) + stream.to(tl.uint32)
    k0 = seed_low.to(tl.uint32)
    k1 = seed_high.to(tl.uint32)
    for _ in tl.static_range(7):
        low0 = c0 * 0xD2511F53
        high0 = tl.umulhi(c0, tl.full(c0.shape, 0xD2511F53, tl.uint32))
        low1 = c2 * 0xCD9E8D57
        high1 = tl.umulhi(c2, tl.full(c0.shape, 0xCD9E8D57, tl.uint32))
        c0 = high1 ^ c1 ^ k0
        c2 = high0 ^ c3 ^ k1
        c1 = low1
        c3 = low0
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def _bits16(rows, groups, per_row, step, stream, seed_low, seed_high):
    """Random integers in [0, 65536) of a tile, [rows, 8 * groups]: element j of a group takes word
    j // 2 of its draw, the low half if j is even, the high half if it is odd."""
    index = rows[:, None].to(tl.int64) * per_row + groups[None, :]
    w0, w1, w2, w3 = _philox(index, step, stream, seed_low, seed_high)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [rows, groups, 2, 2]: w0 w1, w2 w3
    halves = tl.join(words & 0xFFFF, words >> 16)
    return tl.reshape(halves, (rows.shape[0], groups.shape[0] * 8)).to(tl.int32)


@triton.jit
def _encode(v, bits, STOCHASTIC: tl.constexpr, EXACT: tl.constexpr):
    """E2M1 codes (int32) of scaled values. EXACT: v may have more than 16 significant bits."""
    word = v.to(tl.int32, bitcast=True)
    sign = (word >> 28) & 8
    a = tl.minimum(tl.abs(v), 6.0)
    # The grid's step is half of the power of two below, and 1/2 below 1.
    field = tl.maximum(a.to(tl.int32, bitcast=True) & 0x7F800000, 0x3F800000)
    if STOCHASTIC:
        # In steps, as a fixed-point number with 16 bits after the point.
        y = a * ((144 << 23) - (field - (127 << 23))).to(tl.float32, bitcast=True)
        if EXACT:
            whole = tl.floor(y)
            fixed = whole.to(tl.int32) + (y - whole > 0.5).to(tl.int32)
        else:
            fixed = tl.ceil(y - 0.5).to(tl.int32)
        # Up if the fraction is above (bits + 1/2) / 65536.
        steps = (fixed + 65535 - bits) >> 16
    else:
        # Added to a number whose last bit is one step, it is rounded to nearest even.
        anchor = (field + (22 << 23)).to(tl.float32, bitcast=True)
        steps = (a + anchor).to(tl.int32, bitcast=True) & 7
    return sign | (steps + (field >> 22) - 254)


@triton.jit
def _blocks(
    v,
    bits,
    codes_ptr,
    scales_ptr,
    row0,
    column0,
    n_rows,
    n_columns,
    CEIL: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    EXACT: tl.constexpr,
    PRESCALE: tl.constexpr,
):
    """Quantizes a tile in blocks along its last axis, and stores codes and scales."""
    R: tl.constexpr = v.shape[0]
    K: tl.constexpr = v.shape[1]
    word = v.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    widest = tl.max(tl.reshape(word, (R, K // 32, 32)), 2)  # as integers: NaN is above Inf
    finite = widest < 0x7F800000
    byte = (widest >> 23) - 2
    if CEIL:
        byte += ((widest & 0x7FFFFF) > 0x400000).to(tl.int32)  # above 1.5, 6 is too small
    byte = tl.maximum(byte, 0)
    inverse = ((254 - byte) << 23).to(tl.float32, bitcast=True)
    scaled = tl.reshape(v, (R, K // 32, 32)) * inverse[:, :, None]
    if PRESCALE != 1.0:
        scaled *= PRESCALE
    if STOCHASTIC:
        bits = tl.reshape(bits, (R, K // 32, 32))
    code = _encode(scaled, bits, STOCHASTIC, EXACT)
    code = tl.where(finite[:, :, None], code, 0)
    low, high = tl.split(tl.reshape(code, (R, K // 2, 2)))
    rows = row0 + tl.arange(0, R)
    packed = column0 // 2 + tl.arange(0, K // 2)
    there = (rows < n_rows)[:, None] & (packed < n_columns // 2)[None, :]
    places = rows[:, None].to(tl.int64) * (n_columns // 2) + packed[None, :]
    tl.store(codes_ptr + places, (low | (high << 4)).to(tl.uint8), mask=there)
    blocks = column0 // 32 + tl.arange(0, K // 32)
    there = (rows < n_rows)[:, None] & (blocks < n_columns // 32)[None, :]
    places = rows[:, None].to(tl.int64) * (n_columns // 32) + blocks[None, :]
    tl.store(scales_ptr + places, tl.where(finite, byte, 255).to(tl.uint8), mask=there)


@triton.jit
def _widened(x):
    """float32 of a tile; BF16 by its bits, which holds for subnormal numbers everywhere."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def _transformed(
    x,
    signs_ptr,
    GROUP: tl.constexpr,
    SIGNED: tl.constexpr,
    FACTOR: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """float32 of x diag(signs) H / sqrt(g) along the last axis of a BF16 tile, rounded to BF16.
    INTERPRETED: Triton's interpreter multiplies BF16 matrices as the integers of their bits, and
    cuts numbers off where it should round them to BF16."""
    R: tl.constexpr = x.shape[0]
    K: tl.constexpr = x.shape[1]
    i = tl.arange(0, GROUP)
    parity = i[:, None] & i[None, :]
    parity ^= parity >> 4
    parity ^= parity >> 2
    parity ^= parity >> 1
    h = (1 - 2 * (parity & 1)).to(tl.float32)
    if SIGNED:  # the signs come first: they are those of H's rows
        h *= tl.load(signs_ptr + i)[:, None]
    grouped = tl.reshape(x, (R * K // GROUP, GROUP))
    if INTERPRETED:
        product = tl.dot(_widened(grouped), h, input_precision="ieee") * FACTOR
        word = product.to(tl.int32, bitcast=True)
        even = word + 0x7FFF + ((word >> 16) & 1)
        rounded = (even & -0x10000).to(tl.float32, bitcast=True)
        rounded = tl.where(tl.abs(product) < float("inf"), rounded, product)
    else:
        product = tl.dot(grouped, h.to(tl.bfloat16)) * FACTOR
        rounded = product.to(tl.bfloat16).to(tl.float32)
    return tl.reshape(rounded, (R, K))


@triton.jit
def _direction(
    x,
    bits,
    codes_ptr,
    scales_ptr,
    signs_ptr,
    row0,
    column0,
    n_rows,
    n_columns,
    CEIL: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    PRESCALE: tl.constexpr,
    HADAMARD: tl.constexpr,
    SIGNED: tl.constexpr,
    FACTOR: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """One copy of a tile whose last axis is the blocked one."""
    EXACT: tl.constexpr = x.dtype == tl.float32
    if HADAMARD:
        v = _transformed(x, signs_ptr, HADAMARD, SIGNED, FACTOR, INTERPRETED)
    else:
        v = _widened(x)
    _blocks(
        v, bits, codes_ptr, scales_ptr, row0, column0, n_rows, n_columns,
        CEIL, STOCHASTIC, EXACT, PRESCALE,
    )  # fmt: skip


# Else every step, stream and seed that is 1 or a multiple of 16 would be another kernel.
_NUMBERS = ["along_stream", "across_stream", "per_row", "step", "seed_low", "seed_high"]


@triton.jit(do_not_specialize=_NUMBERS)
def quantize_kernel(
    x_ptr,
    along_codes_ptr,
    along_scales_ptr,
    along_signs_ptr,
    along_stream,
    across_codes_ptr,
    across_scales_ptr,
    across_signs_ptr,
    across_stream,
    rows_ptr,
    groups_ptr,
    n_rows,
    n_columns,
    per_row,
    step,
    seed_low,
    seed_high,
    ALONG: tl.constexpr,
    ACROSS: tl.constexpr,
    CEIL: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    PRESCALE: tl.constexpr,
    HADAMARD: tl.constexpr,
    SIGNED: tl.constexpr,
    FACTOR: tl.constexpr,
    INTERPRETED: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HAS_GROUPS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """x [n_rows, n_columns], row-major, is read once. ALONG: blocks along its rows, codes [n_rows,
    n_columns / 2]; ACROSS: blocks along its columns, codes [n_columns, n_rows / 2]."""
    row0 = tl.program_id(0) * TILE_ROWS
    column0 = tl.program_id(1) * TILE_COLUMNS
    rows = row0 + tl.arange(0, TILE_ROWS)
    columns = column0 + tl.arange(0, TILE_COLUMNS)
    there = (rows < n_rows)[:, None] & (columns < n_columns)[None, :]
    places = rows[:, None].to(tl.int64) * n_columns + columns[None, :]
    x = tl.load(x_ptr + places, mask=there, other=0.0)
    bits = 0
    if STOCHASTIC:
        groups = column0 // 8 + tl.arange(0, TILE_COLUMNS // 8)
        at_rows = rows.to(tl.int64)
        at_groups = groups.to(tl.int64)
        if HAS_ROWS:
            at_rows = tl.load(rows_ptr + rows, mask=rows < n_rows, other=0)
        if HAS_GROUPS:
            at_groups = tl.load(groups_ptr + groups, mask=groups < n_columns // 8, other=0)
    if ALONG:
        if STOCHASTIC:
            bits = _bits16(at_rows, at_groups, per_row, step, along_stream, seed_low, seed_high)
        _direction(
            x, bits, along_codes_ptr, along_scales_ptr, along_signs_ptr,
            row0, column0, n_rows, n_columns,
            CEIL, STOCHASTIC, PRESCALE, HADAMARD, SIGNED, FACTOR, INTERPRETED,
        )  # fmt: skip
    if ACROSS:
        if STOCHASTIC:
            bits = _bits16(at_rows, at_groups, per_row, step, across_stream, seed_low, seed_high)
            bits = tl.trans(bits)
        _direction(
            tl.trans(x), bits, across_codes_ptr, across_scales_ptr, across_signs_ptr,
            column0, row0, n_columns, n_rows,
            CEIL, STOCHASTIC, PRESCALE, HADAMARD, SIGNED, FACTOR, INTERPRETED,
        )  # fmt: skip
