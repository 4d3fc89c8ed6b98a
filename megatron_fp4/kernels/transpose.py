"""Transposes E2M1 codes that have one scale for the tensor, in Triton."""

from __future__ import annotations

from dataclasses import replace

import torch
import triton.language as tl
from torch import Tensor

from megatron_fp4.arithmetic.quantized_tensor import COUNTS, QuantizedTensor
from megatron_fp4.kernels.encode import pack
from megatron_fp4.kernels.launch import Launch, kept, kernel, planned, tiles
from megatron_fp4.kernels.row_operands import CARRIERS, form_of
from megatron_fp4.kernels.rows import carrier_bytes
from megatron_fp4.operands import Made

TILE, WARPS = 64, 4  # rows and bytes of a tile


@kernel(fp_fusion=True)
def transpose_kernel(
    codes_ptr,
    out_ptr,
    carriers_ptr,
    n_rows,
    n_bytes,
    CARRIER: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_BYTES: tl.constexpr,
):
    """Transposes 4-bit codes: [n_rows, n_bytes] to [2 n_bytes, n_rows / 2], both two in a byte.

    carriers_ptr: uint8 [2 n_bytes, n_rows], the same codes as FP8 elements with CARRIER mantissa
        bits; not written if CARRIER is 0.
    """
    rows = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    at = tl.program_id(1) * TILE_BYTES + tl.arange(0, TILE_BYTES)
    there = (rows < n_rows)[:, None] & (at < n_bytes)[None, :]
    byte = tl.load(codes_ptr + rows[:, None].to(tl.int64) * n_bytes + at, mask=there, other=0)
    byte = byte.to(tl.int32)
    nibbles = tl.reshape(tl.join(byte & 15, byte >> 4), (TILE_ROWS, 2 * TILE_BYTES))
    turned = tl.trans(nibbles)
    lines = tl.program_id(1) * (2 * TILE_BYTES) + tl.arange(0, 2 * TILE_BYTES)
    exists, starts = (lines < 2 * n_bytes)[:, None], lines[:, None].to(tl.int64)
    if CARRIER > 0:
        places = carriers_ptr + starts * n_rows + rows[None, :]
        elements = carrier_bytes(turned, CARRIER).to(tl.uint8)
        tl.store(places, elements, mask=exists & (rows < n_rows)[None, :])
    low, high = tl.split(tl.reshape(turned, (2 * TILE_BYTES, TILE_ROWS // 2, 2)))
    to = tl.program_id(0) * (TILE_ROWS // 2) + tl.arange(0, TILE_ROWS // 2)
    there = exists & (to < n_rows // 2)[None, :]
    places = out_ptr + starts * (n_rows // 2) + to[None, :]
    tl.store(places, pack(low, high).to(tl.uint8), mask=there)


def transposed(x: QuantizedTensor, carrier: torch.dtype | None = None) -> Made:
    """x with the other axis as its blocked axis, as `x.along` returns it: the codes are transposed.

    x: E2M1 codes [rows, K / 2] with a scale of 1 for the tensor; rows and K are even.
    carrier: the FP8 dtype of the carriers that are written beside them, or None.
    """
    rows, half = x.codes.shape
    codes = x.codes.new_empty(2 * half, rows // 2)
    elements = None if carrier is None else codes.new_empty(2 * half, rows, dtype=carrier)
    launch = _launch(rows, half, carrier)
    launch(codes.device, x.codes.contiguous(), codes, elements, rows, half)
    counts = kept(_counts_of_1, (2 * half,), codes)
    made = replace(x, codes=codes, axis=1 - x.axis, counts=counts)
    return Made(made, None, None if elements is None else form_of(made, elements))


def _counts_of_1(rows: int, *, device: torch.device) -> Tensor:
    """`QuantizedTensor.counts` of a matrix of so many rows with the scale 1."""
    counts = torch.zeros(COUNTS + rows, dtype=torch.int32, device=device)
    counts[COUNTS:].view(torch.float32).fill_(1.0)
    return counts


@planned
def _launch(rows: int, half: int, carrier: torch.dtype | None) -> Launch:
    grid = tiles(rows, TILE), tiles(half, TILE)
    form = dict(CARRIER=0 if carrier is None else CARRIERS[carrier])
    form |= dict(TILE_ROWS=TILE, TILE_BYTES=TILE)
    types = torch.uint8, torch.uint8, torch.uint8, rows, half
    return Launch(transpose_kernel, grid, types, form, num_warps=WARPS)
