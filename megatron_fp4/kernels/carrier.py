"""MXFP4 codes as FP8 elements with a power of two for each row: what FP8 tensor cores multiply.

An element c 2^s of a row is carried as c 2^(s - f), with f such that the row's largest scale comes
to the top of FP8's range; 2^f multiplies the product's rows. That is exact while s - f lies in the
element's window; elements below it are rounded, and counted (docs/numerics.md, Carriers).
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_fp4.kernels.launch import launch, on, stream_of, tiles

# Mantissa bits, bias, the code of NaN, and the window of k in which every code times 2^k is exact.
FORMATS = {
    torch.float8_e4m3fn: (3, 7, 0x7F, -8, 6),
    torch.float8_e5m2: (2, 15, 0x7F, -15, 13),
}
ROWS, BLOCKS, WARPS = 1, 256, 2  # of a program, by what was fastest on an H200


@triton.jit
def _table(power, SECOND: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """FP8 bytes, in one word, of the first or the last four magnitudes of E2M1 times `power`.

    Divided by 2^(127 - bias) a float32 has FP8's exponents, subnormal numbers included, so that
    rounding to nearest even is an integer addition.
    """
    word = tl.zeros(power.shape, tl.int32)
    for i in tl.static_range(4):
        if SECOND:
            magnitude = 2.0 + i if i < 3 else 6.0
        else:
            magnitude = 0.5 * i
        bits = (power * (magnitude * 2.0 ** (BIAS - 127))).to(tl.int32, bitcast=True)
        cut = 23 - MANTISSA
        byte = (bits + ((1 << (cut - 1)) - 1) + ((bits >> cut) & 1)) >> cut
        word |= byte << (8 * i)
    return word


@triton.jit
def _looked_up(words, low, high, INTERPRETED: tl.constexpr):
    """The bytes of a word's eight codes, as two words: low and high hold those of magnitudes."""
    if INTERPRETED:
        first = tl.zeros(words.shape, tl.int32)
        second = tl.zeros(words.shape, tl.int32)
        for i in tl.static_range(8):
            code = words >> (4 * i)
            byte = tl.where((code & 4) != 0, high, low) >> (8 * (code & 3))
            byte = (byte & 0x7F) | ((code & 8) << 4)
            if i < 4:
                first |= byte << (8 * i)
            else:
                second |= byte << (8 * i - 32)
        return first, second
    # prmt takes a byte of a table of eight for each of four nibbles; so also for the signs.
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 magnitudes, signs, chosen;
        and.b32 magnitudes, $2, 0x77777777;
        prmt.b32 $0, $3, $4, magnitudes;
        shr.u32 magnitudes, magnitudes, 16;
        prmt.b32 $1, $3, $4, magnitudes;
        shr.u32 signs, $2, 3;
        and.b32 signs, signs, 0x11111111;
        prmt.b32 chosen, 0x8000, 0, signs;
        or.b32 $0, $0, chosen;
        shr.u32 signs, signs, 16;
        prmt.b32 chosen, 0x8000, 0, signs;
        or.b32 $1, $1, chosen;
        }
        """,
        "=&r,=&r,r,r,r",
        [words, low, high],
        dtype=(tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def carry_kernel(
    codes_ptr,
    scales_ptr,
    out_ptr,
    fold_ptr,
    tally_ptr,
    n_rows,
    n_blocks,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    NAN: tl.constexpr,
    BOTTOM: tl.constexpr,
    TOP: tl.constexpr,
    INTERPRETED: tl.constexpr,
    ALL_BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """codes [n_rows, 4 * n_blocks] words of eight, scales [n_rows, n_blocks] -> out [n_rows,
    8 * n_blocks] words of four, fold [n_rows]. How many elements were rounded, and how many blocks
    are NaN, is added to the tally."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at_rows = rows[:, None].to(tl.int64)
    every = tl.arange(0, ALL_BLOCKS)
    there = (rows < n_rows)[:, None] & (every < n_blocks)[None, :]
    scales = tl.load(scales_ptr + at_rows * n_blocks + every[None, :], mask=there, other=0)
    scales = scales.to(tl.int32)
    # 2^(fold - 127) is a normal number, which every unit multiplies alike.
    fold = tl.maximum(tl.max(tl.where(scales == 255, 0, scales), 1) - TOP, 1)
    tl.store(fold_ptr + rows, (fold << 23).to(tl.float32, bitcast=True), mask=rows < n_rows)
    blocks = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    here = (rows < n_rows)[:, None] & (blocks < n_blocks)[None, :]
    byte = tl.load(scales_ptr + at_rows * n_blocks + blocks[None, :], mask=here, other=0)
    byte = byte.to(tl.int32)
    k = byte - fold[:, None]
    power = ((tl.maximum(k, -64) + 127) << 23).to(tl.float32, bitcast=True)
    low = tl.where(byte == 255, NAN * 0x01010101, _table(power, False, MANTISSA, BIAS))
    high = tl.where(byte == 255, NAN * 0x01010101, _table(power, True, MANTISSA, BIAS))
    at = tl.program_id(1) * (BLOCKS * 4) + tl.arange(0, BLOCKS * 4)
    here = (rows < n_rows)[:, None] & (at < n_blocks * 4)[None, :]
    words = tl.load(codes_ptr + at_rows * (n_blocks * 4) + at[None, :], mask=here, other=0)
    words = tl.reshape(words, (ROWS, BLOCKS, 4))
    first, second = _looked_up(
        words,
        tl.broadcast_to(low[:, :, None], (ROWS, BLOCKS, 4)),
        tl.broadcast_to(high[:, :, None], (ROWS, BLOCKS, 4)),
        INTERPRETED,
    )
    out = tl.reshape(tl.join(first, second), (ROWS, BLOCKS * 8))
    at = tl.program_id(1) * (BLOCKS * 8) + tl.arange(0, BLOCKS * 8)
    here = (rows < n_rows)[:, None] & (at < n_blocks * 8)[None, :]
    tl.store(out_ptr + at_rows * (n_blocks * 8) + at[None, :], out, mask=here)
    nonzero = (words | (words >> 1) | (words >> 2)) & 0x11111111
    eight = ((nonzero * 0x11111111) >> 28) & 15  # the sum of the digits
    rounded = tl.where((k < BOTTOM)[:, :, None], eight, 0)
    total = tl.sum(tl.reshape(rounded, (ROWS * BLOCKS * 4,)), 0)
    nans = tl.sum(tl.reshape((byte == 255).to(tl.int32), (ROWS * BLOCKS,)), 0)
    tl.atomic_add(tally_ptr, total, mask=total > 0)  # next to never
    tl.atomic_add(tally_ptr + 1, nans, mask=nans > 0)


