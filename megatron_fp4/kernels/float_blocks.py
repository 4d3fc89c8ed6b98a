"""FP8 and FP16 elements with an E8M0 scale for each block of a vector, in Triton.

The functions have the bits of arithmetic/fp8_blocks.py (`FloatBlocks`). They work on the bits of
float32 numbers, so that they run on any GPU and in Triton's interpreter. A code is an int32 whose
low bits are the element: the sign, the exponent field and MANTISSA bits.

MANTISSA: mantissa bits of the element. LOWEST: the exponent of its smallest normal number. TOP: the
bits, as float32, of its largest number. SIGN: the place of its sign bit, 7 or 15. `constants_of`
returns them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from megatron_fp4.kernels.launch import bits_of

_NAN_SCALE = tl.constexpr(255)
_INF = tl.constexpr(0x7F800000)
_WHOLES = tl.constexpr(2.0**23)  # from here on float32 has no fractions


def constants_of(values: torch.dtype) -> dict[str, Any]:
    """The constants of the functions here. values: torch.float8_e4m3fn, float8_e5m2 or float16."""
    info = torch.finfo(values)
    return dict(
        MANTISSA=-int(math.log2(info.eps)),
        LOWEST=int(math.log2(info.smallest_normal)),
        TOP=bits_of(info.max),
        SIGN=8 * values.itemsize - 1,
    )


@triton.jit
def scale_bytes(largest, TOP: tl.constexpr, LEAST: tl.constexpr):
    """E8M0 bytes of blocks, int32: the smallest power of two by which no element exceeds the
    element format's largest number; 0 of a block of zeros, 255 of one with Inf or NaN.

    largest: int32, the bits of the largest magnitude of each block; those of NaN are the largest of
    all. LEAST: the exponent of the smallest scale.
    """
    exponent = (largest >> 23) - (TOP >> 23)
    exponent += ((largest & 0x7FFFFF) > (TOP & 0x7FFFFF)).to(tl.int32)
    byte = tl.maximum(exponent, LEAST) + 127
    byte = tl.where(largest == 0, 0, byte)
    return tl.where(largest >= _INF, _NAN_SCALE, byte)


@triton.jit
def divided(x, byte):
    """Elements of blocks divided by the blocks' scales, float32; 0 in a block whose byte is 255.

    x: float32. byte: from `scale_bytes`, of x's shape or broadcast to it.
    """
    # The byte of the inverse of 2^-127 is 254. No byte but 255 is above 253, so none is 2^-127.
    inverse = ((254 - byte) << 23).to(tl.float32, bitcast=True)
    return tl.where(byte == _NAN_SCALE, 0.0, x * inverse)


@triton.jit
def scales_of(byte):
    """The float32 numbers of E8M0 bytes (int32); 255 is NaN."""
    bits = tl.where(byte == 0, 0x400000, byte << 23)
    return tl.where(byte == _NAN_SCALE, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def _steps(v, MANTISSA: tl.constexpr, LOWEST: tl.constexpr):
    """(magnitudes of v in units of the distance of their neighbours, their exponents); subnormal
    numbers of the element format have the exponent LOWEST."""
    magnitude = v.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    exponent = tl.maximum((magnitude >> 23) - 127, LOWEST)
    unit = ((MANTISSA - exponent + 127) << 23).to(tl.float32, bitcast=True)
    return magnitude.to(tl.float32, bitcast=True) * unit, exponent


@triton.jit
def _is_up(fraction, random):
    return fraction * 65536 > random.to(tl.float32) + 0.5


@triton.jit
def stochastic_codes(v, random, MANTISSA: tl.constexpr, LOWEST: tl.constexpr, SIGN: tl.constexpr):
    """Codes of v, each rounded up with the probability of its fraction of the interval between its
    neighbours.

    v: float32, from `divided`. random: integers in [0, 65536), int32.
    """
    steps, exponent = _steps(v, MANTISSA, LOWEST)
    whole = steps.to(tl.int32)
    up = _is_up(steps - whole.to(tl.float32), random).to(tl.int32)
    # Where a mantissa is rounded up to the next binade, the sum carries into the exponent.
    code = ((exponent - LOWEST) << MANTISSA) + whole + up
    return code | (((v.to(tl.int32, bitcast=True) >> 31) & 1) << SIGN)


@triton.jit
def nearest_codes(v, MANTISSA: tl.constexpr, LOWEST: tl.constexpr, SIGN: tl.constexpr):
    """Codes of v, rounded to nearest even. v: float32, from `divided`."""
    steps, exponent = _steps(v, MANTISSA, LOWEST)
    whole = ((steps + _WHOLES) - _WHOLES).to(tl.int32)
    code = ((exponent - LOWEST) << MANTISSA) + whole
    return code | (((v.to(tl.int32, bitcast=True) >> 31) & 1) << SIGN)


@triton.jit
def decoded_codes(code, MANTISSA: tl.constexpr, LOWEST: tl.constexpr, SIGN: tl.constexpr):
    """The float32 numbers of codes, without their scales. code: int32 without higher bits."""
    magnitude = code & ((1 << SIGN) - 1)
    # Shifted to float32's fields the code is the number times 2^(LOWEST - 1 + 127), and exact:
    # a subnormal of the element format is a subnormal float32.
    bits = magnitude << (23 - MANTISSA)
    unit: tl.constexpr = (LOWEST - 1 + 127 + 127) << 23
    value = bits.to(tl.float32, bitcast=True) * tl.full((), unit, tl.int32).to(
        tl.float32, bitcast=True
    )
    signed = value.to(tl.int32, bitcast=True) | ((code >> SIGN) << 31)
    return signed.to(tl.float32, bitcast=True)
