"""The kernels of gradients on their way between data-parallel ranks: one makes messages, one sums
them, and one makes a message of the sums.

The bits are those of arithmetic/messages.py. A launch processes all segments of a piece. Each
program finds its segment in a table (`table`), by bisection.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_fp4.arithmetic.messages import FORMS, GradientForm, RankRounding
from megatron_fp4.arithmetic.philox import GROUP, signed
from megatron_fp4.arithmetic.segments import Segment
from megatron_fp4.kernels.encode import bf16_bits
from megatron_fp4.kernels.float_blocks import decoded, encoded
from megatron_fp4.kernels.launch import INTERPRETED, NUMBER, Launch, kernel, planned, tiles
from megatron_fp4.kernels.philox import random16, random16_of_groups
from megatron_fp4.recording import SEED_HIGH, SEED_LOW, STEP

_ROWS, _COLUMNS = 8, 128  # of a tile; a row is a block
_TILE = _ROWS * _COLUMNS
_FIELDS = tl.constexpr(9)  # of a segment in a table; see `Table`
_NOISE = STEP, SEED_LOW, SEED_HIGH
_FAR = tl.constexpr(1 << 30)  # more than the elements of a tile
# The name of an element in kernels/float_blocks.py.
_NAMES = {"e4m3": "fp8", "e5m2": "e5m2", "bf16": "bf16"}


@triton.jit
def _segment(segments, count, HALVINGS: tl.constexpr):
    """The address of the row of a table that has this program's tile."""
    tile, at = tl.program_id(0).to(tl.int64), 0
    for halving in tl.static_range(HALVINGS):
        further = at + (1 << (HALVINGS - 1 - halving))
        first = tl.load(segments + further * _FIELDS, mask=further < count, other=tile + 1)
        at = tl.where(first <= tile, further, at)
    return segments + at * _FIELDS


