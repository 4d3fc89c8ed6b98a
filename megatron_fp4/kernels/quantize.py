"""Launches the quantize kernels: matrices in, QuantizedTensors out, for one direction or both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from megatron_fp4.kernels.mxfp4 import BLOCK, quantize_kernel
from megatron_fp4.philox import GROUP, Key, Noise
from megatron_fp4.quantizer import QuantizedTensor, Quantizer

HADAMARD_GROUPS = (32, 64, 128)  # those that blocks divide, and a tensor core's product takes
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MASK = 0xFFFFFFFF


@dataclass(frozen=True)
class Copy:
    """One copy of a matrix [rows, columns], blocked along `axis`. noise: for a stochastic
    quantizer. signs: of the Hadamard transform, float32 [group], or None."""

    axis: int
    noise: Noise | None = None
    signs: Tensor | None = None


def takes(x: Tensor, quantizer: Quantizer, axis: int, group: int) -> bool:
    """Whether the kernel makes such a copy of x: MXFP4 in blocks of 32 that tile it."""
    mxfp4 = quantizer.element == "e2m1" and quantizer.scale == "e8m0"
    return (
        mxfp4
        and quantizer.block == (1, BLOCK)
        and x.dim() == 2
        and x.dtype in (DTYPES if not group else (torch.bfloat16,))
        and (not group or group in HADAMARD_GROUPS)
        and x.shape[axis] % max(BLOCK, group) == 0
        and x.shape[1] % GROUP == 0
        and x.numel() > 0
    )


def quantize(
    x: Tensor, quantizer: Quantizer, copies: Sequence[Copy], group: int = 0
) -> list[QuantizedTensor]:
    """The copies (one, or one for each axis) of x [rows, columns], which is read once. All share
    the quantizer, the transform's group and, where they draw, seed, step and placement."""
    x = x.contiguous()
    rows, columns = x.shape
    made = {copy.axis: _empty(x, quantizer, copy.axis) for copy in copies}
    noises = {copy.axis: copy.noise for copy in copies if copy.noise is not None}
    signs = {copy.axis: copy.signs for copy in copies if copy.signs is not None}
    noise = next(iter(noises.values()), Noise(Key(0), 0))  # any will do where none is drawn
    place, words = noise.placement, noise.key.words()
    tile_rows, tile_columns, warps = _tile(group, 0 in made or quantizer.stochastic)
    operands: list[Tensor | int] = []
    for axis in (1, 0):
        copy = made.get(axis)
        operands += [x, x] if copy is None else [copy.codes.view(torch.int32), copy.scales]
        operands += [signs.get(axis, x), _signed(noises[axis].stream) if axis in noises else 0]
    grid = (triton.cdiv(rows, tile_rows), triton.cdiv(columns, tile_columns))
    quantize_kernel[grid](
        x,
        *operands,
        x if place.rows is None else place.rows,
        x if place.groups is None else place.groups,
        rows,
        columns,
        place.groups_per_row or columns // GROUP,
        _signed(noise.key.step & _MASK),
        *map(_signed, words),
        ALONG=1 in made,
        ACROSS=0 in made,
        CEIL=quantizer.rule == "ceil",
        STOCHASTIC=quantizer.stochastic,
        PRESCALE=quantizer.prescale,
        HADAMARD=group,
        SIGNED=bool(signs),
        FACTOR=1 / math.sqrt(group) if group else 1.0,
        INTERPRETED=triton.knobs.runtime.interpret,
        HAS_ROWS=place.rows is not None,
        HAS_GROUPS=place.groups is not None,
        TILE_ROWS=tile_rows,
        TILE_COLUMNS=tile_columns,
        num_warps=warps,
    )
    return [made[copy.axis] for copy in copies]


def _empty(x: Tensor, quantizer: Quantizer, axis: int) -> QuantizedTensor:
    k, others = x.shape[axis], x.shape[1 - axis]
    codes = x.new_empty(others, k // 2, dtype=torch.uint8)
    scales = x.new_empty(others, k // BLOCK, dtype=torch.uint8)
    return QuantizedTensor(codes, scales, None, quantizer, x.shape, axis)


def _tile(group: int, heavy: bool) -> tuple[int, int, int]:
    """(rows, columns, warps) of a program, by what was fastest on an H200. A tile has as many rows
    as a transform."""
    if group:
        return group, max(64, group), 4
    return (64, 64, 2) if heavy else (32, 64, 1)


def _signed(word: int) -> int:
    """An unsigned 32-bit word as the int32 of the same bits: Triton types a number by its size,
    and would compile anew for one beyond int32."""
    return word - 2**32 if word >= 2**31 else word
