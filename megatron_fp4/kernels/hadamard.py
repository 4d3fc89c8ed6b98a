"""MXFP4 quantization after a Hadamard transform, in Triton.

H of 64 is the product of six transforms of two, one for each bit of an element's index. Tensor
cores make four of them, as a product with a matrix of 16; the others are sums and differences of
what one thread holds. Which bits are which is chosen so that threads hold the product as the
quantizer wants it, eight rows of eight columns, and X as memory gives it: nothing changes hands.

Signs come before H: they are those of the matrices' entries. A group of 32 is half of a window of
64, one of 128 a window of its own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_fp4.kernels.encode import bf16_bits
from megatron_fp4.kernels.launch import kernel
from megatron_fp4.kernels.mxfp4 import loaded, quantize_along_columns, quantize_along_rows
from megatron_fp4.kernels.philox import (
    group_indices,
    noise_of,
    rest16,
    rest_of_tile,
    sign_words,
    tile_group_indices,
)


@triton.jit
def _rounded(low, high, INTERPRETED: tl.constexpr):
    """Words of two float32 rounded to BF16."""
    if INTERPRETED:
        return bf16_bits(low) | (bf16_bits(high) << 16)
    return tl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _factor(x, INTERPRETED: tl.constexpr):
    """A factor of a product, BF16. Triton's interpreter would multiply that as the integers of its
    bits: float32 there."""
    if INTERPRETED:
        bits = x.to(tl.int16, bitcast=True).to(tl.int32) << 16
        return bits.to(tl.float32, bitcast=True)
    return x


@triton.jit
def _entries(i, j, place, signs, GROUP: tl.constexpr):
    """(-1)^popcount(i and j) with the sign at `place` of a group, one of 128 bits; over 8, the root
    of 64, where that is the group. BF16."""
    w0, w1, w2, w3 = signs
    first = tl.where((place & 32) != 0, w1, w0)
    second = tl.where((place & 32) != 0, w3, w2)
    sign = tl.where((place & 64) != 0, second, first) >> (place & 31)
    odd = 0x6996 >> (i & j)  # bit n: whether popcount(n) is
    one = 0x3E00 if GROUP == 64 else 0x3F80
    return (one | (((odd ^ sign) & 1) << 15)).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _sum_and_difference(first, second):
    """The Hadamard transform of two elements: [..., 2] of their sum and their difference."""
    return tl.join(first + second, first - second)


@triton.jit
def _summed(x, BITS: tl.constexpr, BUT: tl.constexpr):
    """x [2, ..., 2, rest], transformed over its first axes but one, which become the last."""
    for bit in tl.static_range(BITS):
        first, second = tl.split(tl.trans(tl.reshape(x, (2, x.numel // 2))))
        if bit == BUT:
            x = tl.join(first, second)
        else:
            x = _sum_and_difference(first, second)
    return x


@triton.jit
def _scaled(product, FACTOR: tl.constexpr, INTERPRETED: tl.constexpr):
    """Words of two neighbours of a product [..., 2]."""
    if FACTOR != 1.0:
        product *= FACTOR
    low, high = tl.split(product)
    return _rounded(low, high, INTERPRETED)


# Bits of a column's index within its window, along the rows: 4 and 3 the thread, 1 and 0 with them
# in the product, 2, 5 and 6 in sums. The product's index is (1, 4, 3, 0).


@triton.jit
def _matrices_along(signs, GROUP: tl.constexpr, INTERPRETED: tl.constexpr):
    """[2 * blocks, 16, 16], by bit 2 and the block of 32."""
    BLOCKS: tl.constexpr = 4 if GROUP == 128 else 2
    b = tl.arange(0, 2 * BLOCKS)[:, None, None]
    k = tl.arange(0, 16)[None, :, None]
    place = b % BLOCKS * 32 + (k >> 1) % 4 * 8 + b // BLOCKS * 4 + (k >> 3) * 2 + k % 2
    entries = _entries(k, tl.arange(0, 16)[None, None, :], place % GROUP, signs, GROUP)
    return _factor(entries, INTERPRETED)


@triton.jit
def _transformed_along(
    x_ptr,
    h,
    row0,
    column0,
    n_rows,
    n_columns,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    FACTOR: tl.constexpr,
    EVEN: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """A tile transformed along its rows: words of two BF16 [ROWS / 8, 8, window / 2]."""
    BLOCKS: tl.constexpr = 4 if GROUP == 128 else 2
    rows = row0 + tl.arange(0, ROWS)[:, None, None]
    block = 32 * tl.arange(0, BLOCKS)[None, :, None]
    columns = column0 + block + tl.arange(0, 32)[None, None, :]
    x = loaded(x_ptr, rows, columns, n_rows, n_columns, EVEN)
    x = tl.permute(tl.reshape(x, (ROWS, BLOCKS, 4, 2, 2, 2)), (3, 1, 0, 4, 2, 5))
    x = _factor(tl.reshape(x, (2 * BLOCKS, ROWS, 16)), INTERPRETED)
    product = tl.dot(x, h, input_precision="ieee")
    product = _summed(product, 3 if BLOCKS == 4 else 2, 1 if GROUP == 32 else -1)
    product = tl.permute(tl.reshape(product, (ROWS, 2, 4, 2, 2, BLOCKS)), (0, 5, 2, 4, 1, 3))
    return _scaled(tl.reshape(product, (ROWS // 8, 8, BLOCKS * 16, 2)), FACTOR, INTERPRETED)


@triton.jit
def _rest_along(
    place,
    row0,
    column0,
    noise,
    stream,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    HAS_GROUPS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """`rest16` of such a tile, four threads to a row."""
    i = tl.arange(0, ROWS // 8 * BLOCKS)[None, None, :]
    rows = row0 + tl.arange(0, 8)[None, :, None] + i // BLOCKS * 8
    groups = column0 // 8 + i % BLOCKS * 4 + tl.arange(0, 4)[:, None, None]
    index = group_indices(place, rows, groups, HAS_GROUPS, INTERPRETED)
    step, seed_low, seed_high = noise
    rest = rest16(index, step, stream, seed_low, seed_high, INTERPRETED)
    rest = tl.permute(tl.reshape(rest, (4, 8, ROWS // 8, BLOCKS, 8)), (2, 1, 3, 0, 4))
    return tl.reshape(rest, (ROWS // 8, 8, BLOCKS * 32))


# Bits of a row's index within its window, along the columns: 5, 4, 3 and 0 in the product, 2, 1 and
# 6 in sums; of a group of 32 4, 3, 2 and 0, and 1. Columns are a matrix's second factor, which
# threads hold by the columns' bits 4, 3 and 2, and the product by 4 and 3.


@triton.jit
def _row_across(b, k, GROUP: tl.constexpr):
    """Which row is k in the matrix b of a window."""
    SUMS: tl.constexpr = 2 if GROUP == 32 else 4  # that the lower bits make
    return b // SUMS * (16 * SUMS) + k % 8 * (2 * SUMS) + b % SUMS * 2 + (k >> 3)


@triton.jit
def _matrices_across(signs, GROUP: tl.constexpr, INTERPRETED: tl.constexpr):
    """[window / 16, 16, 16]."""
    b = tl.arange(0, 8 if GROUP == 128 else 4)[:, None, None]
    k = tl.arange(0, 16)[None, None, :]
    place = _row_across(b, k, GROUP) % GROUP
    entries = _entries(tl.arange(0, 16)[None, :, None], k, place, signs, GROUP)
    return _factor(entries, INTERPRETED)


@triton.jit
def _transformed_across(
    x_ptr,
    h,
    row0,
    column0,
    n_rows,
    n_columns,
    GROUP: tl.constexpr,
    FACTOR: tl.constexpr,
    EVEN: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """A tile of 32 columns transformed along them: words of two neighbours in a row, BF16
    [window / 8, 8, 16]."""
    BATCH: tl.constexpr = 8 if GROUP == 128 else 4
    SUMS: tl.constexpr = 2 if GROUP == 32 else 4
    # As memory is read the threads of a warp take four rows of eight times four columns.
    i = tl.arange(0, 16)[:, None, None]
    k = (i >> 3) * 8 + i % 4 * 2 + (i >> 2) % 2
    rows = row0 + _row_across(tl.arange(0, BATCH)[None, :, None], k, GROUP)
    columns = tl.multiple_of(column0 + tl.arange(0, 32)[None, None, :], [1, 1, 4])
    x = loaded(x_ptr, rows, columns, n_rows, n_columns, EVEN)
    x = tl.permute(tl.reshape(x, (2, 2, 4, BATCH, 8, 4)), (3, 0, 2, 1, 5, 4))
    x = _factor(tl.reshape(x, (BATCH, 16, 32)), INTERPRETED)
    product = tl.dot(h, x, input_precision="ieee")
    product = _summed(product, 3 if BATCH == 8 else 2, 0 if GROUP == 32 else -1)
    product = tl.reshape(product, (2, 8, 4, 8, BATCH // SUMS, SUMS))
    product = tl.permute(product, (4, 1, 5, 0, 3, 2))
    return _scaled(tl.reshape(product, (BATCH * 2, 8, 16, 2)), FACTOR, INTERPRETED)


@kernel(fp_fusion=True)
def transform_kernel(
    x_ptr,
    out,
    signs_stream,
    draw,
    draw_in_memory,
    random,
    n_rows,
    n_columns,
    GROUP: tl.constexpr,
    FACTOR: tl.constexpr,
    AXIS: tl.constexpr,
    HAS_SIGNS: tl.constexpr,
    ROUNDING: tl.constexpr,
    DRAWS: tl.constexpr,
    TILE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Transforms x in groups along AXIS and quantizes it in blocks along the same axis.

    x_ptr: BF16 [n_rows, n_columns], row-major. out: an Output without carriers, for which no
        registers are left.
    signs_stream, draw, draw_in_memory: the stream and the draw of the random signs, if HAS_SIGNS;
        the draw is int64 [] in memory if DRAWS.IN_MEMORY.
    random, ROUNDING, DRAWS, TILE: see arguments.py.
    FACTOR: multiplies the transformed values.

    A program steps through its tile by 16 rows (AXIS 1) or by windows of rows (AXIS 0). It has one
    warp, so that no data moves between warps.
    """
    row0 = tl.program_id(0) * TILE.ROWS
    column0 = tl.program_id(1) * TILE.COLUMNS
    place = random.rows, random.groups, n_rows, n_columns // 8, random.groups_per_row
    noise = noise_of(random, DRAWS.IN_MEMORY)
    if DRAWS.IN_MEMORY:
        draw = tl.load(draw_in_memory)
    signs = 0, 0, 0, 0
    if HAS_SIGNS:
        signs = sign_words(draw, signs_stream, noise)
    if AXIS == 1:
        h = _matrices_along(signs, GROUP, INTERPRETED)
        for i in range(TILE.ROWS // 16):
            first = row0 + 16 * i
            rows = first + 8 * tl.arange(0, 2)[:, None] + tl.arange(0, 8)[None, :]
            pairs = _transformed_along(
                x_ptr, h, first, column0, n_rows, n_columns, 16, GROUP, FACTOR, TILE.EVEN,
                INTERPRETED,
            )  # fmt: skip
            rest = 0
            if ROUNDING.STOCHASTIC:
                rest = _rest_along(
                    place, first, column0, noise, out.stream, 16, TILE.COLUMNS // 32,
                    DRAWS.HAS_GROUPS, INTERPRETED,
                )  # fmt: skip
            quantize_along_rows(
                pairs, rest, 0, out, 0, rows, column0, n_rows, n_columns,
                0, ROUNDING, TILE.EVEN, INTERPRETED,
            )  # fmt: skip
    else:
        WINDOW: tl.constexpr = 128 if GROUP == 128 else 64
        h = _matrices_across(signs, GROUP, INTERPRETED)
        for i in range(TILE.ROWS // WINDOW):
            first = row0 + WINDOW * i
            pairs = _transformed_across(
                x_ptr, h, first, column0, n_rows, n_columns, GROUP, FACTOR, TILE.EVEN, INTERPRETED
            )
            rest = 0
            if ROUNDING.STOCHASTIC:
                index = tile_group_indices(
                    place, first, column0, WINDOW, 32, DRAWS.HAS_GROUPS, INTERPRETED
                )
                rest = rest_of_tile(index, noise, out.stream, INTERPRETED)
            quantize_along_columns(
                pairs, rest, 0, out, 0, first, column0, n_rows, n_columns,
                0, ROUNDING, TILE.EVEN, INTERPRETED,
            )  # fmt: skip
