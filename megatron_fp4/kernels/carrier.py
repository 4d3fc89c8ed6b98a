"""MXFP4 codes as FP8 elements with a power of two for each row: what FP8 tensor cores multiply.

An element c 2^s of a row is carried as c 2^(s - f), with f such that the row's largest scale comes
to the top of FP8's range; 2^f multiplies the product's rows. That is exact while s - f lies in the
element's window; elements below it are rounded, and counted (docs/numerics.md, Carriers).

f is known when all of a row has been read. An operand that is multiplied as it is made is carried
by the kernel that makes it, under one f for all rows that a sample suggests: where all of a row is
exact under it the product is the same, and the other rows are mended here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_fp4.arithmetic.quantizer import QuantizedTensor
from megatron_fp4.kernels.fp8 import FORMATS, LOWEST, looked_up, table
from megatron_fp4.kernels.launch import Launch, captured, kernel, planned, stream_of, tiles
from megatron_fp4.operands import Carriers, Decoded

ROWS, BLOCKS, WARPS = 1, 256, 2  # of a program, by what was fastest on an H200
MENDED_ROWS, MENDED_BLOCKS = 8, 16  # where rows are mended a program goes over all blocks
HELD = 2048  # scales that such a program holds: more would leave registers for few programs
_WORDS = dict.fromkeys(
    ("a_codes_ptr", "a_out_ptr", "b_codes_ptr", "b_out_ptr"), torch.int32
)  # what the kernel reads and writes in words of four bytes


@triton.jit
def _row_fold(scales, TOP: tl.constexpr):
    """Folds [rows] that bring each row's largest scale to the top of FP8's window. scales: E8M0
    bytes [rows, blocks] as int32, of which NaN (255) does not count. TOP: the largest scale - fold
    of the window. At least 1: 2^(fold - 127) is then a normal number, which every unit multiplies
    alike."""
    return tl.maximum(tl.max(tl.where(scales == 255, 0, scales), 1) - TOP, 1)


@triton.jit
def _fits(scales, fold, LOWEST: tl.constexpr, TOP: tl.constexpr):
    """Which blocks have right carriers under a fold, those of scale - fold in [LOWEST, TOP]. A
    scale of NaN (255) has them under none."""
    return (scales >= fold + LOWEST) & (scales <= fold + TOP) & (scales < 255)


@triton.jit
def _of_scale_0(scales, there):
    """Which of the blocks that are `there` have the lowest scale. A block of zeros has it too."""
    return there & (scales == 0)


@triton.jit
def _final_fold(wanted, fold, likely):
    """The folds of rows: a row's own where its carriers are `wanted` anew, else `likely`, which was
    guessed for all rows."""
    return tl.where(wanted, fold, likely)


@triton.jit
def _nonzero(words):
    """How many of each word's eight codes are not zero; -0 is zero."""
    nonzero = (words | (words >> 1) | (words >> 2)) & 0x11111111
    return ((nonzero * 0x11111111) >> 28) & 15  # the sum of the digits


