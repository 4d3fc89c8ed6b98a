"""Loads a program's tile of a matrix, and applies a Hadamard transform, on tensor cores in BF16.

For kernels that quantize with block scales in E4M3 or UE5M3 (blocks.py), and for the inverse
(block_values.py). hadamard.py has the transform of the MXFP4 kernel, whose tiles are laid out
otherwise.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from megatron_fp4.kernels.encode import bf16_bits

# tl.dot takes no less than 16. The largest is the widest tile.
GROUPS = (16, 32, 64, 128)


class Transform(NamedTuple):
    """A Hadamard transform along the blocked axis.

    group: its size, one of GROUPS. signs: float32 [group], +1 or -1; None: no signs.
    """

    group: int
    signs: Tensor | None


class Turn(NamedTuple):
    """A transform as a constant of a kernel. GROUP: 0 is no transform. FACTOR: multiplies the
    product. SIGNED: whether there are signs."""

    GROUP: int = 0
    FACTOR: float = 1.0
    SIGNED: bool = False


NO_TURN = Turn()


def turn_of(transform: Transform | None) -> Turn:
    """The constant of a kernel that applies this transform."""
    if transform is None:
        return NO_TURN
    return Turn(transform.group, 1 / math.sqrt(transform.group), transform.signs is not None)


@triton.jit
def _matrix(signs_ptr, GROUP: tl.constexpr, SIGNED: tl.constexpr):
    """diag(signs) times the Hadamard matrix, with elements 1 and -1: float32 [GROUP, GROUP].

    signs_ptr: float32 [GROUP]. SIGNED: whether there are signs; else the Hadamard matrix alone.
    """
    HIGH: tl.constexpr = GROUP // 16
    low = _odd(tl.arange(0, 16)[None, :, None, None] & tl.arange(0, 16)[None, None, None, :])
    high = _odd(tl.arange(0, HIGH)[:, None, None, None] & tl.arange(0, HIGH)[None, None, :, None])
    bits = (high << 31) ^ ((low << 31) | 0x3F800000)
    if SIGNED:
        signs = tl.load(signs_ptr + tl.arange(0, GROUP)).to(tl.int32, bitcast=True)
        bits ^= tl.reshape(signs & -0x80000000, (HIGH, 16, 1, 1))
    return tl.reshape(bits.to(tl.float32, bitcast=True), (GROUP, GROUP))


@triton.jit
def _odd(n):
    """Whether integers in [0, 16) have an odd number of bits that are 1: 1 or 0."""
    return (0x6996 >> n) & 1


@triton.jit
def _product_of_float32(x, h):
    """x @ h in float32, for float32 x and BF16 h: the sum of the products of three parts of x, each
    exact in BF16. Tensor cores take float32 with fewer bits."""
    high = _eight_bits(x)
    rest = x - high
    middle = _eight_bits(rest)
    product = tl.dot((rest - middle).to(tl.bfloat16), h)
    product = tl.dot(middle.to(tl.bfloat16), h, product)
    return tl.dot(high.to(tl.bfloat16), h, product)


@triton.jit
def _eight_bits(x):
    """Float32 numbers cut to the bits that BF16 holds."""
    return (x.to(tl.int32, bitcast=True) & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def _transformed(
    v, signs_ptr, TURN: tl.constexpr, IN_BF16: tl.constexpr, INTERPRETED: tl.constexpr
):
    """Transforms a tile in groups along its rows: float32 [rows, columns], rounded to BF16.

    v: float32 [rows, columns]. IN_BF16: whether it holds BF16 values. signs_ptr: see `_matrix`.
    """
    GROUP: tl.constexpr = TURN.GROUP
    ROWS: tl.constexpr = v.numel // GROUP
    x, h = tl.reshape(v, (ROWS, GROUP)), _matrix(signs_ptr, GROUP, TURN.SIGNED)
    # A thread has columns 2 t + 8 j and 2 t + 8 j + 1 of a product, for one t below 4 and all j. In
    # this order of the columns they are 16 neighbours of a row, as in `_read`.
    if GROUP % 64 == 0:
        h = tl.permute(tl.reshape(h, (GROUP, GROUP // 64, 4, 8, 2)), (0, 1, 3, 2, 4))
        h = tl.reshape(h, (GROUP, GROUP))
    if INTERPRETED:  # it would multiply BF16 as integers
        product = tl.dot(x, h, input_precision="ieee")
    elif IN_BF16:
        product = tl.dot(x.to(tl.bfloat16), h.to(tl.bfloat16))
    else:
        product = _product_of_float32(x, h.to(tl.bfloat16))
    if GROUP % 64 == 0:
        product = tl.reshape(product, (ROWS, GROUP // 64, 8, 4, 2))
        product = tl.permute(product, (0, 1, 3, 2, 4))
    bits = bf16_bits(product * TURN.FACTOR) << 16
    return tl.reshape(bits.to(tl.float32, bitcast=True), (v.shape[0], v.shape[1]))


@triton.jit
def restored(v, signs_ptr, TURN: tl.constexpr, INTERPRETED: tl.constexpr):
    """The inverse of a transform in groups along the rows of a tile: float32 [rows, columns].

    v: float32 [rows, columns] of BF16 values. signs_ptr: float32 [group]; read if TURN.SIGNED.

    Where the elements of a group share a power of two as their scale, their sums are exact. A sum
    of zero is +0, and -0 after a sign of -1.
    """
    x = tl.reshape(v, (v.numel // TURN.GROUP, TURN.GROUP))
    h = _matrix(signs_ptr, TURN.GROUP, False)
    if INTERPRETED:  # it would multiply BF16 as integers
        product = tl.dot(x, h, input_precision="ieee")
    else:
        product = tl.dot(x.to(tl.bfloat16), h.to(tl.bfloat16))
    product *= TURN.FACTOR
    if TURN.SIGNED:
        product *= tl.load(signs_ptr + tl.arange(0, TURN.GROUP))[None, :]
    return tl.reshape(product, (v.shape[0], v.shape[1]))


@triton.jit
def _read(x_ptr, n_rows, n_columns, BELOW: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The tile of x that this program handles [ROWS, COLUMNS], as it is in memory; zeros outside.

    In a program of four warps a thread holds 16 neighbours, of a column if BELOW, else of a row, so
    that it finds the largest of a block of 16 alone. With eight warps and BELOW two threads share a
    block. The hints to the compiler spread the threads over the other axes; see `source.loaded`.
    """
    if BELOW:
        rows = 16 * tl.arange(0, ROWS // 16)[:, None, None] + tl.arange(0, 16)[None, :, None]
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, None, :]
        columns = tl.multiple_of(columns, [1, 1, 2])  # a thread loads two of them at once
    else:
        rows = tl.arange(0, ROWS)[:, None, None, None]
        columns = 16 * tl.arange(0, COLUMNS // 16)[None, :, None, None]
        columns += 8 * tl.arange(0, 2)[None, None, :, None] + tl.arange(0, 8)[None, None, None, :]
        columns += tl.program_id(1) * COLUMNS
    rows += tl.program_id(0) * ROWS
    places = x_ptr + rows.to(tl.int64) * n_columns + columns
    places = tl.max_contiguous(places, [2, 1, 4] if BELOW else [2, 4, 1, 8])
    v = tl.load(places, mask=(rows < n_rows) & (columns < n_columns), other=0)
    return tl.reshape(v, (ROWS, COLUMNS))


@triton.jit
def loaded(
    x_ptr,
    signs_ptr,
    n_rows,
    n_columns,
    AXIS: tl.constexpr,
    TOGETHER: tl.constexpr,
    TURN: tl.constexpr,
    INTERPRETED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Reads the tile of x that this program handles, and transforms it if TURN has a group.

    Returns float32, transposed if AXIS is 0, so that AXIS is the last axis. It is 0 outside of x.

    x_ptr: the bits of BF16 [n_rows, n_columns], int16; before a transform also float32.
    signs_ptr: float32 [group], the signs of a transform along AXIS; read if TURN.SIGNED.
    TOGETHER: the most elements along AXIS that are reduced together, to a scale or a gain. ROWS,
        COLUMNS: of the tile, with whole groups.
    """
    IN_BF16: tl.constexpr = x_ptr.dtype.element_ty == tl.int16
    # More than 16 elements would lie in several warps. Triton 3.6 reduces them wrongly in some of
    # these layouts; see testing/kernels/reductions.py.
    BELOW: tl.constexpr = AXIS == 0 and TURN.GROUP == 0 and TOGETHER == 16
    v = _read(x_ptr, n_rows, n_columns, BELOW, ROWS, COLUMNS)
    if IN_BF16:
        v = (v.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    v = tl.trans(v) if AXIS == 0 else v
    return _transformed(v, signs_ptr, TURN, IN_BF16, INTERPRETED) if TURN.GROUP else v
