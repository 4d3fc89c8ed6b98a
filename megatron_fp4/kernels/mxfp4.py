"""Quantization to E2M1 codes with an E8M0 scale for each block of 16 or 32, in Triton.

A tile of the matrix is read once and quantized in blocks along its rows, along its columns, or
both; tile_mxfp4.py quantizes a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_fp4.kernels import fp8
from megatron_fp4.kernels.launch import kernel
from megatron_fp4.kernels.philox import key_of, rest_of_tile, tile_group_indices
from megatron_fp4.kernels.source import loaded, read_tile
from megatron_fp4.kernels.tile_mxfp4 import quantize_along_columns, quantize_along_rows


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