@triton.jit
def _carry(
    codes_ptr,
    scales_ptr,
    out_ptr,
    tally_ptr,
    rows,
    wanted,
    fold,
    block0,
    n_blocks,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    NAN: tl.constexpr,
    BOTTOM: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """BLOCKS blocks of those rows that are wanted, and what is counted of them."""
    ROWS: tl.constexpr = rows.shape[0]
    at_rows = rows[:, None].to(tl.int64)
    blocks = block0 + tl.arange(0, BLOCKS)
    here = wanted[:, None] & (blocks < n_blocks)[None, :]
    byte = tl.load(scales_ptr + at_rows * n_blocks + blocks[None, :], mask=here, other=0)
    byte = byte.to(tl.int32)
    k = byte - fold[:, None]
    power = ((tl.maximum(k, -64) + 127) << 23).to(tl.float32, bitcast=True)
    low = tl.where(byte == 255, NAN * 0x01010101, table(power, False, MANTISSA, BIAS))
    high = tl.where(byte == 255, NAN * 0x01010101, table(power, True, MANTISSA, BIAS))
    at = block0 * 4 + tl.arange(0, BLOCKS * 4)
    here = wanted[:, None] & (at < n_blocks * 4)[None, :]
    words = tl.load(codes_ptr + at_rows * (n_blocks * 4) + at[None, :], mask=here, other=0)
    words = tl.reshape(words, (ROWS, BLOCKS, 4))
    first, second = looked_up(
        words,
        tl.broadcast_to(low[:, :, None], (ROWS, BLOCKS, 4)),
        tl.broadcast_to(high[:, :, None], (ROWS, BLOCKS, 4)),
        INTERPRETED,
    )
    out = tl.reshape(tl.join(first, second), (ROWS, BLOCKS * 8))
    at = block0 * 8 + tl.arange(0, BLOCKS * 8)
    here = wanted[:, None] & (at < n_blocks * 8)[None, :]
    tl.store(out_ptr + at_rows * (n_blocks * 8) + at[None, :], out, mask=here)
    rounded = tl.where((k < BOTTOM)[:, :, None], _nonzero(words), 0)
    total = tl.sum(tl.reshape(rounded, (ROWS * BLOCKS * 4,)), 0)
    nans = tl.sum(tl.reshape((byte == 255).to(tl.int32), (ROWS * BLOCKS,)), 0)
    tl.atomic_add(tally_ptr, total, mask=total > 0)  # next to never
    tl.atomic_add(tally_ptr + 1, nans, mask=nans > 0)


@triton.jit
def _holds_codes(codes_ptr, scales_ptr, rows, block0, n_rows, n_blocks, BLOCKS: tl.constexpr):
    """In which rows one of BLOCKS blocks of scale 0 is not all zeros."""
    ROWS: tl.constexpr = rows.shape[0]
    at_rows = rows[:, None].to(tl.int64)
    blocks = block0 + tl.arange(0, BLOCKS)
    here = (rows < n_rows)[:, None] & (blocks < n_blocks)[None, :]
    byte = tl.load(scales_ptr + at_rows * n_blocks + blocks[None, :], mask=here, other=1)
    lowest = tl.broadcast_to((byte == 0)[:, :, None], (ROWS, BLOCKS, 4))
    at = block0 * 4 + tl.arange(0, BLOCKS * 4)
    places = codes_ptr + at_rows * (n_blocks * 4) + at[None, :]
    words = tl.load(places, mask=tl.reshape(lowest, (ROWS, BLOCKS * 4)), other=0)
    return tl.max(((words & 0x77777777) != 0).to(tl.int32), 1)


@triton.jit
def _programs(n_rows, n_blocks, FORM: tl.constexpr):
    """How many programs one operand takes: each all of its rows' blocks where it mends them."""
    MENDS: tl.constexpr = FORM[0]
    ROWS: tl.constexpr = FORM[1]
    BLOCKS: tl.constexpr = FORM[2]
    tiles = tl.cdiv(n_rows, ROWS)
    return tiles if MENDS else tiles * tl.cdiv(n_blocks, BLOCKS)


@triton.jit
def _operand(
    codes_ptr,
    scales_ptr,
    out_ptr,
    fold_ptr,
    tally_ptr,
    n_rows,
    n_blocks,
    program,
    FORM: tl.constexpr,
    INTERPRETED: tl.constexpr,
    ALL_BLOCKS: tl.constexpr,
):
    """One program's part of an operand; see `carry_kernel`."""
    MENDS: tl.constexpr = FORM[0]
    ROWS: tl.constexpr = FORM[1]
    BLOCKS: tl.constexpr = FORM[2]
    MANTISSA: tl.constexpr = FORM[3]
    BIAS: tl.constexpr = FORM[4]
    NAN: tl.constexpr = FORM[5]
    BOTTOM: tl.constexpr = FORM[6]
    TOP: tl.constexpr = FORM[7]
    LOWEST: tl.constexpr = FORM[8]
    across = 0
    if not MENDS:
        tiles = tl.cdiv(n_blocks, BLOCKS)
        across = program % tiles
        program = program // tiles
    rows = program * ROWS + tl.arange(0, ROWS)
    at_rows = rows[:, None].to(tl.int64)
    every = tl.arange(0, ALL_BLOCKS)
    there = (rows < n_rows)[:, None] & (every < n_blocks)[None, :]
    scales = tl.load(scales_ptr + at_rows * n_blocks + every[None, :], mask=there, other=0)
    scales = scales.to(tl.int32)
    fold = _row_fold(scales, TOP)
    if MENDS:
        likely = tl.load(tally_ptr + 2)
        fits = _fits(scales, likely, LOWEST, TOP)
        lowest = _of_scale_0(scales, there)
        wrong = tl.max((there & ~fits & ~lowest).to(tl.int32), 1)
        if tl.max(tl.max(lowest.to(tl.int32), 1), 0) > 0:  # zeros are zeros under any fold
            for block0 in range(0, ALL_BLOCKS, BLOCKS):
                wrong |= _holds_codes(codes_ptr, scales_ptr, rows, block0, n_rows, n_blocks, BLOCKS)
        wanted = wrong > 0
        fold = _final_fold(wanted, fold, likely)
        if tl.max(wrong, 0) > 0:
            for block0 in range(0, ALL_BLOCKS, BLOCKS):
                _carry(
                    codes_ptr, scales_ptr, out_ptr, tally_ptr, rows, wanted, fold, block0, n_blocks,
                    MANTISSA, BIAS, NAN, BOTTOM, INTERPRETED, BLOCKS,
                )  # fmt: skip
    else:
        _carry(
            codes_ptr, scales_ptr, out_ptr, tally_ptr, rows, rows < n_rows, fold,
            across * BLOCKS, n_blocks, MANTISSA, BIAS, NAN, BOTTOM, INTERPRETED, BLOCKS,
        )  # fmt: skip
    tl.store(fold_ptr + rows, (fold << 23).to(tl.float32, bitcast=True), mask=rows < n_rows)


@kernel(fp_fusion=True)
def carry_kernel(
    a_codes_ptr,
    a_scales_ptr,
    a_out_ptr,
    a_fold_ptr,
    a_tally_ptr,
    a_rows,
    b_codes_ptr,
    b_scales_ptr,
    b_out_ptr,
    b_fold_ptr,
    b_tally_ptr,
    b_rows,
    n_blocks,
    A: tl.constexpr,
    B: tl.constexpr,
    INTERPRETED: tl.constexpr,
    ALL_BLOCKS: tl.constexpr,
):
    """Both operands of a product, one after the other, or one (B: None): codes [n_rows,
    4 * n_blocks] words of eight, scales [n_rows, n_blocks] -> out [n_rows, 8 * n_blocks] words of
    four, fold [n_rows]. How many elements were rounded, and how many blocks are NaN, is added to
    the tally. A, B: a `_form`. One that mends: out is there under the fold that stands in the
    tally's third place, and a row is written anew where a block that is not all zeros is NaN, or
    has k below LOWEST or above TOP."""
    program = tl.program_id(0)
    first = _programs(a_rows, n_blocks, A)
    if program < first:
        _operand(
            a_codes_ptr, a_scales_ptr, a_out_ptr, a_fold_ptr, a_tally_ptr, a_rows, n_blocks,
            program, A, INTERPRETED, ALL_BLOCKS,
        )  # fmt: skip
    elif B is not None:
        _operand(
            b_codes_ptr, b_scales_ptr, b_out_ptr, b_fold_ptr, b_tally_ptr, b_rows, n_blocks,
            program - first, B, INTERPRETED, ALL_BLOCKS,
        )  # fmt: skip


def carried(
    operands: Sequence[tuple[QuantizedTensor, torch.dtype, Carriers | None]],
) -> list[Decoded]:
    """One MXFP4 operand, or both of a product, in FP8: values [rows, K], outer float32 [rows, 1].

    operands: codes with their scales, the FP8 dtype wanted, and the carriers that their maker wrote
    too, if it did. Those are corrected in place, which may be done once: rows that do not fit into
    the window of the exponent that was guessed for all rows are written anew. Values and row factor
    may then have exchanged a power of two; their product is the same.
    """
    given: list[Tensor | int | None] = []
    kinds: list[tuple[int, torch.dtype, bool]] = []
    made: list[Decoded] = []
    for operand, element, carriers in operands:
        codes, scales = operand.codes, operand.scales
        rows, blocks = scales.shape
        if carriers is not None:
            out, element, tally = carriers
        else:
            out, tally = codes.new_empty(rows, 32 * blocks), tally_for(codes)
        fold = codes.new_empty(rows, 1, dtype=torch.float32)
        given += codes, scales, out, fold, tally, rows
        kinds.append((rows, element, carriers is not None))
        made.append(Decoded(out.view(element), fold, tally))
    if len(made) == 1:
        given += None, None, None, None, None, 0
    given.append(blocks)
    _launch(blocks, *kinds)(given)
    return made


@planned
def _launch(blocks: int, *kinds: tuple[int, torch.dtype, bool]) -> Launch:
    every = 1 << (blocks - 1).bit_length()
    forms = [_form(every, element, mends) for _, element, mends in kinds]
    constants = dict(
        A=forms[0],
        B=forms[1] if len(forms) > 1 else None,
        INTERPRETED=triton.knobs.runtime.interpret,
        ALL_BLOCKS=every,
    )
    programs = [
        tiles(rows, form[1]) * (1 if mends else tiles(blocks, form[2]))
        for (rows, _, mends), form in zip(kinds, forms, strict=True)
    ]
    return Launch(carry_kernel, (sum(programs),), constants, _WORDS, num_warps=WARPS)


def _form(every: int, element: torch.dtype, mends: bool) -> tuple[int, ...]:
    """MENDS, ROWS, BLOCKS, MANTISSA, BIAS, NAN, BOTTOM, TOP, LOWEST of an operand."""
    rows = max(1, min(MENDED_ROWS, HELD // every))
    tile = (rows, MENDED_BLOCKS) if mends else (ROWS, min(BLOCKS, every))
    return int(mends), *tile, *FORMATS[element], LOWEST[FORMATS[element][0]]


@kernel(fp_fusion=True)
def elements_kernel(codes_ptr, out_ptr, n, INTERPRETED: tl.constexpr, TILE: tl.constexpr):
    """n words of eight codes -> words of four E4M3."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    words = tl.load(codes_ptr + at, mask=at < n, other=0)
    low, high = tl.full((TILE,), 0x3C383000, tl.int32), tl.full((TILE,), 0x4C484440, tl.int32)
    first, second = looked_up(words, low, high, INTERPRETED)
    pairs = tl.program_id(0).to(tl.int64) * (2 * TILE) + tl.arange(0, 2 * TILE)
    out = tl.reshape(tl.join(first, second), (2 * TILE,))
    tl.store(out_ptr + pairs, out, mask=pairs < 2 * n)


def elements(codes: Tensor) -> Tensor:
    """E4M3 [rows, K] of E2M1 codes [rows, K / 2], two a byte and K a multiple of 8."""
    rows, half = codes.shape
    out = codes.new_empty(rows, 2 * half)
    words = codes.numel() // 4
    _elements(words)([codes, out, words])
    return out.view(torch.float8_e4m3fn)


@planned
def _elements(words: int) -> Launch:
    constants = dict(INTERPRETED=triton.knobs.runtime.interpret, TILE=1024)
    seen_as = {"codes_ptr": torch.int32, "out_ptr": torch.int32}
    return Launch(elements_kernel, (tiles(words, 1024),), constants, seen_as)


_ZEROS: dict[tuple[int | None, int], list[Tensor]] = {}  # by GPU and stream


def tally_for(x: Tensor) -> Tensor:
    """int32 [2] of zeros beside x, to count on the current stream how many elements were rounded
    and how many blocks are NaN. Behind them is room for the guess of `Carriers`."""
    if captured(x):  # each run of the graph counts from zero
        return torch.zeros(4, dtype=torch.int32, device=x.device)[:2]
    place = x.device.index, stream_of(x)
    left = _ZEROS.get(place)
    if not left:  # zeros are made many at a time
        left = _ZEROS[place] = _zeros(x.device)
    return left.pop()


def _zeros(device: torch.device) -> list[Tensor]:
    """Sixteen bytes apart, as a kernel is compiled to find them."""
    zeros = torch.zeros(1024, 4, dtype=torch.int32, device=device)
    return list(zeros[:, :2].unbind())
