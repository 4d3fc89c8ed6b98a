"""Converts E2M1 codes with block scales to FP8 carriers, which FP8 tensor cores multiply.

Scales are in E8M0, or E4M3 and UE5M3 scales that rule mse-fp8 chose: 2^s, or 1.25 or 1.5 times
that. An element c 2^s of a row is converted to c 2^(s - f). The row exponent f brings the row's
largest scale to the top of FP8's window, and 2^f multiplies the row of the product. The conversion
is exact while s - f lies in the window. Elements below it are rounded, and counted
(docs/numerics.md, Carriers).

f is known only when the whole row has been read. The kernel that quantizes an operand can therefore
write its carriers with a guess, one row exponent for all rows, from a sample of the matrix. Rows
that are exact under the guess have the same product as under their own f. The other rows are
converted again here, which is called correction.

Exponents are stored as E8M0 bytes are, with a bias of 127.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from megatron_fp4.arithmetic.formats import SCALE_FLOATS
from megatron_fp4.arithmetic.quantized_tensor import QuantizedTensor
from megatron_fp4.kernels.float_scales import scale_of
from megatron_fp4.kernels.fp8 import FORMATS, LOWEST, looked_up, table
from megatron_fp4.kernels.launch import INTERPRETED, Launch, address, kernel, planned, tiles
from megatron_fp4.operands import Carriers

# What a program converts, and its warps: what was fastest on an H200.
ROWS, BLOCKS, WARPS = 1, 256, 2
# The same where rows are corrected. Such a program loops over all blocks of its rows.
CORRECTED_ROWS, CORRECTED_BLOCKS = 8, 8
HELD = 2048  # scales in registers of such a program: with more, fewer programs run at once
# The window of E4M3 for elements times 1, 1.25 or 1.5. The largest, 6 * 1.5 * 2^5, is below 448.
# The smallest that needs four bits, 1.5 * 1.25 * 2^-6, ends at E4M3's last bit, 2^-9.
WINDOW_OF_FLOATS = -6, 5


class Converted(NamedTuple):
    """One operand of `carry_kernel`.

    codes: words of eight codes [rows, K / 8].
    scales: bytes [rows, blocks].
    elements: words of four FP8 elements [rows, K / 4].
    counts: see `operands.Carriers`.
    rows, blocks: the number of rows, and of blocks in a row.
    """

    codes: Any
    scales: Any
    elements: Any
    counts: Any
    rows: Any
    blocks: Any


class CarrierForm(NamedTuple):
    """How an operand is converted: constants of the compiled kernel.

    CORRECTS: whether carriers have been written with a guess, and only wrong rows are converted.
    ROWS, BLOCKS: the rows and blocks that a program converts at a time.
    MANTISSA, BIAS, NAN: mantissa bits, exponent bias and the byte of NaN of the FP8 format.
    BOTTOM, TOP: the lowest and the highest s - f of its window, in which all elements are exact.
    LOWEST: the lowest s - f for which `fp8.quick_table` is right.
    SCALE_BIAS, SCALE_NAN: the exponent bias and the byte of NaN of scales with three mantissa bits;
        a bias of 0 stands for E8M0.
    WORDS: words of codes in a block.
    ALL_BLOCKS: blocks in a row, rounded up to a power of two.
    """

    CORRECTS: bool
    ROWS: int
    BLOCKS: int
    MANTISSA: int
    BIAS: int
    NAN: int
    BOTTOM: int
    TOP: int
    LOWEST: int
    SCALE_BIAS: int
    SCALE_NAN: int
    WORDS: int
    ALL_BLOCKS: int


@triton.jit
def _bits(scales, FORM: tl.constexpr):
    """Scales as the bits of float32 numbers, of which the exponent is 255 for NaN, and 0 for a byte
    0. scales: bytes as int32."""
    if FORM.SCALE_BIAS == 0:
        return scales << 23
    bits = scale_of(scales, FORM.SCALE_BIAS).to(tl.int32, bitcast=True)
    return tl.where(scales == FORM.SCALE_NAN, 255 << 23, bits)


@triton.jit
def _row_exponent(scales, TOP: tl.constexpr):
    """Row exponents, int32 [rows], that bring each row's largest scale to the top of FP8's window.

    scales: E8M0 bytes [rows, blocks] as int32, of which NaN (255) does not count.
    TOP: the largest difference of scale and exponent in the window.

    The result is at least 1, so that the row factor 2^(exponent - 127) is a normal number.
    """
    return tl.maximum(tl.max(tl.where(scales == 255, 0, scales), 1) - TOP, 1)


@triton.jit
def _fits(scales, exponent, LOWEST: tl.constexpr, TOP: tl.constexpr):
    """Which blocks have right carriers under a row exponent: those with scale - exponent in
    [LOWEST, TOP]. Blocks whose scale is NaN (255) have them under none."""
    return (scales >= exponent + LOWEST) & (scales <= exponent + TOP) & (scales < 255)


@triton.jit
def _of_scale_0(scales, there):
    """Which blocks have the lowest scale byte, 0, as blocks of zeros have too.

    there: whether the block exists.
    """
    return there & (scales == 0)


@triton.jit
def _final_exponent(wanted, exponent, guess):
    """The row exponents after correction: a row's own where its carriers are converted again
    (`wanted`), else the one that was guessed for all rows."""
    return tl.where(wanted, exponent, guess)


@triton.jit
def _nonzero(words):
    """The number of codes, of the eight in each word, that are not 0 or -0."""
    nonzero = (words | (words >> 1) | (words >> 2)) & 0x11111111
    # The highest digit of the product is the sum of the digits.
    return ((nonzero * 0x11111111) >> 28) & 15


@triton.jit
def _convert(x, rows, wanted, exponent, block0, FORM: tl.constexpr, INTERPRETED: tl.constexpr):
    """Converts FORM.BLOCKS blocks, from block0 on, of the rows that are `wanted`.

    x: a Converted.
    rows: int32 [FORM.ROWS], row indices.
    wanted, exponent: for each row, whether it is converted, and its row exponent.

    Adds the number of rounded elements and of NaN blocks to the counts.
    """
    ROWS: tl.constexpr = FORM.ROWS
    BLOCKS: tl.constexpr = FORM.BLOCKS
    WORDS: tl.constexpr = FORM.WORDS
    at_rows = rows[:, None].to(tl.int64)
    blocks = block0 + tl.arange(0, BLOCKS)
    here = wanted[:, None] & (blocks < x.blocks)[None, :]
    byte = tl.load(x.scales + at_rows * x.blocks + blocks[None, :], mask=here, other=0)
    bits = _bits(byte.to(tl.int32), FORM)
    byte = bits >> 23
    k = byte - exponent[:, None]
    power = ((tl.maximum(k, -64) + 127) << 23) | (bits & 0x7FFFFF)
    power = power.to(tl.float32, bitcast=True)
    nan = FORM.NAN * 0x01010101
    low = tl.where(byte == 255, nan, table(power, False, FORM.MANTISSA, FORM.BIAS))
    high = tl.where(byte == 255, nan, table(power, True, FORM.MANTISSA, FORM.BIAS))
    at = block0 * WORDS + tl.arange(0, BLOCKS * WORDS)
    here = wanted[:, None] & (at < x.blocks * WORDS)[None, :]
    words = tl.load(x.codes + at_rows * (x.blocks * WORDS) + at[None, :], mask=here, other=0)
    words = tl.reshape(words, (ROWS, BLOCKS, WORDS))
    first, second = looked_up(
        words,
        tl.broadcast_to(low[:, :, None], (ROWS, BLOCKS, WORDS)),
        tl.broadcast_to(high[:, :, None], (ROWS, BLOCKS, WORDS)),
        INTERPRETED,
    )
    out = tl.reshape(tl.join(first, second), (ROWS, BLOCKS * WORDS * 2))
    at = block0 * (WORDS * 2) + tl.arange(0, BLOCKS * WORDS * 2)
    here = wanted[:, None] & (at < x.blocks * (WORDS * 2))[None, :]
    tl.store(x.elements + at_rows * (x.blocks * (WORDS * 2)) + at[None, :], out, mask=here)
    rounded = tl.where((k < FORM.BOTTOM)[:, :, None], _nonzero(words), 0)
    total = tl.sum(tl.reshape(rounded, (ROWS * BLOCKS * WORDS,)), 0)
    nans = tl.sum(tl.reshape((byte == 255).to(tl.int32), (ROWS * BLOCKS,)), 0)
    tl.atomic_add(x.counts, total, mask=total > 0)  # total is rarely above 0
    tl.atomic_add(x.counts + 1, nans, mask=nans > 0)


@triton.jit
def _holds_codes(x, rows, block0, FORM: tl.constexpr):
    """Whether a row has a block of scale 0 that is not all zeros, as int32 [FORM.ROWS], 1 or 0.

    It looks at FORM.BLOCKS blocks of each row, from block0 on.
    """
    ROWS: tl.constexpr = FORM.ROWS
    BLOCKS: tl.constexpr = FORM.BLOCKS
    WORDS: tl.constexpr = FORM.WORDS
    at_rows = rows[:, None].to(tl.int64)
    blocks = block0 + tl.arange(0, BLOCKS)
    here = (rows < x.rows)[:, None] & (blocks < x.blocks)[None, :]
    byte = tl.load(x.scales + at_rows * x.blocks + blocks[None, :], mask=here, other=1)
    lowest = tl.broadcast_to((byte == 0)[:, :, None], (ROWS, BLOCKS, WORDS))
    at = block0 * WORDS + tl.arange(0, BLOCKS * WORDS)
    places = x.codes + at_rows * (x.blocks * WORDS) + at[None, :]
    words = tl.load(places, mask=tl.reshape(lowest, (ROWS, BLOCKS * WORDS)), other=0)
    return tl.max(((words & 0x77777777) != 0).to(tl.int32), 1)


@triton.jit
def _programs(x, FORM: tl.constexpr):
    """The number of programs for one operand. When rows are corrected, each program takes whole
    rows."""
    tiles = tl.cdiv(x.rows, FORM.ROWS)
    return tiles if FORM.CORRECTS else tiles * tl.cdiv(x.blocks, FORM.BLOCKS)


@triton.jit
def _operand(
    x,
    program,
    FORM: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Executes one program of the conversion of an operand; see `carry_kernel`.

    x: a Converted. program: its number among the programs of this operand.
    """
    tile = 0
    if not FORM.CORRECTS:
        tiles = tl.cdiv(x.blocks, FORM.BLOCKS)
        tile = program % tiles
        program = program // tiles
    rows = program * FORM.ROWS + tl.arange(0, FORM.ROWS)
    at_rows = rows[:, None].to(tl.int64)
    every = tl.arange(0, FORM.ALL_BLOCKS)
    there = (rows < x.rows)[:, None] & (every < x.blocks)[None, :]
    scales = tl.load(x.scales + at_rows * x.blocks + every[None, :], mask=there, other=0)
    scales = _bits(scales.to(tl.int32), FORM) >> 23
    exponent = _row_exponent(scales, FORM.TOP)
    if FORM.CORRECTS:
        guess = tl.load(x.counts + 2)
        fits = _fits(scales, guess, FORM.LOWEST, FORM.TOP)
        lowest = _of_scale_0(scales, there)
        wrong = tl.max((there & ~fits & ~lowest).to(tl.int32), 1)
        if tl.max(tl.max(lowest.to(tl.int32), 1), 0) > 0:  # blocks of zeros fit any exponent
            for block0 in range(0, FORM.ALL_BLOCKS, FORM.BLOCKS):
                wrong |= _holds_codes(x, rows, block0, FORM)
        wanted = wrong > 0
        exponent = _final_exponent(wanted, exponent, guess)
        if tl.max(wrong, 0) > 0:
            for block0 in range(0, FORM.ALL_BLOCKS, FORM.BLOCKS):
                _convert(x, rows, wanted, exponent, block0, FORM, INTERPRETED)
    else:
        block0 = tile * FORM.BLOCKS
        _convert(x, rows, rows < x.rows, exponent, block0, FORM, INTERPRETED)
    factors = (x.counts + 4).to(tl.pointer_type(tl.float32), bitcast=True)
    tl.store(factors + rows, (exponent << 23).to(tl.float32, bitcast=True), mask=rows < x.rows)


