"""Launches the quantize kernels: matrices in, QuantizedTensors out, for one direction or both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
import triton
from torch import Tensor

from megatron_fp4.hadamard import hadamard_matrix
from megatron_fp4.kernels.mxfp4 import BLOCK, quantize_kernel
from megatron_fp4.philox import GROUP, Key, Noise
from megatron_fp4.quantizer import QuantizedTensor, Quantizer

HADAMARD_GROUPS = (32, 64, 128)  # those that blocks divide, and a tensor core's product takes
_MASK = 0xFFFFFFFF


@dataclass(frozen=True)
class Copy:
    """One copy of a matrix [rows, columns], blocked along `axis`. noise: for a stochastic
    quantizer. signs: of the Hadamard transform, float32 [group], or None."""

    axis: int
    noise: Noise | None = None
    signs: Tensor | None = None


def takes(x: Tensor | QuantizedTensor, quantizer: Quantizer, axis: int, group: int) -> bool:
    """Whether the kernel makes such a copy of x: MXFP4 in blocks of 32 that tile it, of BF16 or of
    MXFP4 in blocks along its rows."""
    if isinstance(x, QuantizedTensor):
        readable = x.quantizer.mxfp4 and x.axis == 1 and not group
    else:
        readable = x.dtype == torch.bfloat16
    return (
        readable
        and quantizer.mxfp4
        and len(x.shape) == 2
        # Three quarters of a BF16 number are exact, and what a floor scale leaves of them is at
        # most 6; with others the kernel would round twice, and clip nothing.
        and quantizer.prescale in ((1.0, 0.75) if quantizer.stochastic else (1.0,))
        and (not group or group in HADAMARD_GROUPS)
        and x.shape[axis] % max(BLOCK, group) == 0
        and x.shape[1] % GROUP == 0
        and x.shape.numel() > 0
    )


def quantize(
    x: Tensor | QuantizedTensor, quantizer: Quantizer, copies: Sequence[Copy], group: int = 0
) -> list[QuantizedTensor]:
    """The copies (one, or one for each axis) of x [rows, columns], which is read once. All share
    the quantizer, the transform's group and, where they draw, seed, step and placement."""
    rows, columns = x.shape
    packed = isinstance(x, QuantizedTensor)
    if isinstance(x, QuantizedTensor):
        source, x_scales = x.codes.view(torch.int32), x.scales
    else:
        x = x.contiguous()
        x = x.clone() if x.storage_offset() % 2 else x  # words of two begin at even places
        source = x_scales = x if group else x.view(torch.int32)
    shape = torch.Size((rows, columns))
    made = {copy.axis: _empty(source, shape, quantizer, copy.axis) for copy in copies}
    noises = {copy.axis: copy.noise for copy in copies if copy.noise is not None}
    signs = {copy.axis: copy.signs for copy in copies if copy.signs is not None}
    noise = next(iter(noises.values()), Noise(Key(0), 0))  # any will do where none is drawn
    place, words = noise.placement, noise.key.words()
    tile_rows, tile_columns, warps = _tile(group, packed, 0 in made, quantizer.stochastic)
    h, factor = _transform(group, source.device) if group else (source, 1.0)
    operands: list[Tensor | int] = []
    for axis in (1, 0):
        copy = made.get(axis)
        operands += (
            [source, source] if copy is None else [copy.codes.view(torch.int32), copy.scales]
        )
        operands += [signs.get(axis, source), _signed(noises[axis].stream) if axis in noises else 0]
    grid = (triton.cdiv(rows, tile_rows), triton.cdiv(columns, tile_columns))
    quantize_kernel[grid](
        source,
        x_scales,
        h,
        *operands,
        source if place.rows is None else place.rows,
        source if place.groups is None else place.groups,
        rows,
        columns,
        place.groups_per_row or columns // GROUP,
        _signed(noise.key.step & _MASK),
        *map(_signed, words),
        PACKED=packed,
        ALONG=1 in made,
        ACROSS=0 in made,
        CEIL=quantizer.rule == "ceil",
        STOCHASTIC=quantizer.stochastic,
        PRESCALE=quantizer.prescale,
        HADAMARD=group,
        SIGNED=bool(signs),
        FACTOR=factor,
        INTERPRETED=triton.knobs.runtime.interpret,
        HAS_ROWS=place.rows is not None,
        HAS_GROUPS=place.groups is not None,
        EVEN=rows % tile_rows == columns % tile_columns == 0,
        TILE_ROWS=tile_rows,
        TILE_COLUMNS=tile_columns,
        num_warps=warps,
    )
    return [made[copy.axis] for copy in copies]


def _empty(like: Tensor, shape: torch.Size, quantizer: Quantizer, axis: int) -> QuantizedTensor:
    k, others = shape[axis], shape[1 - axis]
    codes = like.new_empty(others, k // 2, dtype=torch.uint8)
    scales = like.new_empty(others, k // BLOCK, dtype=torch.uint8)
    return QuantizedTensor(codes, scales, None, quantizer, shape, axis)


def _tile(group: int, packed: bool, across: bool, stochastic: bool) -> tuple[int, int, int]:
    """(rows, columns, warps) of a program, by what was fastest on an H200. A transform's groups
    tile it."""
    if group:
        return max(64, group), max(64, group), 4
    if packed or across:
        return 128, 64, 4
    return (32, 64, 1) if stochastic else (64, 128, 2)


@cache
def _transform(group: int, device: torch.device) -> tuple[Tensor, float]:
    """(H in BF16, what is left to multiply the product with): 1 / sqrt(g) is exact where g is a
    power of four."""
    h, root = hadamard_matrix(group, torch.bfloat16, device), math.isqrt(group)
    return (h / root, 1.0) if root * root == group else (h, 1 / math.sqrt(group))


def _signed(word: int) -> int:
    """An unsigned 32-bit word as the int32 of the same bits: Triton types a number by its size,
    and would compile anew for one beyond int32."""
    return word - 2**32 if word >= 2**31 else word
