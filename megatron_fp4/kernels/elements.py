"""Converts E2M1 codes without block scales to E4M3, for operands with scales of whole rows."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from megatron_fp4.kernels.fp8 import looked_up
from megatron_fp4.kernels.launch import INTERPRETED, Launch, kernel, planned, tiles


@kernel(fp_fusion=True)
def elements_kernel(codes_ptr, out_ptr, n, INTERPRETED: tl.constexpr, TILE: tl.constexpr):
    """Converts n words of eight codes to 2 n words of four E4M3 elements, without scales."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    words = tl.load(codes_ptr + at, mask=at < n, other=0)
    low, high = tl.full((TILE,), 0x3C383000, tl.int32), tl.full((TILE,), 0x4C484440, tl.int32)
    first, second = looked_up(words, low, high, INTERPRETED)
    pairs = tl.program_id(0).to(tl.int64) * (2 * TILE) + tl.arange(0, 2 * TILE)
    out = tl.reshape(tl.join(first, second), (2 * TILE,))
    tl.store(out_ptr + pairs, out, mask=pairs < 2 * n)


def elements(codes: Tensor) -> Tensor:
    """E4M3 elements [rows, K] of E2M1 codes [rows, K / 2], without scales. K is a multiple of 8."""
    rows, half = codes.shape
    out = codes.new_empty(rows, 2 * half)
    words = codes.numel() // 4
    _elements(words)(codes.device, codes, out, words)
    return out.view(torch.float8_e4m3fn)


@planned
def _elements(words: int) -> Launch:
    constants = dict(INTERPRETED=INTERPRETED, TILE=1024)
    types = torch.int32, torch.int32, words
    return Launch(elements_kernel, (tiles(words, 1024),), types, constants)
