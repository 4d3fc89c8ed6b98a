"""Quantization to FP8 or E2M1 with a float32 scale for each row of an operand, or for all of it.

docs/numerics.md, Float32, defines the scales. One Triton kernel finds the largest magnitudes.
Another scales, rounds and, if the rows of the operand are columns of the matrix, transposes.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_fp4.arithmetic.formats import element_max
from megatron_fp4.arithmetic.quantizer import QuantizedTensor, Quantizer
from megatron_fp4.kernels.encode import nearest, nearest_even, pack
from megatron_fp4.kernels.launch import Launch, kernel, planned, tiles

EXPONENTS = {"e4m3": (3, 7), "e5m2": (2, 15), "e2m1": (1, 1)}  # mantissa bits and bias
TILE_ROWS, TILE_COLUMNS, WARPS = 64, 64, 4
INFINITE = tl.constexpr(0x7F800000)
LARGEST = tl.constexpr(float.fromhex("0x1.fffffep127"))


@triton.jit
def _folded(
    x_ptr,
    fold_ptr,
    rows,
    columns,
    n_rows,
    n_columns,
    AXIS: tl.constexpr,
    HAS_FOLD: tl.constexpr,
):
    """A tile of x, float32 [rows, columns], times a factor for each index along AXIS.

    x_ptr: the bits of BF16 [n_rows, n_columns], int16.
    fold_ptr: float32 factors, [n_columns] for AXIS 1 and [n_rows] for AXIS 0; read if HAS_FOLD.
        They are 1 / gamma of the other operand's rows (docs/numerics.md, The three GEMMs).
    rows, columns: int32, the indices of the tile's rows and columns.
    """
    there = (rows < n_rows)[:, None] & (columns < n_columns)[None, :]
    at = rows[:, None].to(tl.int64) * n_columns + columns[None, :]
    bits = tl.load(x_ptr + at, mask=there, other=0).to(tl.int32)  # of BF16
    v = (bits << 16).to(tl.float32, bitcast=True)
    if HAS_FOLD:
        if AXIS == 1:
            v *= tl.load(fold_ptr + columns, mask=columns < n_columns, other=0)[None, :]
        else:
            v *= tl.load(fold_ptr + rows, mask=rows < n_rows, other=0)[:, None]
    return v


@kernel(fp_fusion=True)
def largest_kernel(
    x_ptr,
    fold_ptr,
    largest_ptr,
    n_rows,
    n_columns,
    AXIS: tl.constexpr,
    PER_ROW: tl.constexpr,
    HAS_FOLD: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """Finds the bits of the largest magnitude of x times `fold`, of each line or of the whole
    matrix.

    A line is a row of the operand: the elements of x along AXIS.

    x_ptr, fold_ptr: see `_folded`.
    largest_ptr: int32, 0 at the launch; [lines] if PER_ROW, else [1]. The bits of NaN are larger
        than those of Inf.
    """
    rows = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    columns = tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    v = _folded(x_ptr, fold_ptr, rows, columns, n_rows, n_columns, AXIS, HAS_FOLD)
    largest = tl.max(v.to(tl.int32, bitcast=True) & 0x7FFFFFFF, AXIS)
    if PER_ROW:
        lines = rows if AXIS == 1 else columns
        tl.atomic_max(largest_ptr + lines, largest, mask=lines < (n_rows if AXIS else n_columns))
    else:
        tl.atomic_max(largest_ptr, tl.max(largest, 0))


@triton.jit
def _gamma(largest, LIMIT: tl.constexpr):
    """(factor, finite) of lines: float32 that scales a line, and whether the line is finite.

    largest: int32, the bits of the largest magnitudes of lines. LIMIT: the element format's largest
        number. The factor is that of `scaling.gamma`.
    """
    amax = largest.to(tl.float32, bitcast=True)
    ratio = tl.div_rn(tl.full(amax.shape, LIMIT, tl.float32), amax)
    ratio = tl.minimum(ratio, LARGEST)
    return tl.where(largest == 0, 1.0, ratio), largest < INFINITE


@triton.jit
def fp8_code(v, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """FP8 codes without signs, int32, of |v| rounded to nearest even.

    v: float32. Magnitudes must be in the format's range, since nothing is saturated.
    MANTISSA, BIAS: mantissa bits and exponent bias of the format.
    """
    magnitude = tl.abs(v)
    CUT: tl.constexpr = 23 - MANTISSA
    normal = nearest_even(magnitude.to(tl.int32, bitcast=True), CUT)
    normal -= (127 - BIAS) << MANTISSA
    # All subnormal numbers have steps of one size. Adding a number whose last place has this size
    # rounds to them.
    anchor = 2.0 ** (24 - BIAS - MANTISSA)
    steps = (magnitude + anchor).to(tl.int32, bitcast=True) & ((2 << MANTISSA) - 1)
    return tl.where(magnitude < 2.0 ** (1 - BIAS), steps, normal)


# If the product with gamma were fused with the sum that rounds to a code, it would be rounded once
# instead of twice.
@kernel(fp_fusion=False)
def cast_kernel(
    x_ptr,
    fold_ptr,
    largest_ptr,
    codes_ptr,
    gamma_ptr,
    n_rows,
    n_columns,
    LIMIT: tl.constexpr,
    AXIS: tl.constexpr,
    PER_ROW: tl.constexpr,
    HAS_FOLD: tl.constexpr,
    E2M1: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """Quantizes x times `fold` to codes with AXIS last, and writes the scale gamma of each line.

    A line is a row of the operand: the elements of x along AXIS. If it holds an Inf or a NaN, its
    codes are 0 and its gamma is NaN.

    x_ptr, fold_ptr: see `_folded`.
    largest_ptr: int32, the bits of the largest magnitudes, [lines] if PER_ROW, else [1].
    codes_ptr: uint8 [lines, n], with n the length of AXIS; [lines, n / 2], two codes in a byte, if
        E2M1.
    gamma_ptr: float32, of largest_ptr's size.
    LIMIT, MANTISSA, BIAS: of the element format, its largest number, mantissa bits and exponent
        bias.
    """
    rows = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    columns = tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    v = _folded(x_ptr, fold_ptr, rows, columns, n_rows, n_columns, AXIS, HAS_FOLD)
    if AXIS == 0:
        v = tl.trans(v)
        lines, along, n_lines, n_along = columns, rows, n_columns, n_rows
    else:
        lines, along, n_lines, n_along = rows, columns, n_rows, n_columns
    at = lines if PER_ROW else lines * 0
    factor, finite = _gamma(tl.load(largest_ptr + at, mask=lines < n_lines, other=0), LIMIT)
    if tl.program_id(AXIS) == 0:
        first = (lines < n_lines) & (PER_ROW | (lines == 0))
        tl.store(gamma_ptr + at, tl.where(finite, factor, float("nan")), mask=first)
    negative = v.to(tl.int32, bitcast=True) < 0
    v *= factor[:, None]
    SIGN: tl.constexpr = 8 if E2M1 else 0x80
    code = nearest(tl.abs(v)) if E2M1 else fp8_code(v, MANTISSA, BIAS)
    code = tl.where(finite[:, None], code | tl.where(negative, SIGN, 0), 0)
    if E2M1:
        SHAPE: tl.constexpr = code.shape
        low, high = tl.split(tl.reshape(code, (SHAPE[0], SHAPE[1] // 2, 2)))
        code, n_along = pack(low, high), n_along // 2
        ALONG: tl.constexpr = (TILE_COLUMNS if AXIS else TILE_ROWS) // 2
        along = tl.program_id(AXIS) * ALONG + tl.arange(0, ALONG)
    there = (lines < n_lines)[:, None] & (along < n_along)[None, :]
    places = lines[:, None].to(tl.int64) * n_along + along[None, :]
    tl.store(codes_ptr + places, code.to(tl.uint8), mask=there)


def quantize(
    x: Tensor,
    quantizer: Quantizer,
    axis: int,
    fold: Tensor | None = None,
    widest: Tensor | None = None,
) -> QuantizedTensor:
    """Quantizes x along `axis` with a float32 scale for each row of the operand, or for all of it.

    x: BF16 [rows, columns].
    axis: the contracted axis, which is last in the result.
    fold: float32, one factor for each index along `axis`, which multiplies x first; None for none.
    widest: the maxima over the ranks that share a scale; see `quantize_matrix`. None takes those of
        x.
    """
    x = x.contiguous()
    rows, columns = x.shape
    lines, along = x.shape[1 - axis], x.shape[axis]
    codes = x.new_empty(
        lines, along // (2 if quantizer.element == "e2m1" else 1), dtype=torch.uint8
    )
    stored = x.new_empty(lines if quantizer.block[0] == 1 else 1, 1, dtype=torch.float32)
    if fold is not None:
        fold = fold.float().contiguous()
    find, cast = _launches(rows, columns, quantizer, axis, fold is not None)
    if widest is None:
        largest = torch.zeros_like(stored, dtype=torch.int32)
        find(x.device, x, fold, largest, rows, columns)
    else:
        largest = widest.float().contiguous().view(torch.int32)
    cast(x.device, x, fold, largest, codes, stored, rows, columns)
    return QuantizedTensor(codes, stored, None, quantizer, x.shape, axis)


@planned
def _launches(
    rows: int, columns: int, quantizer: Quantizer, axis: int, has_fold: bool
) -> tuple[Launch, Launch]:
    """The launch that finds the largest magnitudes, and the launch that quantizes."""
    element = quantizer.element
    mantissa, bias = EXPONENTS[element]
    grid = tiles(rows, TILE_ROWS), tiles(columns, TILE_COLUMNS)
    form = dict(AXIS=axis, PER_ROW=quantizer.block[0] == 1, HAS_FOLD=has_fold)
    form |= dict(TILE_ROWS=TILE_ROWS, TILE_COLUMNS=TILE_COLUMNS)
    kind = dict(LIMIT=element_max(element), E2M1=element == "e2m1", MANTISSA=mantissa, BIAS=bias)
    matrix, sizes = (torch.int16, torch.float32, torch.int32), (rows, columns)
    written = torch.uint8, torch.float32
    return (
        Launch(largest_kernel, grid, (*matrix, *sizes), form, num_warps=WARPS),
        Launch(cast_kernel, grid, (*matrix, *written, *sizes), form | kind, num_warps=WARPS),
    )


@kernel(fp_fusion=True)
def transpose_kernel(
    codes_ptr, out_ptr, n_rows, n_bytes, TILE_ROWS: tl.constexpr, TILE_BYTES: tl.constexpr
):
    """Transposes 4-bit codes: [n_rows, n_bytes] to [2 n_bytes, n_rows / 2], both two in a byte."""
    rows = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    at = tl.program_id(1) * TILE_BYTES + tl.arange(0, TILE_BYTES)
    there = (rows < n_rows)[:, None] & (at < n_bytes)[None, :]
    byte = tl.load(codes_ptr + rows[:, None].to(tl.int64) * n_bytes + at, mask=there, other=0)
    byte = byte.to(tl.int32)
    nibbles = tl.reshape(tl.join(byte & 15, byte >> 4), (TILE_ROWS, 2 * TILE_BYTES))
    low, high = tl.split(tl.reshape(tl.trans(nibbles), (2 * TILE_BYTES, TILE_ROWS // 2, 2)))
    lines = tl.program_id(1) * (2 * TILE_BYTES) + tl.arange(0, 2 * TILE_BYTES)
    to = tl.program_id(0) * (TILE_ROWS // 2) + tl.arange(0, TILE_ROWS // 2)
    there = (lines < 2 * n_bytes)[:, None] & (to < n_rows // 2)[None, :]
    places = lines[:, None].to(tl.int64) * (n_rows // 2) + to[None, :]
    tl.store(out_ptr + places, pack(low, high).to(tl.uint8), mask=there)


def transposed(x: QuantizedTensor) -> QuantizedTensor:
    """x with the other axis as its blocked axis, as `x.along` returns it: the codes are transposed.

    x: E2M1 codes [rows, K / 2] with one scale for the tensor; rows and K are even.
    """
    rows, half = x.codes.shape
    codes = x.codes.new_empty(2 * half, rows // 2)
    _transpose(rows, half)(codes.device, x.codes.contiguous(), codes, rows, half)
    return replace(x, codes=codes, axis=1 - x.axis)


@planned
def _transpose(rows: int, half: int) -> Launch:
    grid = tiles(rows, TILE_ROWS), tiles(half, TILE_COLUMNS)
    tile = dict(TILE_ROWS=TILE_ROWS, TILE_BYTES=TILE_COLUMNS)
    types = torch.uint8, torch.uint8, rows, half
    return Launch(transpose_kernel, grid, types, tile, num_warps=WARPS)
