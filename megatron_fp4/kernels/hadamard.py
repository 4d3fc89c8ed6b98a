"""Quantization to E2M1 codes with E8M0 scales after a Hadamard transform, in Triton.

A transform of 64 elements is the product of six transforms of two, one for each bit of an element's
index. Tensor cores compute four of them, as a product with a matrix of 16. The others are sums and
differences of values that one thread holds. The bits of the product are chosen so that each thread
gets X as memory delivers it, and the result as the quantizer needs it, eight rows of eight columns.
So no data move between threads. docs/notes/quantize-kernels.md has the measurements.

The signs, which multiply X before the transform, are multiplied into the matrices of 16.

A window is the part of a row or column that one step transforms. It has 64 elements for groups of
32 (two groups) and 64, and 128 elements for groups of 128.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_fp4.kernels.encode import rounded_pairs
from megatron_fp4.kernels.launch import kernel
from megatron_fp4.kernels.philox import (
    group_indices,
    key_of,
    rest16,
    rest_of_tile,
    sign_words,
    tile_group_indices,
)
from megatron_fp4.kernels.source import loaded
from megatron_fp4.kernels.tile_mxfp4 import quantize_along_columns, quantize_along_rows


@triton.jit
def _dot_operand(x, INTERPRETED: tl.constexpr):
    """BF16 x as an operand of tl.dot.

    Triton's interpreter would multiply BF16 as the integers of its bits, so there it is float32.
    """
    if INTERPRETED:
        bits = x.to(tl.int16, bitcast=True).to(tl.int32) << 16
        return bits.to(tl.float32, bitcast=True)
    return x


@triton.jit
def _entries(i, j, place, signs, GROUP: tl.constexpr):
    """Entries (i, j) of a Hadamard matrix of 16 in BF16, multiplied by signs.

    i, j: int32, row and column, 0 to 15.
    place: the index, within its group, of the element whose sign multiplies the entry.
    signs: four int32 words, as `philox.sign_words` returns them.
    GROUP: the size of the group. For 64 the entries contain the factor 1 / sqrt(64), which is
        exact; other groups take theirs after the product.
    """
    w0, w1, w2, w3 = signs
    first = tl.where((place & 32) != 0, w1, w0)
    second = tl.where((place & 32) != 0, w3, w2)
    sign = tl.where((place & 64) != 0, second, first) >> (place & 31)
    odd = 0x6996 >> (i & j)  # bit n of 0x6996: whether popcount(n) is odd
    one = 0x3E00 if GROUP == 64 else 0x3F80
    return (one | (((odd ^ sign) & 1) << 15)).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _sum_and_difference(first, second):
    """The Hadamard transform of two elements: [..., 2], their sum and their difference."""
    return tl.join(first + second, first - second)


@triton.jit
def _butterflies(x, BITS: tl.constexpr, BUT: tl.constexpr):
    """Hadamard transforms of two along the first axes of x, which become its last axes.

    x: its elements in row-major order are [2, ..., 2, rest], with BITS axes of 2.
    BUT: the index of one of these axes that is moved but not transformed; -1 if all are
        transformed.

    Returns the elements [rest, 2, ..., 2] in the shape [x.numel / 2, 2].
    """
    for bit in tl.static_range(BITS):
        first, second = tl.split(tl.trans(tl.reshape(x, (2, x.numel // 2))))
        if bit == BUT:
            x = tl.join(first, second)
        else:
            x = _sum_and_difference(first, second)
    return x


@triton.jit
def _scaled(product, FACTOR: tl.constexpr, INTERPRETED: tl.constexpr):
    """Words of two neighbours, float32 [..., 2], multiplied by FACTOR and rounded to BF16."""
    if FACTOR != 1.0:
        product *= FACTOR
    low, high = tl.split(product)
    return rounded_pairs(low, high, INTERPRETED)


# Along the rows. Of the bits of a column's index within its window the product transforms bits 4,
# 3, 1 and 0, and sums and differences transform bits 2, 5 and 6. Bits 4 and 3 number the threads.
# The index into a matrix of 16 has the bits (1, 4, 3, 0), highest first.


@triton.jit
def _matrices_along_rows(signs, GROUP: tl.constexpr, INTERPRETED: tl.constexpr):
    """The 16 x 16 Hadamard matrices for a window along the rows, with the signs.

    signs: four int32 words, as `philox.sign_words` returns them.

    Returns BF16 [2 * BLOCKS, 16, 16]: one matrix for each value of bit 2 of the column's index and
    for each block of 32 columns of the window. The matrices differ only by their signs.
    """
    BLOCKS: tl.constexpr = 4 if GROUP == 128 else 2
    b = tl.arange(0, 2 * BLOCKS)[:, None, None]
    k = tl.arange(0, 16)[None, :, None]
    place = b % BLOCKS * 32 + (k >> 1) % 4 * 8 + b // BLOCKS * 4 + (k >> 3) * 2 + k % 2
    entries = _entries(k, tl.arange(0, 16)[None, None, :], place % GROUP, signs, GROUP)
    return _dot_operand(entries, INTERPRETED)


@triton.jit
def _transformed_along_rows(
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
    """A tile of x transformed along its rows: words of two BF16 [ROWS / 8, 8, window / 2].

    x_ptr: BF16 [n_rows, n_columns].
    h: the matrices of 16, from `_matrices_along_rows`.
    row0, column0: the first row and column of the tile.
    FACTOR: multiplies the result.
    EVEN: whether tiles fill the matrix.
    """
    BLOCKS: tl.constexpr = 4 if GROUP == 128 else 2
    rows = row0 + tl.arange(0, ROWS)[:, None, None]
    block = 32 * tl.arange(0, BLOCKS)[None, :, None]
    columns = column0 + block + tl.arange(0, 32)[None, None, :]
    x = loaded(x_ptr, rows, columns, n_rows, n_columns, EVEN)
    x = tl.permute(tl.reshape(x, (ROWS, BLOCKS, 4, 2, 2, 2)), (3, 1, 0, 4, 2, 5))
    x = _dot_operand(tl.reshape(x, (2 * BLOCKS, ROWS, 16)), INTERPRETED)
    product = tl.dot(x, h, input_precision="ieee")
    product = _butterflies(product, 3 if BLOCKS == 4 else 2, 1 if GROUP == 32 else -1)
    product = tl.permute(tl.reshape(product, (ROWS, 2, 4, 2, 2, BLOCKS)), (0, 5, 2, 4, 1, 3))
    return _scaled(tl.reshape(product, (ROWS // 8, 8, BLOCKS * 16, 2)), FACTOR, INTERPRETED)


@triton.jit
def _rest_along_rows(
    place,
    row0,
    column0,
    key,
    stream,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    HAS_GROUPS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """`philox.rest16` of a tile that is transformed along its rows.

    place: see `philox.group_indices`.
    row0, column0: the first row and column of the tile.
    key: (step, low and high word of the seed).
    stream: the number of the random stream.
    BLOCKS: the number of blocks of 32 columns in the tile.

    Returns int32 [ROWS / 8, 8, BLOCKS * 32]. The bits of a row are drawn by the four threads that
    hold the row after the transform.
    """
    i = tl.arange(0, ROWS // 8 * BLOCKS)[None, None, :]
    rows = row0 + tl.arange(0, 8)[None, :, None] + i // BLOCKS * 8
    groups = column0 // 8 + i % BLOCKS * 4 + tl.arange(0, 4)[:, None, None]
    index = group_indices(place, rows, groups, HAS_GROUPS, INTERPRETED)
    step, seed_low, seed_high = key
    rest = rest16(index, step, stream, seed_low, seed_high, INTERPRETED)
    rest = tl.permute(tl.reshape(rest, (4, 8, ROWS // 8, BLOCKS, 8)), (2, 1, 3, 0, 4))
    return tl.reshape(rest, (ROWS // 8, 8, BLOCKS * 32))


# Along the columns. Of the bits of a row's index within its window the product transforms bits 5,
# 4, 3 and 0, and sums and differences transform bits 2, 1 and 6. For groups of 32 the product
# transforms bits 4, 3, 2 and 0, and sums and differences bit 1. X is the second factor of the
# product. Bits 4, 3 and 2 of a column's index number the threads that load it, and bits 4 and 3 the
# threads that hold the product.


@triton.jit
def _row_along_columns(b, k, GROUP: tl.constexpr):
    """Which row of a window along the columns is multiplied by column k of its b-th matrix of 16.

    b: int32, 0 to window / 16 - 1. k: int32, 0 to 15. Returns the row's index in the window, int32.
    """
    # The number of matrices whose products sums and differences combine.
    SUMS: tl.constexpr = 2 if GROUP == 32 else 4
    return b // SUMS * (16 * SUMS) + k % 8 * (2 * SUMS) + b % SUMS * 2 + (k >> 3)


@triton.jit
def _matrices_along_columns(signs, GROUP: tl.constexpr, INTERPRETED: tl.constexpr):
    """The 16 x 16 Hadamard matrices for a window along the columns, with the signs.

    signs: four int32 words, as `philox.sign_words` returns them.

    Returns BF16 [window / 16, 16, 16]: one matrix for each 16 rows of the window that a product
    combines (`_row_along_columns` lists them). The matrices differ only by their signs.
    """
    b = tl.arange(0, 8 if GROUP == 128 else 4)[:, None, None]
    k = tl.arange(0, 16)[None, None, :]
    place = _row_along_columns(b, k, GROUP) % GROUP
    entries = _entries(tl.arange(0, 16)[None, :, None], k, place, signs, GROUP)
    return _dot_operand(entries, INTERPRETED)


@triton.jit
def _transformed_along_columns(
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
    """A tile of 32 columns of x, transformed along its columns.

    x_ptr: BF16 [n_rows, n_columns].
    h: the matrices of 16, from `_matrices_along_columns`.
    row0, column0: the first row and column of the tile.
    FACTOR: multiplies the result.
    EVEN: whether tiles fill the matrix.

    Returns words of two neighbours of a row, BF16 [window / 8, 8, 16].
    """
    BATCH: tl.constexpr = 8 if GROUP == 128 else 4
    SUMS: tl.constexpr = 2 if GROUP == 32 else 4
    # A warp loads four rows at a time: eight threads for a row, each with four columns.
    i = tl.arange(0, 16)[:, None, None]
    k = (i >> 3) * 8 + i % 4 * 2 + (i >> 2) % 2
    rows = row0 + _row_along_columns(tl.arange(0, BATCH)[None, :, None], k, GROUP)
    columns = tl.multiple_of(column0 + tl.arange(0, 32)[None, None, :], [1, 1, 4])
    x = loaded(x_ptr, rows, columns, n_rows, n_columns, EVEN)
    x = tl.permute(tl.reshape(x, (2, 2, 4, BATCH, 8, 4)), (3, 0, 2, 1, 5, 4))
    x = _dot_operand(tl.reshape(x, (BATCH, 16, 32)), INTERPRETED)
    product = tl.dot(h, x, input_precision="ieee")
    product = _butterflies(product, 3 if BATCH == 8 else 2, 0 if GROUP == 32 else -1)
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
    SIGNS: tl.constexpr,
    FIXED: tl.constexpr,
    ROUNDING: tl.constexpr,
    DRAWS: tl.constexpr,
    TILE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Transforms x in groups along AXIS and quantizes it in blocks along the same axis.

    x_ptr: BF16 [n_rows, n_columns], row-major.
    out: an Output without carriers, since no registers are left to convert to FP8.
    signs_stream, draw: stream and draw word of random signs.
    draw_in_memory: int64 [], holds the draw word instead if DRAWS.IN_MEMORY.
    random, ROUNDING, DRAWS, TILE: see arguments.py.
    SIGNS: as in `arithmetic.hadamard.Hadamard`. FIXED: the words of fixed signs.
    GROUP: 32, 64 or 128. FACTOR: multiplies the transformed values; 1 for GROUP 64, whose matrices
        contain it.

    A program steps through its tile by 16 rows (AXIS 1) or by windows of rows (AXIS 0). It has one
    warp, so that no data move between warps.
    """
    row0 = tl.program_id(0) * TILE.ROWS
    column0 = tl.program_id(1) * TILE.COLUMNS
    place = random.rows, random.groups, n_rows, n_columns // 8, random.groups_per_row
    key = key_of(random, DRAWS.IN_MEMORY)
    if DRAWS.IN_MEMORY:
        draw = tl.load(draw_in_memory)
    signs = 0, 0, 0, 0
    if SIGNS == "fixed":
        signs = FIXED[0], FIXED[1], FIXED[2], FIXED[3]
    if SIGNS == "random":
        signs = sign_words(draw, signs_stream, key)
    if AXIS == 1:
        h = _matrices_along_rows(signs, GROUP, INTERPRETED)
        for i in range(TILE.ROWS // 16):
            first = row0 + 16 * i
            rows = first + 8 * tl.arange(0, 2)[:, None] + tl.arange(0, 8)[None, :]
            pairs = _transformed_along_rows(
                x_ptr, h, first, column0, n_rows, n_columns, 16, GROUP, FACTOR, TILE.EVEN,
                INTERPRETED,
            )  # fmt: skip
            rest = 0
            if ROUNDING.STOCHASTIC:
                rest = _rest_along_rows(
                    place, first, column0, key, out.stream, 16, TILE.COLUMNS // 32,
                    DRAWS.HAS_GROUPS, INTERPRETED,
                )  # fmt: skip
            quantize_along_rows(
                pairs, rest, 0, out, 0, rows, column0, n_rows, n_columns,
                0, ROUNDING, TILE.EVEN, INTERPRETED,
            )  # fmt: skip
    else:
        WINDOW: tl.constexpr = 128 if GROUP == 128 else 64
        h = _matrices_along_columns(signs, GROUP, INTERPRETED)
        for i in range(TILE.ROWS // WINDOW):
            first = row0 + WINDOW * i
            pairs = _transformed_along_columns(
                x_ptr, h, first, column0, n_rows, n_columns, GROUP, FACTOR, TILE.EVEN, INTERPRETED
            )
            rest = 0
            if ROUNDING.STOCHASTIC:
                index = tile_group_indices(
                    place, first, column0, WINDOW, 32, DRAWS.HAS_GROUPS, INTERPRETED
                )
                rest = rest_of_tile(index, key, out.stream, INTERPRETED)
            quantize_along_columns(
                pairs, rest, 0, out, 0, first, column0, n_rows, n_columns,
                0, ROUNDING, TILE.EVEN, INTERPRETED,
            )  # fmt: skip
