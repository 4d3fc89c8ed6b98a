"""Launches the quantize kernels: matrices in, QuantizedTensors out, for one direction or both."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from megatron_fp4.arithmetic.philox import GROUP, Key, Noise, Placement, Signs, word
from megatron_fp4.arithmetic.quantizer import QuantizedTensor, Quantizer, average_for
from megatron_fp4.kernels.carrier import tally_for
from megatron_fp4.kernels.fp8 import FORMATS
from megatron_fp4.kernels.hadamard import transform_kernel
from megatron_fp4.kernels.launch import VERSION, Launch, kept, planned, tiles
from megatron_fp4.kernels.mxfp4 import BLOCK, quantize_kernel
from megatron_fp4.operands import Carriers, Made

HADAMARD_GROUPS = (32, 64, 128)
_REGISTERS = 128 if VERSION < (3, 7) else 136  # what Triton 3.9 makes would spill with 128
_MASK = 0xFFFFFFFF


class Copy(NamedTuple):
    """One copy of a matrix [rows, columns], blocked along `axis`. noise: for a stochastic
    quantizer. signs: of the Hadamard transform, if it has any. carrier: the FP8 dtype in which its
    elements are written too, which a transform leaves out."""

    axis: int
    noise: Noise | None = None
    signs: Signs | None = None
    carrier: torch.dtype | None = None


def quantize(
    x: Tensor | QuantizedTensor,
    quantizer: Quantizer,
    copies: Sequence[Copy],
    group: int = 0,
    average: Tensor | None = None,
) -> list[Made]:
    """The copies (one, or one for each axis) of x [rows, columns], which is read once, but for
    each copy that is transformed. All share the quantizer, the transform's group and, where they
    draw noise or signs, seed, step and placement. average: see `quantize_matrix`."""
    average = None if quantizer.rounding != "ema" else average_for(x, quantizer, average)
    if isinstance(x, QuantizedTensor):
        packed, source, x_scales = True, x.codes, x.scales
    else:
        if not x.is_contiguous() or x.storage_offset() % 2:
            x = x.clone(memory_format=torch.contiguous_format)  # words of two begin at even places
        packed, source, x_scales = False, x, None
    made = [_empty(source, x.shape, quantizer, copy, carries=not group) for copy in copies]
    if group:
        _transform(source, x.shape, quantizer, copies, group, made)
    else:
        _quantize(source, x_scales, x.shape, quantizer, copies, average, packed, made)
    return made


def _transform(
    source: Tensor,
    shape: torch.Size,
    quantizer: Quantizer,
    copies: Sequence[Copy],
    group: int,
    made: Sequence[Made],
) -> None:
    """Fills `made` with transformed copies."""
    rows, columns = shape
    for copy, operand in zip(copies, made, strict=True):
        signs = copy.signs or Signs((copy.noise or SILENCE).key, 0)
        noise = copy.noise or Noise(signs.key, 0)
        in_memory = is_in_memory(noise.key.step, signs.draw)
        form = copy.signs is not None, in_memory, noise.placement.groups is not None
        start = _transform_launch(rows, columns, quantizer, copy.axis, group, *form)
        codes, scales, *_, stream = _written(operand, copy)
        turn = signed(signs.stream), *given(signs.draw, in_memory, source)
        place = drawn(source, quantizer, noise, in_memory, rows, columns)
        start([source, codes, scales, stream, *turn, *place])


def _quantize(
    source: Tensor,
    x_scales: Tensor | None,
    shape: torch.Size,
    quantizer: Quantizer,
    copies: Sequence[Copy],
    average: Tensor | None,
    packed: bool,
    made: Sequence[Made],
) -> None:
    """Fills `made` with copies that are not transformed."""
    rows, columns = shape
    operands: list[Tensor | int | None] = [source, x_scales, *_NOWHERE, *_NOWHERE]
    wanted: list[torch.dtype | bool] = [False, False]  # along rows, across them
    for copy, operand in zip(copies, made, strict=True):
        place = 1 - copy.axis
        operands[2 + 5 * place : 7 + 5 * place] = _written(operand, copy)
        wanted[place] = copy.carrier or True
    noise = copies[0].noise or SILENCE
    in_memory, has_groups = type(noise.key.step) is not int, noise.placement.groups is not None
    along, across = wanted
    start = _quantize_launch(rows, columns, quantizer, packed, along, across, in_memory, has_groups)
    operands.append(None if average is None else average.to(torch.float32).contiguous())
    operands += drawn(source, quantizer, noise, in_memory, rows, columns)
    start(operands)


_NOWHERE = None, None, None, None, 0  # codes, scales, carriers, tally, stream


def drawn(
    source: Tensor,
    quantizer: Quantizer,
    noise: Noise,
    in_memory: bool,
    rows: int,
    columns: int,
) -> list[Tensor | int | None]:
    """What kernels are told of the noise of a matrix [rows, columns], but for the stream: where
    rows and groups lie, its size, groups in a row, step and seed."""
    place, key = noise.placement, noise.key
    at_rows = place.rows
    if at_rows is None and quantizer.stochastic:
        at_rows = _rows(source, rows, place)
    groups = place.groups_per_row or columns // GROUP
    return [
        at_rows if quantizer.stochastic else None,
        place.groups,
        rows,
        columns,
        groups,
        *given(key.step, in_memory, source),
        *key.signed_words,
    ]


def is_in_memory(*numbers: int | Tensor) -> bool:
    """Whether a kernel is to read one of these there, for a CUDA graph; a launch with numbers costs
    less host time."""
    return any(isinstance(number, Tensor) for number in numbers)


def given(number: int | Tensor, in_memory: bool, like: Tensor) -> tuple[int, Tensor | None]:
    """What a kernel is told of a number: it, and where it lies, of which one counts."""
    if isinstance(number, Tensor):
        assert number.dtype == torch.int64  # as kernels read it
        return 0, number
    number &= _MASK
    number = number - 2**32 if number >= 2**31 else number
    return number, kept(word, number, like) if in_memory else None


SILENCE = Noise(Key(0), 0)


@planned
def _quantize_launch(
    rows: int,
    columns: int,
    quantizer: Quantizer,
    packed: bool,
    along: torch.dtype | bool,
    across: torch.dtype | bool,
    in_memory: bool,
    has_groups: bool,
) -> Launch:
    """The kernel for one direction or both. along, across: whether there is such a copy, or the
    elements of its carriers."""
    has_along, has_across = along is not False, across is not False
    carried = bool(_mantissa(along) or _mantissa(across))
    height, width, warps, down, registers = tile(quantizer, packed, has_along, has_across, carried)
    constants = dict(
        PACKED=packed,
        ALONG=has_along,
        ALONG_CARRIED=_mantissa(along),
        ACROSS=has_across,
        ACROSS_CARRIED=_mantissa(across),
        DOWN=down,
        AVERAGED=quantizer.rounding == "ema",
    )
    constants |= _form(quantizer, in_memory, has_groups) | _tiled(rows, columns, height, width)
    grid = tiles(columns, width), tiles(rows, height)
    return Launch(
        quantize_kernel,
        grid[::-1] if down else grid,
        constants,
        _WORDS,
        num_warps=warps,
        maxnreg=registers,
    )


@planned
def _transform_launch(
    rows: int,
    columns: int,
    quantizer: Quantizer,
    axis: int,
    group: int,
    has_signs: bool,
    in_memory: bool,
    has_groups: bool,
) -> Launch:
    """The kernel for one copy. Two from one read would hold registers for both at once, and take
    longer."""
    height, width = (64, max(64, group)) if axis == 1 else (128, 32)
    factor = 1.0 if group == 64 else 1 / math.sqrt(group)
    constants = dict(GROUP=group, FACTOR=factor, AXIS=axis, HAS_SIGNS=has_signs)
    return Launch(
        transform_kernel,
        (tiles(rows, height), tiles(columns, width)),
        constants | _form(quantizer, in_memory, has_groups) | _tiled(rows, columns, height, width),
        {"codes_ptr": torch.int32},
        num_warps=1,
        num_stages=1,  # loads that wait in shared memory only cost their way through it
        maxnreg=None if axis == 1 else 128 if group < 128 else 255,
    )


# What the kernel reads and writes in words of four bytes.
_WORDS = dict.fromkeys(
    (
        "x_ptr",
        "along_codes_ptr",
        "along_carriers_ptr",
        "across_codes_ptr",
        "across_carriers_ptr",
    ),
    torch.int32,
)


def _form(quantizer: Quantizer, in_memory: bool, has_groups: bool) -> dict[str, Any]:
    return dict(
        CEIL=quantizer.rule == "ceil",
        STOCHASTIC=quantizer.stochastic,
        PRESCALE=quantizer.prescale,
        INTERPRETED=triton.knobs.runtime.interpret,
        IN_MEMORY=in_memory,
        HAS_GROUPS=has_groups,
    )


def _tiled(rows: int, columns: int, tile_rows: int, tile_columns: int) -> dict[str, Any]:
    even = rows % tile_rows == columns % tile_columns == 0
    return dict(EVEN=even, TILE_ROWS=tile_rows, TILE_COLUMNS=tile_columns)


def _written(made: Made, copy: Copy) -> tuple[Tensor | int | None, ...]:
    """Where a kernel puts a copy, and the stream of its noise."""
    operand, carriers = made
    stream = 0
    if copy.noise is not None:
        stream = copy.noise.stream
        stream = stream - 2**32 if stream >= 2**31 else stream
    codes, scales = operand.codes, operand.scales  # type: ignore[union-attr]
    if carriers is None:
        return codes, scales, None, None, stream
    return codes, scales, carriers.values, carriers.counts, stream


def _empty(
    like: Tensor, shape: torch.Size, quantizer: Quantizer, copy: Copy, carries: bool
) -> Made:
    """Room for a copy; with its carriers, if they are asked for and `carries`."""
    k, others = shape[copy.axis], shape[1 - copy.axis]
    codes = like.new_empty(others, k // 2, dtype=torch.uint8)
    scales = like.new_empty(others, k // BLOCK, dtype=torch.uint8)
    operand = QuantizedTensor(codes, scales, None, quantizer, shape, copy.axis)
    if copy.carrier is None or not carries:
        return Made(operand)
    return Made(operand, Carriers(codes.new_empty(others, k), copy.carrier, tally_for(codes)))


def _mantissa(carrier: torch.dtype | bool) -> int:
    return FORMATS[carrier][0] if isinstance(carrier, torch.dtype) else 0


def tile(
    quantizer: Quantizer, packed: bool, along: bool, across: bool, carried: bool
) -> tuple[int, int, int, bool, int | None]:
    """(rows, columns, warps) of a program, whether those that run together have tiles below each
    other, and the most registers of a thread, by what was fastest on an H200."""
    stochastic = quantizer.stochastic
    if quantizer.rounding == "ema":
        return 64, 64, 8, False, None  # as much as registers hold
    if across and not packed:
        if along:
            return (128, 64, 4, False, None) if stochastic else (64, 128, 4, False, None)
        if stochastic:  # with more registers fewer programs run together; carriers would spill
            return 128, 32, 2, False, None if carried else _REGISTERS
        return 128, 64, 4, False, None
    if packed:
        return 128, 64, 4, False, None
    return (32, 64, 1, True, None) if stochastic else (32, 128, 2, False, None)


def _rows(source: Tensor, rows: int, place: Placement) -> Tensor:
    """Where the rows lie in the unsharded matrix."""
    if place.rows is not None:
        return place.rows
    # In as many rows as a power of two: there are few of these to keep.
    return kept(_rows_from(place.first_row), 1 << (rows - 1).bit_length(), source)


@cache
def _rows_from(first: int) -> Callable[..., Tensor]:
    """What makes `number` row indices from `first` on."""

    def rows(number: int, *, device: torch.device) -> Tensor:
        return torch.arange(first, first + number, device=device)

    return rows


def signed(word: int) -> int:
    """An unsigned 32-bit word as the int32 of the same bits: Triton types a number by its size,
    and would compile anew for one beyond int32."""
    return word - 2**32 if word >= 2**31 else word