@kernel(fp_fusion=True)
def carry_kernel(
    a,
    b,
    A: tl.constexpr,
    B: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Converts one operand of a product to FP8, or both in one launch.

    a, b: a Converted. A, B: a CarrierForm; B is None if there is one operand. Writes the carriers
        and the row factors, and adds to the counts.

    If an operand is corrected, its carriers have been written under the row exponent in its counts.
    A row is converted again if one of its blocks that is not all zeros is NaN or has a scale that
    is not in [LOWEST, TOP] relative to this exponent.
    """
    program = tl.program_id(0)
    first = _programs(a, A)
    if program < first:
        _operand(a, program, A, INTERPRETED)
    elif B is not None:
        _operand(b, program - first, B, INTERPRETED)


def carried(
    operands: Sequence[tuple[QuantizedTensor, torch.dtype, Carriers | None]],
) -> list[Carriers]:
    """Converts one operand, or both operands of a product, to FP8 carriers; returns those of each
    operand, in their order.

    operands: for each, the codes [rows, K / 2] with scales [rows, K / 32] or [rows, K / 16], the
        FP8 dtype (E4M3 unless scales are in E8M0), and the maker's carriers, or None.

    Carriers that the maker wrote are corrected in place, which may be done once: rows that do not
    fit the window of the guessed row exponent are converted again. A row that is kept may differ
    from the result of a conversion without a guess by a power of two, which its row factor undoes:
    their product is the same.
    """
    given: tuple[Any, ...] = ()
    kinds: tuple[Kind, ...] = ()
    made: list[Carriers] = []
    for operand, element, carriers in operands:
        (rows, blocks), block = operand.scales.shape, operand.quantizer.block[1]
        scale = operand.quantizer.scale
        kinds += ((rows, blocks, block, element, carriers is not None, scale),)
        if carriers is None:
            carriers = _room(operand, element)
        given += *carriers.addresses, rows, blocks
        made += (carriers,)
    if not kinds[1:]:
        given += _NOTHING
    _launch(*kinds)(made[0].values.device, *given)
    return made


_NOTHING = None, None, None, None, 0, 0


def _room(operand: QuantizedTensor, element: torch.dtype) -> Carriers:
    """New carriers of an operand, which are not written yet; the counts are 0."""
    codes, scales = operand.codes, operand.scales
    rows, blocks = scales.shape
    values = codes.new_empty(rows, blocks * operand.quantizer.block[1])
    counts = codes.new_zeros(4 + rows, dtype=torch.int32)
    addresses = address(codes), address(scales), address(values), address(counts)
    return Carriers(values, element, counts, addresses)


# An operand: its rows, blocks in a row, block size, FP8 dtype, whether it is corrected, and the
# format of its scales. A plain tuple, since a call makes one for each operand.
Kind = tuple[int, int, int, torch.dtype, bool, str]


@planned
def _launch(*kinds: Kind) -> Launch:
    """The launch of `carry_kernel` for one operand or two."""
    forms = [_form(kind) for kind in kinds]
    programs = [
        tiles(rows, form.ROWS) * (1 if form.CORRECTS else tiles(blocks, form.BLOCKS))
        for (rows, blocks, *_), form in zip(kinds, forms, strict=True)
    ]
    pointers = torch.int32, torch.uint8, torch.int32, torch.int32
    types = [Converted(*pointers, rows, blocks) for rows, blocks, *_ in kinds]
    if len(kinds) == 1:
        types.append(Converted(*pointers, 0, 0))
    second = forms[1] if len(forms) > 1 else None
    constants = dict(A=forms[0], B=second, INTERPRETED=INTERPRETED)
    return Launch(carry_kernel, (sum(programs),), types, constants, num_warps=WARPS)


def _form(kind: Kind) -> CarrierForm:
    """The CarrierForm of an operand. Tile sizes are those that were fastest on an H200."""
    _, blocks, block, element, corrects, scale = kind
    every = 1 << (blocks - 1).bit_length()
    rows = max(1, min(CORRECTED_ROWS, HELD // every))
    tile = (rows, CORRECTED_BLOCKS) if corrects else (ROWS, min(BLOCKS, every))
    mantissa, bias, nan, bottom, top = FORMATS[element]
    scale_bias = scale_nan = 0
    if scale != "e8m0":
        assert element == torch.float8_e4m3fn and not corrects
        scale_bias, scale_nan = SCALE_FLOATS[scale].bias, SCALE_FLOATS[scale].nan
        bottom, top = WINDOW_OF_FLOATS
    limits = bottom, top, LOWEST[mantissa], scale_bias, scale_nan
    return CarrierForm(corrects, *tile, mantissa, bias, nan, *limits, block // 8, every)
