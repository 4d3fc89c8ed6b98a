"""Decodes E2M1 codes with block scales in E4M3 or UE5M3 to BF16, in Triton.

A product in BF16 reads such operands. PyTorch would look up each code and each scale in a table,
and take several passes over the matrix.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from megatron_fp4.arithmetic.formats import SCALE_FLOATS, wide
from megatron_fp4.arithmetic.quantizer import QuantizedTensor, Quantizer
from megatron_fp4.kernels.blocks import MANTISSA
from megatron_fp4.kernels.decode import bf16_of
from megatron_fp4.kernels.float_scales import scale_of, spread
from megatron_fp4.kernels.launch import Launch, kernel, planned, tiles
from megatron_fp4.operands import Decoded

TILE, WARPS = 64, 4  # rows and bytes of a tile


def decodes(quantizer: Quantizer) -> bool:
    """Whether `values` decodes the codes of a quantizer."""
    across, along = quantizer.block
    if quantizer.element != "e2m1" or quantizer.scale not in SCALE_FLOATS:
        return False
    return 2 <= along <= 2 * TILE and 2 * TILE % along == 0 and TILE % across == 0


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
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    at = tl.program_id(1) * BYTES + tl.arange(0, BYTES)[None, :]
    there = (rows < n_rows) & (at < n_bytes)
    places = rows.to(tl.int64) * n_bytes + at
    byte = tl.load(codes_ptr + places, mask=there, other=0).to(tl.int32)
    lines = tl.program_id(0) * (ROWS // ACROSS) + tl.arange(0, ROWS // ACROSS)[:, None]
    blocks = tl.program_id(1) * (2 * BYTES // ALONG) + tl.arange(0, 2 * BYTES // ALONG)[None, :]
    n_blocks = 2 * n_bytes // ALONG
    exists = (lines < n_rows // ACROSS) & (blocks < n_blocks)
    code = tl.load(scales_ptr + lines.to(tl.int64) * n_blocks + blocks, mask=exists, other=0)
    code = code.to(tl.int32)
    scale = tl.where(code == NAN, float("nan"), scale_of(code, BIAS))
    scale = spread(scale, ACROSS, ALONG // 2)
    low = ((bf16_of(byte) << 16).to(tl.float32, bitcast=True) * scale).to(tl.int32, bitcast=True)
    high = (bf16_of(byte >> 4) << 16).to(tl.float32, bitcast=True) * scale
    high = high.to(tl.int32, bitcast=True)
    tl.store(values_ptr + places, ((low >> 16) & 0xFFFF) | (high & -0x10000), mask=there)


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


@planned
def _launch(rows: int, half: int, quantizer: Quantizer) -> Launch:
    scale, (across, along) = SCALE_FLOATS[quantizer.scale], quantizer.block
    assert scale.mantissa_bits == MANTISSA
    constants = dict(ACROSS=across, ALONG=along, BIAS=scale.bias, NAN=scale.nan)
    constants |= dict(ROWS=TILE, BYTES=TILE)
    types = torch.uint8, torch.uint8, torch.int32, rows, half
    grid = tiles(rows, TILE), tiles(half, TILE)
    return Launch(decode_kernel, grid, types, constants, num_warps=WARPS)
