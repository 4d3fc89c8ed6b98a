"""Quantization to E2M1 with block scales in E4M3 or UE5M3, in Triton: NVFP4 and similar formats;
and with E8M0 scales, of float32 matrices, which the kernels of quantize.py do not read.

A block lies in one row or is a rectangle of several rows. There may be a tensor scale above the
block scales. One kernel finds the tensor's largest magnitude, where a tensor scale needs it.
Another scales, rounds and, for blocks along the columns, transposes. Both apply a Hadamard
transform first, if there is one. The bits are those of arithmetic/scaling.py.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_fp4.arithmetic.formats import E2M1, E8M0_BIAS, E8M0_NAN, SCALE_FLOATS
from megatron_fp4.arithmetic.philox import Noise, signed
from megatron_fp4.arithmetic.quantized_tensor import COUNTS, QuantizedTensor
from megatron_fp4.arithmetic.quantizer import Quantizer
from megatron_fp4.kernels.arguments import Draws
from megatron_fp4.kernels.encode import nearest, pack, stochastic
from megatron_fp4.kernels.float_scales import spread
from megatron_fp4.kernels.gain import of_unit_gain
from megatron_fp4.kernels.launch import INTERPRETED, NUMBER, Launch, kernel, planned, tiles
from megatron_fp4.kernels.philox import (
    integers_of,
    key_of,
    neighbour_group_indices,
    rest_of_neighbours,
    rest_of_tile,
    tile_group_indices,
)
from megatron_fp4.kernels.quantize import RANDOM, SILENCE, is_in_memory, random_of
from megatron_fp4.kernels.rows import INFINITE
from megatron_fp4.kernels.scale_rules import in_scales
from megatron_fp4.kernels.tile_hadamard import Transform, Turn, loaded, turn_of

TILE, WARPS = 64, 4  # rows and columns of a program's tile
WIDE = 128  # elements along the axis of a tile of 32 lines, for groups that are larger than TILE
MANTISSA = 3  # mantissa bits of E4M3 and UE5M3 scales
COMPARED = ("mse-fp8", "four-over-six")  # rules that compare the errors of several scales
# How the kernels read a matrix: BF16 as its bits.
_SOURCES = {torch.bfloat16: torch.int16, torch.float32: torch.float32}
_FLOAT_RULES = ("nearest", "up", *COMPARED)
# By scale format. No kernel finds the scales of rule mse for float32 matrices.
RULES = {"e4m3": _FLOAT_RULES, "ue5m3": _FLOAT_RULES, "e8m0": ("floor", "ceil", "nearest")}


@triton.jit
def _maxima(v, ACROSS: tl.constexpr, ALONG: tl.constexpr):
    """The bits of the largest magnitude of each block of v: int32 [rows / ACROSS, columns / ALONG].

    v: float32 [rows, columns]. A block has ACROSS rows and ALONG columns. If it holds an Inf or a
        NaN the result is INFINITE or larger.
    """
    R: tl.constexpr = v.shape[0]
    C: tl.constexpr = v.shape[1]
    bits = v.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.max(tl.max(tl.reshape(bits, (R // ACROSS, ACROSS, C // ALONG, ALONG)), 3), 1)


@triton.jit
def _finite_or_0(maxima):
    """The bits of blocks' largest magnitudes (`_maxima`), 0 for a block with an Inf or a NaN."""
    return tl.where(maxima < INFINITE, maxima, 0)


