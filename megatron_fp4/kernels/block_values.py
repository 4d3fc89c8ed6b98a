"""Decodes E2M1 codes with block scales in E8M0, E4M3 or UE5M3, in Triton: to BF16, or to float32
after the inverse of a Hadamard transform.

A product in BF16 reads the former, and quantizers of the backward pass read the latter. PyTorch
would look up each code and each scale in a table, and take several passes over the matrix.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_fp4.arithmetic.formats import wide
from megatron_fp4.arithmetic.quantized_tensor import QuantizedTensor
from megatron_fp4.arithmetic.quantizer import Quantizer
from megatron_fp4.kernels.blocks import RULES, scale_format
from megatron_fp4.kernels.decode import bf16_of
from megatron_fp4.kernels.float_blocks import e8m0_scale
from megatron_fp4.kernels.float_scales import E8M0_BIAS, scale_of, spread
from megatron_fp4.kernels.launch import INTERPRETED, Launch, kernel, planned, tiles
from megatron_fp4.kernels.tile_hadamard import GROUPS, Transform, Turn, restored, turn_of
from megatron_fp4.operands import Decoded

TILE, WARPS = 64, 4  # rows and bytes of a tile


def decodes(quantizer: Quantizer) -> bool:
    """Whether `values` decodes the codes of a quantizer."""
    across, along = quantizer.block
    if quantizer.element != "e2m1" or quantizer.scale not in RULES:
        return False
    return 2 <= along <= 2 * TILE and 2 * TILE % along == 0 and TILE % across == 0


def restores(quantizer: Quantizer, group: int) -> bool:
    """Whether `inverse` restores the matrix of a quantizer's codes, transformed in such groups.

    Outer scales multiply float32 numbers before the transform, which tensor cores do not take.
    """
    return group in GROUPS and decodes(quantizer) and not quantizer.scales_product


@triton.jit
def _tile(n_rows, n_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A program's tile of a contiguous matrix [n_rows, n_columns].

    Returns (the offsets of its elements, int64 [ROWS, COLUMNS]; whether each is in the matrix).
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    return rows.to(tl.int64) * n_columns + columns, (rows < n_rows) & (columns < n_columns)


@triton.jit
def _read(
    codes_ptr,
    scales_ptr,
    n_rows,
    n_bytes,
    ACROSS: tl.constexpr,
    ALONG: tl.constexpr,
    BIAS: tl.constexpr,
    NAN: tl.constexpr,
    ROWS: tl.constexpr,
    BYTES: tl.constexpr,
):
    """Reads a program's tile of 4-bit codes, and multiplies them by the scales of their blocks.

    Returns (low, high): float32 [ROWS, BYTES], the values of the low and of the high nibbles. They
    are exact. For the arguments see `decode_kernel`.
    """
    places, there = _tile(n_rows, n_bytes, ROWS, BYTES)
    byte = tl.load(codes_ptr + places, mask=there, other=0).to(tl.int32)
    lines = tl.program_id(0) * (ROWS // ACROSS) + tl.arange(0, ROWS // ACROSS)[:, None]
    blocks = tl.program_id(1) * (2 * BYTES // ALONG) + tl.arange(0, 2 * BYTES // ALONG)[None, :]
    n_blocks = 2 * n_bytes // ALONG
    exists = (lines < n_rows // ACROSS) & (blocks < n_blocks)
    code = tl.load(scales_ptr + lines.to(tl.int64) * n_blocks + blocks, mask=exists, other=0)
    scale = spread(_scale(code.to(tl.int32), BIAS, NAN), ACROSS, ALONG // 2)
    low = (bf16_of(byte) << 16).to(tl.float32, bitcast=True) * scale
    high = (bf16_of(byte >> 4) << 16).to(tl.float32, bitcast=True) * scale
    return low, high


@triton.jit
def _scale(code, BIAS: tl.constexpr, NAN: tl.constexpr):
    """The float32 value of each code of a block scale, in E8M0, E4M3 or UE5M3."""
    if BIAS == E8M0_BIAS:
        return e8m0_scale(code)
    return tl.where(code == NAN, float("nan"), scale_of(code, BIAS))


@kernel(fp_fusion=True)
def decode_kernel(
    codes_ptr,
    scales_ptr,
    values_ptr,
    n_rows,
    n_bytes,
    ACROSS: tl.constexpr,
    ALONG: tl.constexpr,
    BIAS: tl.constexpr,
    NAN: tl.constexpr,
    ROWS: tl.constexpr,
    BYTES: tl.constexpr,
):
    """Multiplies 4-bit codes [n_rows, n_bytes], two in a byte, by the scales of their blocks.

    scales_ptr: uint8 [n_rows / ACROSS, 2 n_bytes / ALONG]. ACROSS, ALONG: the size of a block.
    values_ptr: int32 [n_rows, n_bytes], words of two BF16 values. The products are exact.
    BIAS, NAN: of the scale format, its exponent bias and its byte of NaN.
    """
    low, high = _read(codes_ptr, scales_ptr, n_rows, n_bytes, ACROSS, ALONG, BIAS, NAN, ROWS, BYTES)
    low, high = low.to(tl.int32, bitcast=True), high.to(tl.int32, bitcast=True)
    places, there = _tile(n_rows, n_bytes, ROWS, BYTES)
    tl.store(values_ptr + places, ((low >> 16) & 0xFFFF) | (high & -0x10000), mask=there)


@kernel(fp_fusion=True)
def restore_kernel(
    codes_ptr,
    scales_ptr,
    signs_ptr,
    values_ptr,
    n_rows,
    n_bytes,
    ACROSS: tl.constexpr,
    ALONG: tl.constexpr,
    BIAS: tl.constexpr,
    NAN: tl.constexpr,
    TURN: tl.constexpr,
    INTERPRETED: tl.constexpr,
    ROWS: tl.constexpr,
    BYTES: tl.constexpr,
):
    """Decodes as `decode_kernel` does, and applies the inverse of a Hadamard transform.

    signs_ptr: float32 [group], the signs of the transform; read if TURN.SIGNED. TURN: a `Turn`,
        whose groups lie along the rows.
    values_ptr: float32 [n_rows, 2 n_bytes].
    """
    low, high = _read(codes_ptr, scales_ptr, n_rows, n_bytes, ACROSS, ALONG, BIAS, NAN, ROWS, BYTES)
    found = restored(
        tl.reshape(tl.join(low, high), (ROWS, 2 * BYTES)), signs_ptr, TURN, INTERPRETED
    )
    places, there = _tile(n_rows, 2 * n_bytes, ROWS, 2 * BYTES)
    tl.store(values_ptr + places, found, mask=there)


def values(x: QuantizedTensor) -> Tensor:
    """The elements of x times the scales of their blocks, BF16 [rows, K] with the blocked axis
    last. They are exact.

    x: with a quantizer that `decodes`.
    """
    codes = x.codes.view(-1, x.codes.shape[-1]).contiguous()
    rows, half = codes.shape
    made = codes.new_empty(rows, 2 * half, dtype=torch.bfloat16)
    _launch(rows, half, x.quantizer)(codes.device, codes, x.scales.contiguous(), made, rows, half)
    return made


def decoded(x: QuantizedTensor) -> Decoded:
    """What `QuantizedTensor.with_row_factors` returns in BF16. x: as of `values`."""
    outer = x.tensor_scale
    return Decoded(values(x), None if outer is None else outer.view(-1, 1).float())


def dequantized(x: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """What `QuantizedTensor.dequantize` returns. x: a matrix, else as of `values`."""
    exact, factors, _ = decoded(x)
    if factors is not None:
        exact = exact.to(wide(dtype)) * factors
    return (exact if x.axis == 1 else exact.t()).to(dtype)


def inverse(x: QuantizedTensor, transform: Transform) -> Tensor:
    """Decodes a quantized matrix, and undoes the Hadamard transform that it had before.

    x: [rows, K] with the blocked axis last; `restores` is true for its quantizer. transform: the
        one that was applied along that axis before x was quantized. Its group divides K.
    Returns float32 [rows, K].
    """
    codes = x.codes.contiguous()
    rows, half = codes.shape
    made = codes.new_empty(rows, 2 * half, dtype=torch.float32)
    launch = _restore_launch(rows, half, x.quantizer, turn_of(transform))
    launch(codes.device, codes, x.scales.contiguous(), transform.signs, made, rows, half)
    return made


def _constants(quantizer: Quantizer) -> dict[str, Any]:
    """The constants that `decode_kernel` and `restore_kernel` share."""
    bias, _, nan = scale_format(quantizer)
    across, along = quantizer.block
    return dict(ACROSS=across, ALONG=along, BIAS=bias, NAN=nan, ROWS=TILE, BYTES=TILE)


@planned
def _launch(rows: int, half: int, quantizer: Quantizer) -> Launch:
    types = torch.uint8, torch.uint8, torch.int32, rows, half
    grid = tiles(rows, TILE), tiles(half, TILE)
    return Launch(decode_kernel, grid, types, _constants(quantizer), num_warps=WARPS)


@planned
def _restore_launch(rows: int, half: int, quantizer: Quantizer, turn: Turn) -> Launch:
    types = torch.uint8, torch.uint8, torch.float32, torch.float32, rows, half
    grid = tiles(rows, TILE), tiles(half, TILE)
    constants = _constants(quantizer) | dict(TURN=turn, INTERPRETED=INTERPRETED)
    return Launch(restore_kernel, grid, types, constants, num_warps=2 * WARPS)
