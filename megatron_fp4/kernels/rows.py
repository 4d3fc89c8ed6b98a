"""Quantization to FP8 or E2M1 with a float32 scale for each row of an operand, or for all of it.

row_operands.py launches these Triton kernels. docs/numerics.md, Float32, defines the scales.

An operand whose rows are rows of the matrix is made in one read of it, by programs that hold a
whole row. All others take two kernels, which read the matrix once each, for one operand or for
both: one finds the largest magnitudes, and one scales, rounds and, if the rows of the operand are
columns of the matrix, transposes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from megatron_fp4.arithmetic.quantized_tensor import COUNTS
from megatron_fp4.kernels.encode import nearest, nearest_even, pack
from megatron_fp4.kernels.launch import kernel

INFINITE = tl.constexpr(0x7F800000)
LARGEST = tl.constexpr(float.fromhex("0x1.fffffep127"))
_COUNTS = tl.constexpr(COUNTS)


class Out(NamedTuple):
    """The memory of one operand. A line is a row of the operand: the elements of the matrix along
    the contracted axis.

    fold: float32, a factor for each index along that axis, read if FORM.HAS_FOLD: 1 / gamma of the
        other operand's rows (docs/numerics.md, The three GEMMs).
    largest: int32, the bits of the largest magnitudes: [lines] if FORM.PER_ROW, else [1].
    codes: uint8 [lines, n], with n the length of that axis; [lines, n / 2], two codes in a byte, in
        E2M1.
    carriers: uint8 [lines, n], E2M1 codes as FP8 elements; written if FORM.CARRIER.
    gamma: float32, as `largest`. counts: int32 [4 + lines], see `QuantizedTensor.counts`.
    """

    fold: Any
    largest: Any
    codes: Any
    carriers: Any
    gamma: Any
    counts: Any


class RowForm(NamedTuple):
    """How an operand is made. AXIS: the contracted axis. CARRIER: the mantissa bits of its
    carriers, 0 if it has none. For the others see `Out`."""

    AXIS: int
    PER_ROW: bool
    HAS_FOLD: bool
    CARRIER: int


class Element(NamedTuple):
    """The element format: its largest number, whether it is E2M1, mantissa bits, exponent bias."""

    LIMIT: float
    E2M1: bool
    MANTISSA: int
    BIAS: int


@triton.jit
def _loaded(x_ptr, rows, columns, n_rows, n_columns):
    """A tile of x, float32 [rows, columns]; 0 beyond the matrix.

    x_ptr: the bits of BF16 [n_rows, n_columns], int16.
    rows, columns: int32, the indices of the tile's rows and columns.
    """
    there = (rows < n_rows)[:, None] & (columns < n_columns)[None, :]
    at = rows[:, None].to(tl.int64) * n_columns + columns[None, :]
    bits = tl.load(x_ptr + at, mask=there, other=0).to(tl.int32)  # of BF16
    return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def _folded(
    v, fold_ptr, rows, columns, n_rows, n_columns, AXIS: tl.constexpr, HAS_FOLD: tl.constexpr
):
    """A tile [rows, columns] times `Out.fold`, a factor for each index along AXIS."""
    if HAS_FOLD:
        if AXIS == 1:
            v *= tl.load(fold_ptr + columns, mask=columns < n_columns, other=0)[None, :]
        else:
            v *= tl.load(fold_ptr + rows, mask=rows < n_rows, other=0)[:, None]
    return v


@triton.jit
def _magnitudes(v):
    """The bits of |v|, int32. Those of NaN become those of Inf, which a collective preserves."""
    return tl.minimum(v.to(tl.int32, bitcast=True) & 0x7FFFFFFF, INFINITE)


@triton.jit
def _find(v, out, rows, columns, n_rows, n_columns, FORM: tl.constexpr):
    """Raises `Out.largest` to the largest magnitudes of a tile v [rows, columns]."""
    AXIS: tl.constexpr = FORM.AXIS
    v = _folded(v, out.fold, rows, columns, n_rows, n_columns, AXIS, FORM.HAS_FOLD)
    largest = tl.max(_magnitudes(v), AXIS)
    if FORM.PER_ROW:
        lines = rows if AXIS == 1 else columns
        tl.atomic_max(out.largest + lines, largest, mask=lines < (n_rows if AXIS else n_columns))
    else:
        tl.atomic_max(out.largest, tl.max(largest, 0))


@kernel(fp_fusion=True)
def largest_kernel(
    x_ptr,
    a,
    b,
    n_rows,
    n_columns,
    A: tl.constexpr,
    B: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """Finds the bits of the largest magnitudes of one operand, or of both operands of a matrix.

    x_ptr: see `_loaded`. a, b: an Out each, whose `largest` is 0 at the launch. A, B: their
    RowForm; B is None if there is one operand.
    """
    rows = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    columns = tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    v = _loaded(x_ptr, rows, columns, n_rows, n_columns)
    _find(v, a, rows, columns, n_rows, n_columns, A)
    if B is not None:
        _find(v, b, rows, columns, n_rows, n_columns, B)


@triton.jit
def _gamma(largest, LIMIT: tl.constexpr):
    """(factor, finite) of lines: float32 that scales a line, and whether the line is finite.

    largest: int32, the bits of the largest magnitudes of lines. LIMIT: the element format's largest
        number. The factor is that of `scaling.gamma`.
    """
    magnitude = largest.to(tl.float32, bitcast=True)
    ratio = tl.div_rn(tl.full(magnitude.shape, LIMIT, tl.float32), magnitude)
    ratio = tl.minimum(ratio, LARGEST)
    return tl.where(largest == 0, 1.0, ratio), largest < INFINITE


@triton.jit
def _store_scales(out, lines, factor, finite, there, PER_ROW: tl.constexpr):
    """Stores gamma and its reciprocal, and counts the scales that are NaN.

    The reciprocal is stored for each line. gamma is stored, and NaN counted, for each line if each
    has its own scale (PER_ROW), else once for the tensor.

    factor, finite: from `_gamma`. there: whether the line exists.
    """
    factor = tl.where(finite, factor, float("nan"))
    has_own = there & (PER_ROW | (lines == 0))
    tl.store(out.gamma + lines, factor, mask=has_own)
    reciprocals = (out.counts + _COUNTS).to(tl.pointer_type(tl.float32), bitcast=True)
    tl.store(reciprocals + lines, tl.div_rn(tl.full(factor.shape, 1.0, tl.float32), factor), there)
    nans = tl.sum((has_own & (finite == 0)).to(tl.int32), 0)
    tl.atomic_add(out.counts + 1, nans, mask=nans > 0)  # it is rarely above 0


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


@triton.jit
def carrier_bytes(code, MANTISSA: tl.constexpr):
    """The FP8 bytes, as int32, of E2M1 codes. MANTISSA: 3 for E4M3, 2 for E5M2."""
    HALF: tl.constexpr = 0x30 if MANTISSA == 3 else 0x38  # the byte of 1/2
    magnitude = code & 7
    # From 1/2 on E2M1 and FP8 have the same exponents, but for their bias; 1/2 is subnormal.
    byte = tl.where(magnitude < 2, magnitude * HALF, (magnitude << (MANTISSA - 1)) + HALF)
    return byte | ((code & 8) << 4)


@triton.jit
def _codes(v, factor, finite, ELEMENT: tl.constexpr):
    """Codes with signs, int32 [lines, n], of v [lines, n] times `factor`; 0 where not finite."""
    SIGN: tl.constexpr = 8 if ELEMENT.E2M1 else 0x80
    negative = v.to(tl.int32, bitcast=True) < 0
    v *= factor[:, None]
    code = nearest(tl.abs(v)) if ELEMENT.E2M1 else fp8_code(v, ELEMENT.MANTISSA, ELEMENT.BIAS)
    return tl.where(finite[:, None], code | tl.where(negative, SIGN, 0), 0)


@triton.jit
def _store_codes(code, out, lines, first, n_lines, n, FORM: tl.constexpr, ELEMENT: tl.constexpr):
    """Stores codes [lines, places from `first` on], and their carriers."""
    SHAPE: tl.constexpr = code.shape
    at_lines, exists = lines[:, None].to(tl.int64), (lines < n_lines)[:, None]
    at = first + tl.arange(0, SHAPE[1])
    if FORM.CARRIER > 0:
        there = exists & (at < n)[None, :]
        places = out.carriers + at_lines * n + at[None, :]
        tl.store(places, carrier_bytes(code, FORM.CARRIER).to(tl.uint8), mask=there)
    if ELEMENT.E2M1:
        low, high = tl.split(tl.reshape(code, (SHAPE[0], SHAPE[1] // 2, 2)))
        code, n, at = pack(low, high), n // 2, first // 2 + tl.arange(0, SHAPE[1] // 2)
    there = exists & (at < n)[None, :]
    tl.store(out.codes + at_lines * n + at[None, :], code.to(tl.uint8), mask=there)


@triton.jit
def _cast(v, out, rows, columns, n_rows, n_columns, FORM: tl.constexpr, ELEMENT: tl.constexpr):
    """Writes what an operand has of a tile v [rows, columns]: codes, carriers, scales."""
    AXIS: tl.constexpr = FORM.AXIS
    v = _folded(v, out.fold, rows, columns, n_rows, n_columns, AXIS, FORM.HAS_FOLD)
    SHAPE: tl.constexpr = v.shape
    if AXIS == 0:
        v = tl.trans(v)
        lines, n_lines, n = columns, n_columns, n_rows
    else:
        lines, n_lines, n = rows, n_rows, n_columns
    at = lines if FORM.PER_ROW else lines * 0
    largest = tl.load(out.largest + at, mask=lines < n_lines, other=0)
    factor, finite = _gamma(largest, ELEMENT.LIMIT)
    if tl.program_id(AXIS) == 0:
        _store_scales(out, lines, factor, finite, lines < n_lines, FORM.PER_ROW)
    code = _codes(v, factor, finite, ELEMENT)
    first = tl.program_id(AXIS) * SHAPE[AXIS]
    _store_codes(code, out, lines, first, n_lines, n, FORM, ELEMENT)


# If the product with gamma were fused with the sum that rounds to a code, it would be rounded once
# instead of twice.
@kernel(fp_fusion=False)
def cast_kernel(
    x_ptr,
    a,
    b,
    n_rows,
    n_columns,
    A: tl.constexpr,
    B: tl.constexpr,
    ELEMENT: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """Quantizes x times `fold` to codes, for one operand, or for both operands of a matrix.

    A line that holds an Inf or a NaN has codes 0, and gamma is NaN.

    x_ptr: see `_loaded`. a, b: an Out each, with the `largest` magnitudes. A, B: their RowForm; B
    is None if there is one operand. ELEMENT: an Element.
    """
    rows = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    columns = tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    v = _loaded(x_ptr, rows, columns, n_rows, n_columns)
    _cast(v, a, rows, columns, n_rows, n_columns, A, ELEMENT)
    if B is not None:
        _cast(v, b, rows, columns, n_rows, n_columns, B, ELEMENT)


@kernel(fp_fusion=False)  # as in `cast_kernel`
def row_kernel(
    x_ptr,
    out,
    n_rows,
    n_columns,
    FORM: tl.constexpr,
    ELEMENT: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """As `cast_kernel`, for an operand whose lines are rows of x; finds the largest magnitudes too.

    Each program makes one row. COLUMNS: n_columns, rounded up to a power of two.
    """
    rows = tl.program_id(0) + tl.arange(0, 1)
    columns = tl.arange(0, COLUMNS)
    v = _loaded(x_ptr, rows, columns, n_rows, n_columns)
    v = _folded(v, out.fold, rows, columns, n_rows, n_columns, 1, FORM.HAS_FOLD)
    factor, finite = _gamma(tl.max(_magnitudes(v), 1), ELEMENT.LIMIT)
    _store_scales(out, rows, factor, finite, rows < n_rows, True)
    code = _codes(v, factor, finite, ELEMENT)
    _store_codes(code, out, rows, 0, n_rows, n_columns, FORM, ELEMENT)
