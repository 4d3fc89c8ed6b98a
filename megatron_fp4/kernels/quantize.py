"""Launches the quantize kernels: a matrix in, one quantized copy or two out.

A copy has blocks along one axis of the matrix. Both copies are made in one read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_fp4.arithmetic.hadamard import FIXED_SIGNS, FixedSigns
from megatron_fp4.arithmetic.philox import GROUP, Key, Noise, Placement, Signs, signed, word
from megatron_fp4.arithmetic.quantized_tensor import QuantizedTensor
from megatron_fp4.arithmetic.quantizer import Quantizer
from megatron_fp4.arithmetic.scaling import average_for
from megatron_fp4.kernels.arguments import Draws, Output, Random, Rounding, Source, Tile
from megatron_fp4.kernels.fp8 import FORMATS
from megatron_fp4.kernels.hadamard import transform_kernel
from megatron_fp4.kernels.launch import (
    INTERPRETED,
    NUMBER,
    VERSION,
    Launch,
    address,
    in_words,
    kept,
    planned,
    tiles,
)
from megatron_fp4.kernels.mxfp4 import quantize_kernel
from megatron_fp4.kernels.rms_norm import factors
from megatron_fp4.kernels.swiglu import words_of
from megatron_fp4.operands import Carriers, Made, Matrix, Normed, Swiglu, SwigluGradient
from megatron_fp4.recording import DRAW, SEED_HIGH, SEED_LOW, STEP

HADAMARD_GROUPS = (32, 64, 128)
BLOCKS = (16, 32)  # block sizes
_REGISTERS = 128 if VERSION < (3, 7) else 136  # what Triton 3.9 makes would spill with 128
_SIGN = 0x80000000
SILENCE = Noise(Key(0), 0)

# The types of the kernels' arguments; see `Launch`.
RANDOM = Random(torch.int64, torch.int64, NUMBER, STEP, torch.int64, SEED_LOW, SEED_HIGH)
_NO_RANDOM = Random(None, None, 0, 0, None, 0, 0)
_SOURCE = Source(torch.int32, torch.uint8, torch.int32, torch.float32, torch.int32)
_OUTPUT = Output(torch.int32, torch.uint8, torch.int32, torch.int32, NUMBER)
_NO_OUTPUT = Output(None, None, None, None, 0)


@dataclass(slots=True)
class Copy:
    """One quantized copy of a matrix [rows, columns].

    axis: the blocked axis. noise: the source of random bits of a stochastic quantizer. signs: of
    the Hadamard transform, random or fixed, if it has any. carrier: the FP8 dtype of the carriers
    that are written too; None, or a transform, writes none.
    """

    axis: int
    noise: Noise | None = None
    signs: Signs | FixedSigns | None = None
    carrier: torch.dtype | None = None


def quantize(
    x: Matrix,
    quantizer: Quantizer,
    copies: Sequence[Copy],
    group: int = 0,
    average: Tensor | None = None,
) -> list[Made]:
    """Quantizes a matrix to E2M1 codes with E8M0 scales, along one axis or along each.

    x: BF16 [rows, columns], codes with blocks along the rows, or a matrix that is computed from
        BF16 as it is read (operands.Matrix). It is read once; a transform reads it once for each
        copy. Y of the gradient of a SwiGLU may be in E4M3.
    quantizer, group: of all copies; a group is that of a Hadamard transform, 0 is none.
    copies: one, or one for each axis. They share seed, step and placement.
    average: float32 [rows, columns], for rounding ema.

    Returns what was made of each copy, in their order. Sizes and formats that the kernel does not
    take are not noticed here: Mxfp4Kernel.refuses names them when a linear is planned.
    """
    x_scales = y = by_row = weight = None
    packed, reads, of_y = 0, "", torch.int32
    match x:
        case QuantizedTensor():
            source, x_scales, packed = x.codes, x.scales, x.quantizer.block[1]
        case Swiglu():
            source, reads = in_words(x.y), "swiglu"
        case SwigluGradient():
            source, y, reads = in_words(x.gradient), in_words(x.y), "swiglu gradient"
            of_y = words_of(y)
        case Normed():
            source, by_row, weight = in_words(x.x), x.factors_by(factors), in_words(x.norm.weight)
            reads = "normed, zero-centered" if x.norm.zero_centered else "normed"
        case _:  # checked here, since a call more costs host time
            fits = x.is_contiguous() and not x.storage_offset() % 2
            source = x if fits else in_words(x)
    if group:
        return _transform(source, x.shape, quantizer, copies, group)
    rows, columns = x.shape
    noise = copies[0].noise or SILENCE
    in_memory, has_groups = type(noise.key.step) is not int, noise.placement.groups is not None
    random: Sequence[Tensor | int | None] = _NO_RANDOM
    stochastic = quantizer.stochastic
    if stochastic:
        random = random_of(source, noise, in_memory, rows, columns)
    made: list[Made] = []
    outputs: list[tuple[Any, ...]] = [_NO_OUTPUT, _NO_OUTPUT]  # along the rows, along the columns
    wanted: list[torch.dtype | bool] = [False, False]
    for copy in copies:
        axis, drawn, carrier = copy.axis, copy.noise, copy.carrier
        k, others = (columns, rows) if axis else (rows, columns)
        codes = source.new_empty((others, k // 2), dtype=torch.uint8)
        scales = codes.new_empty((others, k // quantizer.block[1]))
        stream = 0 if drawn is None else (drawn.stream ^ _SIGN) - _SIGN  # `signed`, without a call
        operand = QuantizedTensor(codes, scales, None, quantizer, x.shape, axis)
        if carrier is None:
            made += (Made(operand),)
            outputs[1 - axis] = codes, scales, None, None, stream
        else:
            values = codes.new_empty((others, k))
            counts = codes.new_empty(4 + others, dtype=torch.int32)
            addresses = address(codes), address(scales), address(values), address(counts)
            made += (Made(operand, Carriers(values, carrier, counts, addresses)),)
            outputs[1 - axis] = *addresses, stream
        wanted[1 - axis] = carrier or True
    if quantizer.rounding == "ema":
        assert isinstance(x, Tensor | QuantizedTensor)
        average = average_for(x.shape, quantizer, average)
        assert average is not None
        average = average.to(torch.float32).contiguous()
    copied = wanted[0], wanted[1]
    both = wanted[0] is not False and wanted[1] is not False
    shared = stochastic and both and outputs[0][4] == outputs[1][4]
    draws = in_memory, has_groups, shared
    start = _quantize_launch(rows, columns, quantizer.fields, packed, reads, *copied, *draws, of_y)
    start(
        source.device, source, x_scales, y, by_row, weight,
        *outputs[0], *outputs[1], average, *random, rows, columns,
    )  # fmt: skip
    return made


SWIGLU_COLUMNS = 128  # whose multiples the kernel takes as the columns of a SwiGLU


def _transform(
    source: Tensor, shape: torch.Size, quantizer: Quantizer, copies: Sequence[Copy], group: int
) -> list[Made]:
    """Copies that are transformed before they are quantized, one launch for each."""
    rows, columns = shape
    made = []
    for copy in copies:
        axis = copy.axis
        signs = copy.signs
        if not isinstance(signs, Signs):  # none, or fixed ones, which the launch has
            signs = Signs((copy.noise or SILENCE).key, 0)
        noise = copy.noise or Noise(signs.key, 0)
        number = 0 if signs.draw is None else signs.draw
        in_memory = is_in_memory(noise.key.step, number)
        k, others = (columns, rows) if axis else (rows, columns)
        codes = source.new_empty((others, k // 2), dtype=torch.uint8)
        scales = codes.new_empty((others, k // quantizer.block[1]))
        varies = signs.draw is not None
        which = "random" if copy.signs is signs else "none" if copy.signs is None else "fixed"
        form = which, in_memory, noise.placement.groups is not None, varies
        start = transform_launch(rows, columns, quantizer, axis, group, *form)
        output = codes, scales, None, None, signed(noise.stream)
        draw = signed(signs.stream), *in_two_forms(number, in_memory, source)
        stochastic = quantizer.stochastic
        random = random_of(source, noise, in_memory, rows, columns, places=stochastic)
        start(source.device, source, *output, *draw, *random, rows, columns)
        made.append(Made(QuantizedTensor(codes, scales, None, quantizer, shape, axis)))
    return made


def random_of(
    like: Tensor,
    noise: Noise,
    in_memory: bool,
    rows: int,
    columns: int,
    places: bool = True,
) -> tuple[Tensor | int | None, ...]:
    """A kernel's `Random` argument for a matrix [rows, columns].

    in_memory: whether the step is read from memory. places: False if only the signs of a transform
    are random, which do not depend on the place.
    """
    place, key = noise.placement, noise.key
    at_rows = _rows(like, rows, place) if places else None
    groups = place.groups_per_row or columns // GROUP
    step, low, high = key.signed_words
    in_tensor = in_two_forms(key.step, True, like)[1] if in_memory else None
    return at_rows, place.groups, groups, step, in_tensor, low, high


def is_in_memory(*numbers: int | Tensor) -> bool:
    """Whether a kernel reads these numbers from memory, as it must if one of them is a tensor (in a
    CUDA graph). A launch that passes them as integers costs less host time."""
    return any(isinstance(number, Tensor) for number in numbers)


def in_two_forms(number: int | Tensor, in_memory: bool, like: Tensor) -> tuple[int, Tensor | None]:
    """A 64-bit number for a kernel: (its low word as an int32, a tensor that holds it); the kernel
    reads the latter if `in_memory`."""
    if number.__class__ is not int and isinstance(number, Tensor):
        assert number.dtype == torch.int64  # as kernels read it
        return 0, number
    number = signed(number)
    return number, kept(word, (number,), like) if in_memory else None


@planned
def _quantize_launch(
    rows: int,
    columns: int,
    fields: tuple[Any, ...],
    packed: int,
    reads: str,
    along_rows: torch.dtype | bool,
    along_columns: torch.dtype | bool,
    in_memory: bool,
    has_groups: bool,
    shared: bool,
    of_y: torch.dtype = torch.int32,
) -> Launch:
    """The launch of the kernel that quantizes a matrix [rows, columns] without a transform.

    fields: of the quantizer. packed: the block size, if the matrix is given as codes; 0 for BF16.
    reads: what the kernel computes from what it reads; see source.py.
    along_rows, along_columns: of the copy with blocks along the rows or the columns: False if it is
        not made, the dtype of the carriers that are written beside it, or True without carriers.
    in_memory, has_groups, shared: the fields of `Draws`. of_y: the type of the source's `y`.
    """
    quantizer, wanted = Quantizer(*fields), (along_rows, along_columns)
    carriers = [_mantissa(each) if each else None for each in wanted]
    height, width, warps, down, registers = tile(
        quantizer, bool(packed), bool(along_rows), bool(along_columns), any(carriers), reads
    )
    grid = tiles(columns, width), tiles(rows, height)
    return Launch(
        quantize_kernel,
        grid[::-1] if down else grid,
        (_SOURCE._replace(y=of_y), _OUTPUT, _OUTPUT, torch.float32, RANDOM, rows, columns),
        dict(
            PACKED=packed,
            READS=reads,
            ROWS_CARRIER=carriers[0],
            COLUMNS_CARRIER=carriers[1],
            ROUNDING=rounding_of(quantizer),
            DRAWS=Draws(in_memory, has_groups, shared),
            TILE=_tile(rows, columns, height, width),
            DOWN=down,
            INTERPRETED=INTERPRETED,
        ),
        num_warps=warps,
        maxnreg=registers,
    )


@planned
def transform_launch(
    rows: int,
    columns: int,
    quantizer: Quantizer,
    axis: int,
    group: int,
    signs: str,
    in_memory: bool,
    has_groups: bool,
    varies: bool = True,
) -> Launch:
    """The launch for one transformed copy. Two copies from one read would need registers for both
    at once, and take longer.

    signs: as in `Hadamard`. varies: whether the number of the draw of signs differs between calls.
    """
    height, width = (64, max(64, group)) if axis == 1 else (128, 32)
    sign_draw = DRAW if varies else NUMBER
    return Launch(
        transform_kernel,
        (tiles(rows, height), tiles(columns, width)),
        (torch.bfloat16, _OUTPUT, NUMBER, sign_draw, torch.int64, RANDOM, rows, columns),
        dict(
            GROUP=group,
            FACTOR=1.0 if group == 64 else 1 / math.sqrt(group),
            AXIS=axis,
            SIGNS=signs,
            FIXED=FIXED_SIGNS.words(),
            ROUNDING=rounding_of(quantizer),
            DRAWS=Draws(in_memory, has_groups),
            TILE=_tile(rows, columns, height, width),
            INTERPRETED=INTERPRETED,
        ),
        num_warps=1,
        num_stages=1,  # staging loads in shared memory only adds latency
        maxnreg=None if axis == 1 else 128 if group < 128 else 255,
    )


def rounding_of(quantizer: Quantizer) -> Rounding:
    """The kernels' constants for a quantizer with E8M0 scales."""
    return Rounding(
        BLOCK=quantizer.block[1],
        RULE=quantizer.rule,
        STOCHASTIC=quantizer.stochastic,
        AVERAGED=quantizer.rounding == "ema",
        PRESCALE=quantizer.prescale,
    )


