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
def _times_up(a, b, INTERPRETED: tl.constexpr):
    """a * b for a >= 0, rounded up."""
    if INTERPRETED:
        product = a * b
        short = (product * (1.0 / b) < a).to(tl.int32)
        return (product.to(tl.int32, bitcast=True) + short).to(tl.float32, bitcast=True)
    return tl.inline_asm_elementwise(
        "mul.rp.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _encode(v, bits, STOCHASTIC: tl.constexpr, FLOOR: tl.constexpr, INTERPRETED: tl.constexpr):
    """E2M1 codes (int32) of scaled values with few significant bits, as BF16 has.

    Divided by 2^126 the grid's 1 is float32's smallest normal number, so that 1/2 is subnormal in
    both: the bits of a magnitude are then its code, and 22 bits of the way to the next one.
    """
    sign = (v.to(tl.int32, bitcast=True) >> 28) & 8
    a = tl.abs(v)
    if FLOOR:  # ceil scales leave nothing above 6
        a = tl.minimum(a, 6.0)
    down = tl.full([], 1.1754943508222875e-38, tl.float32)  # 2^-126
    if STOCHASTIC:
        # Up if the way, of 2^22, is above (bits + 1/2) 2^6.
        way = _times_up(a, down, INTERPRETED).to(tl.int32, bitcast=True)
        return sign | ((way + (0x3FFFFF - 32) - (bits << 6)) >> 22)
    way = (a * down).to(tl.int32, bitcast=True)
    return sign | ((way + 0x1FFFFF + ((way >> 22) & 1)) >> 22)


@triton.jit
def _encode_wide(v, bits, STOCHASTIC: tl.constexpr):
    """E2M1 codes (int32) of scaled values, with any float32's significant bits."""
    sign = (v.to(tl.int32, bitcast=True) >> 28) & 8
    a = tl.minimum(tl.abs(v), 6.0)
    # The grid's step is half of the power of two below, and 1/2 below 1.
    field = tl.maximum(a.to(tl.int32, bitcast=True) & 0x7F800000, 0x3F800000)
    if STOCHASTIC:
        # In steps, as a fixed-point number with 16 bits after the point.
        y = a * ((144 << 23) - (field - (127 << 23))).to(tl.float32, bitcast=True)
        whole = tl.floor(y)
        fixed = whole.to(tl.int32) + (y - whole > 0.5).to(tl.int32)
        # Up if the fraction is above (bits + 1/2) / 65536.
        steps = (fixed + 65535 - bits) >> 16
    else:
        # Added to a number whose last bit is one step, it is rounded to nearest even.
        anchor = (field + (22 << 23)).to(tl.float32, bitcast=True)
        steps = (a + anchor).to(tl.int32, bitcast=True) & 7
    return sign | (steps + (field >> 22) - 254)


@triton.jit
def _scales(widest, CEIL: tl.constexpr):
    """(E8M0 bytes, which blocks are finite) of the bits of the blocks' largest magnitudes; as
    integers NaN is above Inf."""
    byte = (widest >> 23) - 2
    if CEIL:
        byte += ((widest & 0x7FFFFF) > 0x400000).to(tl.int32)  # above 1.5, 6 is too small
    return tl.maximum(byte, 0), widest < 0x7F800000


@triton.jit
def _quantized(
    v,
    bits,
    AXIS: tl.constexpr,
    CEIL: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    WIDE: tl.constexpr,
    PRESCALE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """(E2M1 codes, E8M0 bytes, which blocks are finite) of v, whose AXIS of 32 is that of the
    blocks; those that are not have codes 0."""
    widest = tl.max(v.to(tl.int32, bitcast=True) & 0x7FFFFFFF, AXIS)
    byte, finite = _scales(widest, CEIL)
    inverse = ((254 - byte) << 23).to(tl.float32, bitcast=True)
    scaled = v * tl.expand_dims(inverse, AXIS)
    if STOCHASTIC:
        bits = tl.reshape(bits, v.shape)
    # A prescale, and an input wider than BF16, have more bits than the fast way tells apart.
    if WIDE or PRESCALE != 1.0:
        code = _encode_wide(scaled * PRESCALE, bits, STOCHASTIC)
    else:
        code = _encode(scaled, bits, STOCHASTIC, not CEIL, INTERPRETED)
    return tl.where(tl.expand_dims(finite, AXIS), code, 0), byte, finite


@triton.jit
def _packed(code):
    """int32 words of eight codes each, which lie in three last axes of 2."""
    even, odd = tl.split(code)
    low, high = tl.split(even | (odd << 4))
    first, last = tl.split(low | (high << 8))
    return first | (last << 16)


@triton.jit
def _stored(values, ptr, rows, columns, n_rows, n_columns):
    """Stores values[i, j] at [rows[i], columns[j]] of a row-major matrix."""
    there = (rows < n_rows)[:, None] & (columns < n_columns)[None, :]
    tl.store(ptr + rows[:, None].to(tl.int64) * n_columns + columns[None, :], values, mask=there)


@triton.jit
def _along(
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
    WIDE: tl.constexpr,
    PRESCALE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """The copy with blocks along the rows of a tile: [rows, columns]."""
    R: tl.constexpr = v.shape[0]
    C: tl.constexpr = v.shape[1]
    blocked = tl.reshape(v, (R, C // 32, 32))
    code, byte, finite = _quantized(
        blocked, bits, 2, CEIL, STOCHASTIC, WIDE, PRESCALE, INTERPRETED
    )  # fmt: skip
    packed = _packed(tl.reshape(code, (R, C // 8, 2, 2, 2)))
    rows = row0 + tl.arange(0, R)
    words = column0 // 8 + tl.arange(0, C // 8)
    _stored(packed, codes_ptr, rows, words, n_rows, n_columns // 8)
    blocks = column0 // 32 + tl.arange(0, C // 32)
    byte = tl.where(finite, byte, 255).to(tl.uint8)
    _stored(byte, scales_ptr, rows, blocks, n_rows, n_columns // 32)


@triton.jit
def _across(
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
    WIDE: tl.constexpr,
    PRESCALE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """The copy with blocks along the columns of a tile: [columns, rows]. Elements stay where they
    are until eight of them are a word."""
    R: tl.constexpr = v.shape[0]
    C: tl.constexpr = v.shape[1]
    blocked = tl.reshape(v, (R // 32, 32, C))
    code, byte, finite = _quantized(
        blocked, bits, 1, CEIL, STOCHASTIC, WIDE, PRESCALE, INTERPRETED
    )  # fmt: skip
    eights = tl.reshape(code, (R // 8, 2, 2, 2, C))
    packed = tl.trans(_packed(tl.permute(eights, (0, 4, 1, 2, 3))))
    columns = column0 + tl.arange(0, C)
    words = row0 // 8 + tl.arange(0, R // 8)
    _stored(packed, codes_ptr, columns, words, n_columns, n_rows // 8)
    blocks = row0 // 32 + tl.arange(0, R // 32)
    byte = tl.trans(tl.where(finite, byte, 255).to(tl.uint8))
    _stored(byte, scales_ptr, columns, blocks, n_columns, n_rows // 32)


@triton.jit
def _widened(x):
    """float32 of a tile; BF16 by its bits, which holds for subnormal numbers everywhere."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def _hadamard(GROUP: tl.constexpr):
    """The symmetric matrix H of a group, float32."""
    i = tl.arange(0, GROUP)
    parity = i[:, None] & i[None, :]
    parity ^= parity >> 4
    parity ^= parity >> 2
    parity ^= parity >> 1
    return (1 - 2 * (parity & 1)).to(tl.float32)


@triton.jit
def _rounded(product, FACTOR: tl.constexpr, INTERPRETED: tl.constexpr):
    """float32 of product * FACTOR rounded to BF16; Triton's interpreter would cut it off."""
    product *= FACTOR
    if INTERPRETED:
        word = product.to(tl.int32, bitcast=True)
        even = (word + 0x7FFF + ((word >> 16) & 1)) & -0x10000
        return tl.where(tl.abs(product) < float("inf"), even.to(tl.float32, bitcast=True), product)
    return product.to(tl.bfloat16).to(tl.float32)


@triton.jit
def _product(a, b, INTERPRETED: tl.constexpr):
    """a b in float32 of matrices that are exact in BF16; Triton's interpreter would multiply BF16
    as the integers of its bits."""
    if INTERPRETED:
        return tl.dot(a, b, input_precision="ieee")
    return tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16))


@triton.jit
def _turned_along(
    v,
    signs_ptr,
    GROUP: tl.constexpr,
    SIGNED: tl.constexpr,
    FACTOR: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """v diag(signs) H / sqrt(g) along the rows of a tile, rounded to BF16."""
    R: tl.constexpr = v.shape[0]
    C: tl.constexpr = v.shape[1]
    h = _hadamard(GROUP)
    if SIGNED:  # the signs come first: they are those of H's rows
        h *= tl.load(signs_ptr + tl.arange(0, GROUP))[:, None]
    product = _product(tl.reshape(v, (R * C // GROUP, GROUP)), h, INTERPRETED)
    return tl.reshape(_rounded(product, FACTOR, INTERPRETED), (R, C))


@triton.jit
def _turned_across(
    v,
    signs_ptr,
    GROUP: tl.constexpr,
    SIGNED: tl.constexpr,
    FACTOR: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """The same along the columns of a tile that has a group of rows: H diag(signs) v / sqrt(g)."""
    h = _hadamard(GROUP)
    if SIGNED:
        h *= tl.load(signs_ptr + tl.arange(0, GROUP))[None, :]
    return _rounded(_product(h, v, INTERPRETED), FACTOR, INTERPRETED)


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
    WIDE: tl.constexpr = x.dtype != tl.bfloat16
    v = _widened(x)
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
        turned = v
        if HADAMARD:
            turned = _turned_along(v, along_signs_ptr, HADAMARD, SIGNED, FACTOR, INTERPRETED)
        _along(
            turned, bits, along_codes_ptr, along_scales_ptr, row0, column0, n_rows, n_columns,
            CEIL, STOCHASTIC, WIDE, PRESCALE, INTERPRETED,
        )  # fmt: skip
    if ACROSS:
        if STOCHASTIC:
            bits = _bits16(at_rows, at_groups, per_row, step, across_stream, seed_low, seed_high)
        turned = v
        if HADAMARD:
            turned = _turned_across(v, across_signs_ptr, HADAMARD, SIGNED, FACTOR, INTERPRETED)
        _across(
            turned, bits, across_codes_ptr, across_scales_ptr, row0, column0, n_rows, n_columns,
            CEIL, STOCHASTIC, WIDE, PRESCALE, INTERPRETED,
        )  # fmt: skip