def carry(codes: Tensor, scales: Tensor, element: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(elements [rows, K] in FP8, what multiplies each row [rows, 1] float32, int32 [2]: how many
    elements were rounded, and how many blocks are NaN).

    codes: uint8 [rows, K / 2], two E2M1 codes a byte; scales: uint8 [rows, K / 32], E8M0.
    """
    rows, blocks = scales.shape
    out = codes.new_empty(rows, 32 * blocks)
    fold = codes.new_empty(rows, 1, dtype=torch.float32)
    every = 1 << (blocks - 1).bit_length()
    tile = min(BLOCKS, every)
    tally = _tallies(codes.device, stream_of(codes)).next()
    mantissa, bias, nan, bottom, top = FORMATS[element]
    with on(codes):
        launch(
            carry_kernel,
            (tiles(rows, ROWS), tiles(blocks, tile)),
            [codes.view(torch.int32), scales, out.view(torch.int32), fold, tally, rows, blocks],
            dict(
                MANTISSA=mantissa,
                BIAS=bias,
                NAN=nan,
                BOTTOM=bottom,
                TOP=top,
                INTERPRETED=triton.knobs.runtime.interpret,
                ALL_BLOCKS=every,
                ROWS=ROWS,
                BLOCKS=tile,
            ),
            num_warps=WARPS,
        )
    return out.view(element), fold, tally


@triton.jit
def elements_kernel(codes_ptr, out_ptr, n, INTERPRETED: tl.constexpr, TILE: tl.constexpr):
    """n words of eight codes -> words of four E4M3."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    words = tl.load(codes_ptr + at, mask=at < n, other=0)
    low, high = tl.full((TILE,), 0x3C383000, tl.int32), tl.full((TILE,), 0x4C484440, tl.int32)
    first, second = _looked_up(words, low, high, INTERPRETED)
    pairs = tl.program_id(0).to(tl.int64) * (2 * TILE) + tl.arange(0, 2 * TILE)
    out = tl.reshape(tl.join(first, second), (2 * TILE,))
    tl.store(out_ptr + pairs, out, mask=pairs < 2 * n)


def elements(codes: Tensor) -> Tensor:
    """E4M3 [rows, K] of E2M1 codes [rows, K / 2], two a byte and K a multiple of 8."""
    rows, half = codes.shape
    out = codes.new_empty(rows, 2 * half)
    words, tile = codes.numel() // 4, 1024
    with on(codes):
        launch(
            elements_kernel,
            (tiles(words, tile),),
            [codes.view(torch.int32), out.view(torch.int32), words],
            dict(INTERPRETED=triton.knobs.runtime.interpret, TILE=tile),
        )
    return out.view(torch.float8_e4m3fn)


class _Tallies:
    """Zeros to count in, made many at a time, on the stream that counts."""

    def __init__(self, device: torch.device, stream: int) -> None:
        self._device = device
        self._left: list[Tensor] = []

    def next(self) -> Tensor:
        if not self._left:
            # Sixteen bytes apart, as a kernel is compiled to find them.
            zeros = torch.zeros(1024, 4, dtype=torch.int32, device=self._device)
            self._left = list(zeros[:, :2].unbind())
        return self._left.pop()


_tallies = cache(_Tallies)