def _tile(rows: int, columns: int, height: int, width: int) -> Tile:
    return Tile(height, width, EVEN=rows % height == columns % width == 0)


def _mantissa(carrier: torch.dtype | bool) -> int:
    """The mantissa bits of an FP8 dtype; 0 if no carriers are written."""
    return FORMATS[carrier][0] if isinstance(carrier, torch.dtype) else 0


def tile(
    quantizer: Quantizer,
    packed: bool,
    along_rows: bool,
    along_columns: bool,
    carried: bool,
    reads: str = "",
) -> tuple[int, int, int, bool, int | None]:
    """(rows, columns, warps, down, registers) of a program, by what was fastest on an H200.

    down: whether programs that run together have tiles below each other. registers: the most that a
    thread may use; None leaves it to the compiler.
    """
    stochastic, is_gradient = quantizer.stochastic, reads == "swiglu gradient"
    if quantizer.rounding == "ema":
        return 64, 64, 8, False, None  # as much as registers hold
    if along_columns and not packed:
        if along_rows and stochastic and is_gradient:
            return 128, 64, 4, True, 208  # it reads three matrices, and would spill with 168
        if along_rows:
            # With 168 registers three programs run at once, also where the random bits stay in
            # registers for the second copy. Carriers of the rows of a tile fill half of a cache
            # line. The program beside it writes the other half.
            return (128, 64, 4, not carried, 168) if stochastic else (64, 128, 4, False, None)
        if stochastic:  # with more registers fewer programs run together; carriers would spill
            return 128, 32, 2, False, None if carried or is_gradient else _REGISTERS
        return 128, 64, 4, False, None
    if packed:
        return 128, 64, 4, False, None
    return (32, 64, 1, True, None) if stochastic else (32, 128, 2, False, None)


def _rows(source: Tensor, rows: int, place: Placement) -> Tensor:
    """The row numbers of a part's rows in the unsharded matrix: int64, at least `rows` elements."""
    if place.rows is not None:
        return place.rows
    # Rounded up to a power of two, so that few tables serve all numbers of rows.
    count = 1 << (rows - 1).bit_length()
    return kept(_indices, (place.first_row, count), source)


def _indices(first: int, count: int, *, device: torch.device) -> Tensor:
    """int64 [count]: first, first + 1, ..."""
    return torch.arange(first, first + count, device=device)