@kernel(fp_fusion=True)
def top_kernel(
    x_ptr,
    signs_ptr,
    largest_ptr,
    n_rows,
    n_columns,
    AXIS: tl.constexpr,
    ACROSS: tl.constexpr,
    ALONG: tl.constexpr,
    TURN: tl.constexpr,
    INTERPRETED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Finds the bits of the largest magnitude in all blocks that are finite.

    x_ptr, signs_ptr, TURN: see `tile_hadamard.loaded`.
    largest_ptr: int32 [], 0 at the launch; the result is written to it.
    AXIS: the blocked axis. ACROSS, ALONG: the size of a block across this axis and along it.
    ROWS, COLUMNS: of the tile of x that a program handles.
    """
    v = loaded(x_ptr, signs_ptr, n_rows, n_columns, AXIS, ALONG, TURN, INTERPRETED, ROWS, COLUMNS)
    maxima = _finite_or_0(_maxima(v, ACROSS, ALONG))
    tl.atomic_max(largest_ptr, tl.max(maxima))


@triton.jit
def _scale_byte(code, finite, NAN: tl.constexpr):
    """The bytes of block scales: the code, or NAN for a block that is not finite."""
    return tl.where(finite, code, NAN).to(tl.uint8)


@triton.jit
def _saturated(magnitude):
    """Scaled magnitudes, clamped to 6, the largest of E2M1."""
    return tl.minimum(magnitude, 6.0)


@triton.jit
def _rest(
    place,
    key,
    stream,
    AXIS: tl.constexpr,
    HAS_GROUPS: tl.constexpr,
    INTERPRETED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Random bits for the elements of a program's tile: int32, with AXIS last.

    They are the argument `rest` of `encode.stochastic`. place: see `philox.group_indices`. key:
    (step, low and high word of the seed). stream: the number of the random stream. ROWS, COLUMNS:
    of the tile in x.
    """
    row0, column0 = tl.program_id(0) * ROWS, tl.program_id(1) * COLUMNS
    if AXIS == 1:
        index = neighbour_group_indices(
            place, row0, column0, ROWS, COLUMNS, HAS_GROUPS, INTERPRETED
        )
        rest = rest_of_neighbours(index, key, stream, INTERPRETED)
    else:
        index = tile_group_indices(place, row0, column0, ROWS, COLUMNS, HAS_GROUPS, INTERPRETED)
        rest = tl.reshape(rest_of_tile(index, key, stream, INTERPRETED), (ROWS, COLUMNS))
        rest = tl.trans(rest)
    return rest


@triton.jit
def _store(ptr, tile, n_lines, n_along, AXIS: tl.constexpr):
    """Stores a program's tile of a matrix uint8 [n_lines, n_along] that has AXIS last."""
    LINES: tl.constexpr = tile.shape[0]
    LENGTH: tl.constexpr = tile.shape[1]
    lines = tl.program_id(1 - AXIS) * LINES + tl.arange(0, LINES)[:, None]
    along = tl.program_id(AXIS) * LENGTH + tl.arange(0, LENGTH)[None, :]
    there = (lines < n_lines) & (along < n_along)
    tl.store(ptr + lines.to(tl.int64) * n_along + along, tile, mask=there)


@kernel(fp_fusion=False)
def cast_kernel(
    x_ptr,
    signs_ptr,
    largest_ptr,
    codes_ptr,
    scales_ptr,
    counts_ptr,
    tensor_scale_ptr,
    stream,
    random,
    n_rows,
    n_columns,
    AXIS: tl.constexpr,
    ACROSS: tl.constexpr,
    ALONG: tl.constexpr,
    TENSOR_MAX: tl.constexpr,
    INFLATE: tl.constexpr,
    PRESCALE: tl.constexpr,
    RULE: tl.constexpr,
    BIAS: tl.constexpr,
    MAX: tl.constexpr,
    NAN: tl.constexpr,
    GAIN: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    SCALES_DRAW: tl.constexpr,
    DRAWS: tl.constexpr,
    TURN: tl.constexpr,
    INTERPRETED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Quantizes x [n_rows, n_columns] to codes, two in a byte, and block scales, with AXIS last.

    x_ptr, signs_ptr, TURN: see `tile_hadamard.loaded`.
    largest_ptr: int32 [], the bits of the largest finite magnitude; read if TENSOR_MAX is not 0.
    codes_ptr: uint8 [others, n / 2], with n the length of AXIS and `others` that of the other axis.
    scales_ptr: uint8 [others / ACROSS, n / ALONG].
    counts_ptr: int32 [2], 0 at the launch; the second is raised by the number of blocks with Inf or
        NaN (`QuantizedTensor.tally`).
    tensor_scale_ptr: float32 [], where the tensor scale is written if TENSOR_MAX is not 0.
    stream, random, DRAWS: what the random bits depend on (arguments.py); read if STOCHASTIC or
        SCALES_DRAW.
    ACROSS, ALONG: the size of a block across AXIS and along it.
    TENSOR_MAX: the largest block scale under a tensor scale; 0 if there is no tensor scale.
    INFLATE: multiplies block scales before they are rounded. RULE: nearest or up, how they are
        rounded; four-over-six (four_over_six.py) or mse-fp8 (fp8_scales.py), where ACROSS is 1; of
        E8M0 scales floor, ceil or nearest.
    PRESCALE: multiplies scaled elements before they are rounded.
    BIAS, MAX, NAN: of the scale format, its exponent bias, largest number (not read of E8M0) and
        byte of NaN.
    GAIN: the elements of a group whose scales are corrected for a gain of 1 (gain.py); 0 corrects
        none. ACROSS is then 1, and SCALES_DRAW says whether they are rounded stochastically.
    ROWS, COLUMNS: of the tile of x that a program handles.

    docs/numerics.md, Scales, has the steps. A block with Inf or NaN gets codes 0 and the scale NaN.
    """
    TOGETHER: tl.constexpr = max(ALONG, GAIN)
    v = loaded(
        x_ptr, signs_ptr, n_rows, n_columns, AXIS, TOGETHER, TURN, INTERPRETED, ROWS, COLUMNS
    )
    rest = 0
    if STOCHASTIC or SCALES_DRAW:
        place = random.rows, random.groups, n_rows, n_columns // 8, random.groups_per_row
        key = key_of(random, DRAWS.IN_MEMORY)
        rest = _rest(place, key, stream, AXIS, DRAWS.HAS_GROUPS, INTERPRETED, ROWS, COLUMNS)
    n_lines, n_along = n_rows, n_columns
    if AXIS == 0:
        n_lines, n_along = n_columns, n_rows
    tensor_scale = tl.full([], 1.0, tl.float32)
    if TENSOR_MAX > 0:
        largest = tl.load(largest_ptr).to(tl.float32, bitcast=True)
        tensor_scale = tl.div_rn(largest, tl.full([], 6.0 * TENSOR_MAX, tl.float32))
        tensor_scale = tl.where(tensor_scale > 0.0, tensor_scale, 1.0)  # all zeros, or underflow
        is_first = (tl.program_id(0) == 0) & (tl.program_id(1) == 0)
        tl.store(tensor_scale_ptr, tensor_scale, mask=is_first)
    maxima = _maxima(v, ACROSS, ALONG)
    finite = maxima < INFINITE
    maxima = _finite_or_0(maxima).to(tl.float32, bitcast=True)
    scale, scaled = in_scales(
        v, maxima, tensor_scale, TENSOR_MAX, INFLATE, RULE, BIAS, MAX, ACROSS, ALONG, INTERPRETED
    )
    scaled = _saturated(scaled * PRESCALE)
    if STOCHASTIC:
        code = ~(stochastic(scaled * 0.5, rest, 1.0, INTERPRETED) >> 24) & 7
    else:
        code = nearest(scaled)
    code |= tl.where(v.to(tl.int32, bitcast=True) < 0, 8, 0)
    live = finite.to(tl.int32)
    code = tl.where(spread(live, ACROSS, ALONG) != 0, code, 0)
    if GAIN > 0:
        bits = integers_of(rest) if SCALES_DRAW else 0
        scale = of_unit_gain(
            v, scaled, scale, live, tensor_scale, bits, BIAS, MAX, ALONG, GAIN, SCALES_DRAW
        )
    low, high = tl.split(tl.reshape(code, (code.shape[0], code.shape[1] // 2, 2)))
    _store(codes_ptr, pack(low, high).to(tl.uint8), n_lines, n_along // 2, AXIS)
    nans = tl.sum(1 - live)
    tl.atomic_add(counts_ptr + 1, nans, mask=nans > 0)  # it is rarely above 0
    byte = _scale_byte(scale, finite, NAN)
    _store(scales_ptr, byte, n_lines // ACROSS, n_along // ALONG, AXIS)


def quantize(
    x: Tensor,
    quantizer: Quantizer,
    axis: int,
    noise: Noise | None = None,
    largest: Tensor | None = None,
    transform: Transform | None = None,
) -> QuantizedTensor:
    """Quantizes x in blocks along `axis` to E2M1 codes with E4M3, UE5M3 or E8M0 scales.

    x: BF16 [rows, columns], or float32 if there is a transform or scales are E8M0.
    transform: along `axis`, before x is quantized.
    noise: the source of random bits of a stochastic quantizer.
    largest: the maximum over the ranks that share the tensor scale; see `quantize_matrix`. None
        takes that of x.
    """
    x = x.contiguous()
    rows, columns = x.shape
    k, others = x.shape[axis], x.shape[1 - axis]
    across, along = quantizer.block
    codes = x.new_empty(others, k // 2, dtype=torch.uint8)
    scales = x.new_empty(others // across, k // along, dtype=torch.uint8)
    noise = noise or SILENCE
    in_memory = is_in_memory(noise.key.step)
    random = random_of(x, noise, in_memory, rows, columns, places=quantizer.draws)
    has_groups = noise.placement.groups is not None
    turn = turn_of(transform)
    cast = _cast_launch(rows, columns, quantizer, axis, in_memory, has_groups, turn, x.dtype)
    counts, bits = x.new_zeros(2 * COUNTS, dtype=torch.int32).split(COUNTS)
    tensor_scale = None
    if quantizer.tensor_max:
        tensor_scale = x.new_empty((), dtype=torch.float32)
        if largest is None:
            _find(x, quantizer, axis, transform, bits)
        else:
            bits = largest.float().contiguous().view(torch.int32)
    stream = signed(noise.stream)
    signs = None if transform is None else transform.signs
    out = codes, scales, counts, tensor_scale
    cast(x.device, x, signs, bits, *out, stream, *random, rows, columns)
    return QuantizedTensor(codes, scales, tensor_scale, quantizer, x.shape, axis, counts)


def find_largest(
    x: Tensor, quantizer: Quantizer, axis: int, transform: Transform | None = None
) -> Tensor:
    """The largest magnitude in x, float32 [], from which the tensor scale follows.

    Blocks with an Inf or a NaN do not count, so that they do not change the scale of the others.

    x: BF16 [rows, columns], or float32 if there is a transform.
    axis: the axis along which blocks lie.
    transform: a Hadamard transform along this axis. The magnitudes are those of its result.
    """
    bits = x.new_zeros((), dtype=torch.int32)
    _find(x.contiguous(), quantizer, axis, transform, bits)
    return bits.view(torch.float32)


def _find(
    x: Tensor, quantizer: Quantizer, axis: int, transform: Transform | None, bits: Tensor
) -> None:
    """Raises the first integer of `bits` to the bits of `find_largest`. x: contiguous."""
    rows, columns = x.shape
    find = _find_launch(rows, columns, quantizer, axis, turn_of(transform), x.dtype)
    find(x.device, x, None if transform is None else transform.signs, bits, rows, columns)


def _tiled(rows: int, columns: int, quantizer: Quantizer, axis: int, turn: Turn) -> Any:
    """(grid, constants) of both kernels, whose programs handle a tile of x [rows, columns] each.

    A tile has whole groups along the axis: of a transform, and of `unit_gain` elements.
    """
    across, along = quantizer.block
    height, width = TILE, TILE
    if quantizer.unit_gain or turn.GROUP > TILE:
        height, width = (32, WIDE) if axis else (WIDE, 32)
    constants: dict[str, Any] = dict(AXIS=axis, ACROSS=across, ALONG=along, TURN=turn)
    constants |= dict(INTERPRETED=INTERPRETED, ROWS=height, COLUMNS=width)
    return (tiles(rows, height), tiles(columns, width)), constants


@planned
def _find_launch(
    rows: int, columns: int, quantizer: Quantizer, axis: int, turn: Turn, dtype: torch.dtype
) -> Launch:
    """The launch of `top_kernel` for a matrix [rows, columns] of this dtype."""
    grid, constants = _tiled(rows, columns, quantizer, axis, turn)
    types = _SOURCES[dtype], torch.float32, torch.int32, rows, columns
    spills = turn.GROUP > TILE  # as in _cast_launch
    return Launch(top_kernel, grid, types, constants, num_warps=2 * WARPS if spills else WARPS)


@planned
def _cast_launch(
    rows: int,
    columns: int,
    quantizer: Quantizer,
    axis: int,
    in_memory: bool,
    has_groups: bool,
    turn: Turn,
    dtype: torch.dtype,
) -> Launch:
    """The launch of `cast_kernel` for a matrix [rows, columns] of this dtype.

    in_memory: whether the step is read from memory (`is_in_memory`). has_groups: whether the
    placement lists the columns' groups.
    """
    assert E2M1.max == 6
    bias, most, nan = scale_format(quantizer)
    grid, constants = _tiled(rows, columns, quantizer, axis, turn)
    constants |= dict(
        TENSOR_MAX=quantizer.tensor_max,
        INFLATE=quantizer.inflate,
        PRESCALE=quantizer.prescale,
        RULE=quantizer.rule,
        BIAS=bias,
        MAX=most,
        NAN=nan,
        GAIN=quantizer.unit_gain,
        STOCHASTIC=quantizer.stochastic,
        SCALES_DRAW=quantizer.scale_rounding == "stochastic",
        DRAWS=Draws(in_memory, has_groups),
    )
    written = torch.uint8, torch.uint8, torch.int32, torch.float32
    types = _SOURCES[dtype], torch.float32, torch.int32, *written, NUMBER, RANDOM, rows, columns
    # Registers would be too few for these with fewer warps.
    spills = quantizer.rule in COMPARED or quantizer.unit_gain > 0 or turn.GROUP > TILE
    warps = 2 * WARPS if spills else WARPS
    return Launch(cast_kernel, grid, types, constants, num_warps=warps)


def scale_format(quantizer: Quantizer) -> tuple[int, float, int]:
    """The exponent bias, the largest number and the byte of NaN of the format of block scales."""
    if quantizer.scale == "e8m0":
        return E8M0_BIAS, 2.0**127, E8M0_NAN
    scale = SCALE_FLOATS[quantizer.scale]
    assert scale.mantissa_bits == MANTISSA
    return scale.bias, scale.max, scale.nan