@triton.jit
def _elements(segment, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """(elements of the segment in this program's tile, int64 [ROWS, COLUMNS], which of them there
    are, the block of each row, int64 [ROWS, 1])."""
    tile = tl.program_id(0).to(tl.int64) - tl.load(segment)
    blocks = tile * ROWS + tl.arange(0, ROWS)[:, None]
    elements = blocks * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    return elements, elements < tl.load(segment + 2), blocks


@triton.jit
def _indices(segment, rank, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EACH: tl.constexpr):
    """The indices of every EACH-th element of this program's tile, for random bits: int64
    [ROWS, COLUMNS / EACH]."""
    first, columns = tl.load(segment + 5), tl.load(segment + 6)
    stride, within = tl.load(segment + 7), tl.load(segment + 8)
    tile = tl.program_id(0).to(tl.int64) - tl.load(segment)
    start = within + tile * (ROWS * COLUMNS)
    runs, left = start // columns, columns - start % columns
    at = tl.arange(0, ROWS)[:, None] * COLUMNS + EACH * tl.arange(0, COLUMNS // EACH)[None, :]
    # Elements behind the run that the tile begins in; 32-bit divisions suffice within a tile.
    behind = at - tl.minimum(left, _FAR).to(tl.int32)
    length = tl.minimum(columns, _FAR).to(tl.int32)
    further = tl.where(behind >= 0, 1 + behind // length, 0).to(tl.int64)
    in_run = start % columns + at - further * columns
    return (rank.to(tl.int64) << 48) + first + (runs + further) * stride + in_run


@triton.jit
def _random(
    segment, rank, step, stream, seed_low, seed_high,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, ALIGNED: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Random integers in [0, 65536) of this program's tile: int32 [ROWS, COLUMNS].

    ALIGNED: whether each eight elements from a multiple of eight on share a draw.
    """
    if ALIGNED:
        group = _indices(segment, rank, ROWS, COLUMNS, 8) >> 3
        return random16_of_groups(group, step, stream, seed_low, seed_high, INTERPRETED)
    index = _indices(segment, rank, ROWS, COLUMNS, 1)
    return random16(index, step, stream, seed_low, seed_high)


@triton.jit
def _write_message(
    segment, x, random, codes_ptr, scales_ptr,
    FORM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Writes codes and scales of this program's tile x, float32 [ROWS, COLUMNS]."""
    elements, there, blocks = _elements(segment, ROWS, COLUMNS)
    codes, byte = encoded(x, random, FORM, False, True)
    places = codes_ptr + tl.load(segment + 3) + elements
    if FORM == "bf16":
        tl.store(places, codes.to(tl.int16), there)
    else:
        tl.store(places, codes.to(tl.uint8), there)
        ends = blocks * COLUMNS < tl.load(segment + 2)
        tl.store(scales_ptr + tl.load(segment + 4) + blocks, byte.to(tl.uint8), ends)


@triton.jit
def _sums(
    segment, codes_ptr, scales_ptr, code_stride, scale_stride,
    FORM: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The sums of this program's tile, in the order of the ranks: float32 [ROWS, COLUMNS].

    Where the segment has no element they are 0, or NaN in a block of NaN.
    """
    elements, there, blocks = _elements(segment, ROWS, COLUMNS)
    codes = codes_ptr + tl.load(segment + 3) + elements
    scales = scales_ptr + tl.load(segment + 4) + blocks
    ends = blocks * COLUMNS < tl.load(segment + 2)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for rank in range(RANKS):
        byte = tl.zeros((ROWS, 1), tl.int32)
        if FORM != "bf16":
            byte = tl.load(scales, ends, 0).to(tl.int32)
        value = decoded(tl.load(codes, there, 0), byte, FORM)
        total = tl.where(rank == 0, value, total + value)
        codes += code_stride
        scales += scale_stride
    return total


@kernel(fp_fusion=False)
def encode_kernel(
    source_ptr, codes_ptr, scales_ptr, segments, count, rank, stream, step, seed_low, seed_high,
    FORM: tl.constexpr, FROM_BF16: tl.constexpr, HALVINGS: tl.constexpr, ALIGNED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Messages of the segments of a table.

    source_ptr: float32 or float16, or int16 of the bits of BF16 (FROM_BF16). codes_ptr,
    scales_ptr: to the same memory, of codes and of bytes. segments: int64 [count, 9]; see `Table`.
    rank: see `RankRounding`. FORM: see kernels/float_blocks.py.
    """
    segment = _segment(segments, count, HALVINGS)
    elements, there, _ = _elements(segment, ROWS, COLUMNS)
    x = tl.load(source_ptr + tl.load(segment + 1) + elements, there, 0)
    if FROM_BF16:
        x = decoded(x, tl.zeros((ROWS, 1), tl.int32), "bf16")
    else:
        x = x.to(tl.float32)
    random = _random(
        segment, rank, step, stream, seed_low, seed_high, ROWS, COLUMNS, ALIGNED, INTERPRETED
    )
    _write_message(segment, x, random, codes_ptr, scales_ptr, FORM, ROWS, COLUMNS)


@kernel(fp_fusion=False)
def sum_kernel(
    codes_ptr, scales_ptr, out_ptr, segments, count, code_stride, scale_stride,
    FORM: tl.constexpr, RANKS: tl.constexpr, TO_BF16: tl.constexpr, HALVINGS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Decodes the messages that RANKS ranks sent of the same segments, adds them up in the order of
    the ranks, and writes the sums.

    code_stride, scale_stride: the distance between the messages of two ranks, in codes and in
    bytes. out_ptr: the sums, float32, or int16 with the bits of BF16 (TO_BF16). The other arguments
    are those of `encode_kernel`.
    """
    segment = _segment(segments, count, HALVINGS)
    elements, there, _ = _elements(segment, ROWS, COLUMNS)
    total = _sums(
        segment, codes_ptr, scales_ptr, code_stride, scale_stride, FORM, RANKS, ROWS, COLUMNS
    )
    places = out_ptr + tl.load(segment + 1) + elements
    if TO_BF16:
        tl.store(places, bf16_bits(total).to(tl.int16), there)
    else:
        tl.store(places, total, there)


@kernel(fp_fusion=False)
def encode_sums_kernel(
    codes_ptr, scales_ptr, segments, count, code_stride, scale_stride,
    rank, stream, step, seed_low, seed_high,
    FORM: tl.constexpr, RANKS: tl.constexpr, HALVINGS: tl.constexpr, ALIGNED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Writes the message of what `sum_kernel` sums over the first of the messages that it sums.

    Each program writes where it alone has read, after it has read there. The arguments are those of
    the other kernels.
    """
    segment = _segment(segments, count, HALVINGS)
    total = _sums(
        segment, codes_ptr, scales_ptr, code_stride, scale_stride, FORM, RANKS, ROWS, COLUMNS
    )
    random = _random(
        segment, rank, step, stream, seed_low, seed_high, ROWS, COLUMNS, ALIGNED, INTERPRETED
    )
    _write_message(segment, total, random, codes_ptr, scales_ptr, FORM, ROWS, COLUMNS)


class Table(NamedTuple):
    """Where the segments of messages lie.

    segments: int64 [n, 9]: of each the first tile, the first element in the buffer of gradients,
    the number of elements, the first code in the messages (counted in codes), the first
    scale (counted in bytes), and first, columns and stride of its Place and its `within`. tiles:
    of all. is_aligned: whether each eight elements from a multiple of eight on share a draw.
    """

    segments: Tensor
    tiles: int
    is_aligned: bool

    @property
    def halvings(self) -> int:
        """The steps of a bisection."""
        return max(len(self.segments) - 1, 1).bit_length()


def table(
    shards: Sequence[Sequence[Segment]],
    form: GradientForm,
    starts: Sequence[int],
    device: torch.device,
) -> Table:
    """Makes the table that tells the kernels where each segment of some shards lies, in the buffer
    of gradients and in the shards' messages.

    shards: the segments of each. starts: where the message of each shard begins, in bytes.
    """
    rows: list[tuple[int, ...]] = []
    tile = 0
    size = form.dtype.itemsize
    for shard, start in zip(shards, starts, strict=True):
        code = start // size
        scale = start + size * sum(map(len, shard))
        for each in shard:
            place = each.place
            rows.append(
                (tile, each.start, len(each), code, scale)
                + (place.first, place.columns, place.stride, each.within)
            )
            tile += tiles(len(each), _TILE)
            code += len(each)
            scale += form.blocks(len(each))
    aligned = all(number % GROUP == 0 for row in rows for number in row[5:])
    return Table(torch.tensor(rows, dtype=torch.int64).reshape(-1, 9).to(device), tile, aligned)


def encode(
    of: Table, form: GradientForm, source: Tensor, messages: Tensor, rounding: RankRounding
) -> None:
    """Writes the messages of a table, as `arithmetic.messages.encoded` makes them.

    source: float32, BF16 or float16, one axis. messages: uint8, one axis.
    """
    if not of.tiles:
        return
    codes = messages.view(_codes(form))
    launch = _encode_launch(of.tiles, of.halvings, source.dtype, form, of.is_aligned)
    launch(
        source.device, _plain(source), codes, messages, of.segments, len(of.segments),
        rounding.rank, signed(rounding.stream), *rounding.key.signed_words,
    )  # fmt: skip


def write_sums(
    of: Table, form: GradientForm, messages: Tensor, ranks: int, stride: int, out: Tensor
) -> None:
    """Writes the sums of what ranks sent of the segments of a table; see `messages.summed`.

    messages: uint8, one axis: those of the ranks one after the other, `stride` bytes apart. out:
    float32 or BF16, one axis; what lies between the segments stays.
    """
    if not of.tiles:
        return
    codes = messages.view(_codes(form))
    launch = _sum_launch(of.tiles, of.halvings, out.dtype, form, ranks)
    launch(
        out.device, codes, messages, _plain(out), of.segments, len(of.segments),
        stride // form.dtype.itemsize, stride,
    )  # fmt: skip


def encode_sums(
    of: Table,
    form: GradientForm,
    messages: Tensor,
    ranks: int,
    stride: int,
    rounding: RankRounding,
) -> None:
    """Writes the message of the sums that `write_sums` writes, over the first rank's message.

    of: of a message that begins at 0.
    """
    if not of.tiles:
        return
    codes = messages.view(_codes(form))
    launch = _encode_sums_launch(of.tiles, of.halvings, form, ranks, of.is_aligned)
    launch(
        messages.device, codes, messages, of.segments, len(of.segments),
        stride // form.dtype.itemsize, stride,
        rounding.rank, signed(rounding.stream), *rounding.key.signed_words,
    )  # fmt: skip


def _plain(x: Tensor) -> Tensor:
    """x as a kernel takes it; see `_plain_dtype`."""
    return x.view(_plain_dtype(x.dtype))


def _plain_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype as which a kernel takes numbers in float32 or BF16: BF16 as the int16 of its bits,
    since Triton's interpreter converts BF16 wrongly."""
    return torch.int16 if dtype == torch.bfloat16 else dtype


def _codes(form: GradientForm) -> torch.dtype:
    """The dtype as which a kernel writes codes."""
    return torch.uint8 if form.dtype.itemsize == 1 else torch.int16


def _constants(form: GradientForm, halvings: int) -> dict[str, Any]:
    """The constants of all of these kernels."""
    if form.dtype.itemsize == 1 and form.block != _COLUMNS:
        raise ValueError(f"gradients are sent in blocks of {_COLUMNS}, not {form.block}")
    [element] = [name for name, each in FORMS.items() if each == form]
    return dict(FORM=_NAMES[element], HALVINGS=halvings, ROWS=_ROWS, COLUMNS=_COLUMNS)


@planned
def _encode_launch(
    programs: int, halvings: int, source: torch.dtype, form: GradientForm, aligned: bool
) -> Launch:
    types = (
        _plain_dtype(source),
        _codes(form),
        torch.uint8,
        torch.int64,
        NUMBER,
        NUMBER,
        NUMBER,
        *_NOISE,
    )
    constants = _constants(form, halvings)
    constants |= dict(FROM_BF16=source == torch.bfloat16, ALIGNED=aligned, INTERPRETED=INTERPRETED)
    return Launch(encode_kernel, (programs,), types, constants, num_warps=4)


@planned
def _sum_launch(
    programs: int, halvings: int, out: torch.dtype, form: GradientForm, ranks: int
) -> Launch:
    types = (_codes(form), torch.uint8, _plain_dtype(out), torch.int64, NUMBER, NUMBER, NUMBER)
    constants = _constants(form, halvings) | dict(RANKS=ranks, TO_BF16=out == torch.bfloat16)
    return Launch(sum_kernel, (programs,), types, constants, num_warps=4)


@planned
def _encode_sums_launch(
    programs: int, halvings: int, form: GradientForm, ranks: int, aligned: bool
) -> Launch:
    pointers = _codes(form), torch.uint8, torch.int64
    types = (*pointers, NUMBER, NUMBER, NUMBER, NUMBER, NUMBER, *_NOISE)
    constants = _constants(form, halvings)
    constants |= dict(RANKS=ranks, ALIGNED=aligned, INTERPRETED=INTERPRETED)
    return Launch(encode_sums_kernel, (programs,), types, constants, num_warps=4)
