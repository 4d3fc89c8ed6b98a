"""Launches the quantize kernels: matrices in, QuantizedTensors out, for one direction or both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from megatron_fp4.kernels.hadamard import transform_kernel
from megatron_fp4.kernels.launch import launch, stream_of, tiles
from megatron_fp4.kernels.mxfp4 import BLOCK, quantize_kernel
from megatron_fp4.philox import GROUP, Key, Noise, Placement, Signs
from megatron_fp4.quantizer import QuantizedTensor, Quantizer

HADAMARD_GROUPS = (32, 64, 128)
_MASK = 0xFFFFFFFF


@dataclass(frozen=True)
class Copy:
    """One copy of a matrix [rows, columns], blocked along `axis`. noise: for a stochastic
    quantizer. signs: of the Hadamard transform, if it has any."""

    axis: int
    noise: Noise | None = None
    signs: Signs | None = None


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
    """The copies (one, or one for each axis) of x [rows, columns], which is read once, but for
    each copy that is transformed. All share
    the quantizer, the transform's group and, where they draw, seed, step and placement."""
    rows, columns = x.shape
    packed = isinstance(x, QuantizedTensor)
    if isinstance(x, QuantizedTensor):
        source, x_scales = x.codes.view(torch.int32), x.scales
    else:
        x = x.contiguous()
        x = x.clone() if x.storage_offset() % 2 else x  # words of two begin at even places
        source = x_scales = x if group else x.view(torch.int32)
    made = {copy.axis: _empty(source, x.shape, quantizer, copy.axis) for copy in copies}
    noise = next((copy.noise for copy in copies if copy.noise is not None), Noise(Key(0), 0))
    place = noise.placement
    there: list[Tensor | int] = [
        _rows(source, rows, quantizer, place),
        source if place.groups is None else place.groups,
        rows,
        columns,
        place.groups_per_row or columns // GROUP,
        _signed(noise.key.step & _MASK),
        *map(_signed, noise.key.words()),
    ]
    form = dict(
        CEIL=quantizer.rule == "ceil",
        STOCHASTIC=quantizer.stochastic,
        PRESCALE=quantizer.prescale,
        INTERPRETED=triton.knobs.runtime.interpret,
        HAS_GROUPS=place.groups is not None,
    )
    if group:
        for copy in copies:
            _transformed(source, made[copy.axis], copy, there, group, form)
        return [made[copy.axis] for copy in copies]
    operands: list[Tensor | int] = []
    for axis in (1, 0):
        found = [_operands(made[copy.axis], copy) for copy in copies if copy.axis == axis]
        operands += found[0] if found else [source, source, 0]
    tile_rows, tile_columns, warps = _tile(packed, 1 in made, 0 in made, quantizer.stochastic)
    form |= dict(PACKED=packed, ALONG=1 in made, ACROSS=0 in made)
    form |= _tiled(rows, columns, tile_rows, tile_columns)
    grid = tiles(rows, tile_rows), tiles(columns, tile_columns)
    launch(quantize_kernel, grid, [source, x_scales, *operands, *there], form, num_warps=warps)
    return [made[copy.axis] for copy in copies]


def _transformed(
    x: Tensor,
    made: QuantizedTensor,
    copy: Copy,
    there: list[Tensor | int],
    group: int,
    form: dict[str, Any],
) -> None:
    """One copy. Two from one read would hold registers for both at once, and take longer."""
    rows, columns = x.shape
    tile_rows, tile_columns = (64, max(64, group)) if copy.axis == 1 else (128, 32)
    signs = (0, 0, 0, 0) if copy.signs is None else map(_signed, copy.signs.words())
    launch(
        transform_kernel,
        (tiles(rows, tile_rows), tiles(columns, tile_columns)),
        [x, *_operands(made, copy), *signs, *there],
        form
        | dict(GROUP=group, FACTOR=1.0 if group == 64 else 1 / math.sqrt(group), AXIS=copy.axis)
        | _tiled(rows, columns, tile_rows, tile_columns),
        num_warps=1,
        num_stages=1,  # loads that wait in shared memory only cost their way through it
        maxnreg=None if copy.axis == 1 else 128 if group < 128 else 255,
    )


def _tiled(rows: int, columns: int, tile_rows: int, tile_columns: int) -> dict[str, Any]:
    even = rows % tile_rows == columns % tile_columns == 0
    return dict(EVEN=even, TILE_ROWS=tile_rows, TILE_COLUMNS=tile_columns)


def _operands(made: QuantizedTensor, copy: Copy) -> list[Tensor | int]:
    """Where a kernel puts a copy, and the stream of its noise."""
    stream = 0 if copy.noise is None else _signed(copy.noise.stream)
    return [made.codes.view(torch.int32), made.scales, stream]


def _empty(like: Tensor, shape: torch.Size, quantizer: Quantizer, axis: int) -> QuantizedTensor:
    k, others = shape[axis], shape[1 - axis]
    codes = like.new_empty(others, k // 2, dtype=torch.uint8)
    scales = like.new_empty(others, k // BLOCK, dtype=torch.uint8)
    return QuantizedTensor(codes, scales, None, quantizer, shape, axis)


def _tile(packed: bool, along: bool, across: bool, stochastic: bool) -> tuple[int, int, int]:
    """(rows, columns, warps) of a program, by what was fastest on an H200."""
    if across and not packed:
        if along:
            return (128, 64, 4) if stochastic else (64, 64, 2)
        return (128, 32, 2) if stochastic else (128, 64, 4)
    if packed:
        return 128, 64, 4
    return (32, 64, 1) if stochastic else (64, 128, 2)


def _rows(source: Tensor, rows: int, quantizer: Quantizer, place: Placement) -> Tensor:
    """Where the rows lie in the unsharded matrix; anything where no noise is drawn."""
    if not quantizer.stochastic:
        return source
    if place.rows is not None:
        return place.rows
    return _counted(1 << (rows - 1).bit_length(), source.device, stream_of(source))


@cache
def _counted(rows: int, device: torch.device, stream: int) -> Tensor:
    """0, 1, 2, ... in as many rows as a power of two: there are few of these to keep."""
    return torch.arange(rows, device=device)


def _signed(word: int) -> int:
    """An unsigned 32-bit word as the int32 of the same bits: Triton types a number by its size,
    and would compile anew for one beyond int32."""
    return word - 2**32 if word >= 2**31 else word
