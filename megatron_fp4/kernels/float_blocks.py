"""Numbers in few bits beside the GEMMs: decoded and encoded in Triton.

The bits are those of arithmetic/fp8_blocks.py, bf16.py and moments.py. Numbers are a tile
[rows, 128] of float32, of which each row is a block. FORM is how they are stored: "fp32", "bf16",
"fp16" (in blocks), "fp8" (E4M3 in blocks), "e5m2" (in blocks) or "root" (E4M3 of the root, in
blocks).
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_fp4.kernels.encode import bf16_bits

_BF16_MOST = tl.constexpr(0x7F7F)  # the largest finite number


@triton.jit
def power(exponent):
    """2^exponent in float32, for exponents from -126 to 127."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def e8m0_scale(byte):
    """The value of E8M0 scales, float32: NaN for 255."""
    bits = tl.where(byte == 255, 0x7FC00000, tl.maximum(byte << 23, 0x400000))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def decoded(codes, byte, FORM: tl.constexpr):
    """The float32 numbers of codes as they are stored.

    codes: float32, the bits of BF16 as int16, float16, or uint8 [rows, 128]. byte: int32 [rows, 1],
    the E8M0 scales; not read if FORM is "fp32" or "bf16".
    """
    if FORM == "fp32":
        return codes
    if FORM == "bf16":
        return (codes.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    if FORM == "fp16":
        return codes.to(tl.float32) * e8m0_scale(byte)
    # The exponent bits of FP8 as those of a float32 are those of a power of two times the number.
    SHIFT: tl.constexpr = 21 if FORM == "e5m2" else 20
    POWER: tl.constexpr = 2.0**112 if FORM == "e5m2" else 2.0**120
    code = codes.to(tl.int32)
    bits = (code & 0x7F) << SHIFT | (code & 0x80) << 24
    found = bits.to(tl.float32, bitcast=True) * POWER * e8m0_scale(byte)
    return found * found if FORM == "root" else found


@triton.jit
def scale_byte(maxima, FORM: tl.constexpr):
    """The E8M0 byte of blocks whose largest magnitude is finite.

    maxima: int32, the bits of that magnitude. The scale is the smallest power of two by which it
    does not exceed the format's largest number: 448, 57344 (E5M2) or 65504 (FP16).
    """
    TOP: tl.constexpr = 15 if FORM == "fp16" or FORM == "e5m2" else 8
    MANTISSA: tl.constexpr = 0x7FE000 if FORM == "fp16" else 0x600000
    LEAST: tl.constexpr = 62 if FORM == "root" else 0
    byte = (maxima >> 23) - TOP + ((maxima & 0x7FFFFF) > MANTISSA).to(tl.int32)
    return tl.where(maxima > 0, tl.maximum(byte, LEAST), 0)


@triton.jit
def _is_up(steps, integer, rest, random, FORM: tl.constexpr, STOCHASTIC: tl.constexpr):
    """Whether magnitudes become their upper neighbours.

    steps, integer: a magnitude, and its lower neighbour, in units of the neighbours' distance.
    rest: their difference. random: int32, in [0, 65536).
    """
    if not STOCHASTIC:
        return (rest > 0.5) | ((rest == 0.5) & ((integer.to(tl.int32) & 1) == 1))
    if FORM == "root":
        rest = rest * tl.div_rn(steps + integer, 2 * integer + 1)
    return rest * 65536 > random.to(tl.float32) + 0.5


@triton.jit
def kept_positive(code, x):
    """The smallest positive code where a positive number would become 0."""
    return tl.where((code == 0) & (x > 0), 1, code)


@triton.jit
def _in_bf16(x, random, IS_SQUARE: tl.constexpr, STOCHASTIC: tl.constexpr):
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    if not STOCHASTIC:
        random = 0x7FFF + ((bits >> 16) & 1)
    code = tl.minimum((magnitude + random) >> 16, _BF16_MOST)
    if IS_SQUARE:
        code = kept_positive(code, x)
    code = code | ((bits >> 16) & 0x8000)
    return tl.where(magnitude < 0x7F800000, code, bf16_bits(x))


@triton.jit
def encoded(x, random, FORM: tl.constexpr, IS_SQUARE: tl.constexpr, STOCHASTIC: tl.constexpr):
    """(codes, scales) of float32 numbers: the bits of the codes, int32 [rows, 128], and the E8M0
    bytes, int32 [rows, 1].

    x: 0 where a row has no element. random: int32 in [0, 65536), read if STOCHASTIC. IS_SQUARE:
    whether no positive element becomes 0, as Adam's v needs it. FORM: not "fp32".
    """
    if FORM == "bf16":
        return _in_bf16(x, random, IS_SQUARE, STOCHASTIC), tl.zeros((x.shape[0], 1), tl.int32)
    MANTISSA: tl.constexpr = 10 if FORM == "fp16" else (2 if FORM == "e5m2" else 3)
    LOWEST: tl.constexpr = -14 if FORM == "fp16" or FORM == "e5m2" else -6
    value = tl.sqrt_rn(x) if FORM == "root" else x
    bits = value.to(tl.int32, bitcast=True)
    maxima = tl.max(bits & 0x7FFFFFFF, 1, keep_dims=True)
    finite = maxima < 0x7F800000
    byte = scale_byte(maxima, FORM)
    scaled = tl.where(finite, tl.abs(value) * power(127 - byte), 0.0)
    exponent = tl.maximum((scaled.to(tl.int32, bitcast=True) >> 23) - 127, LOWEST)
    steps = scaled * power(MANTISSA - exponent)
    integer = steps.to(tl.int32).to(tl.float32)
    up = _is_up(steps, integer, steps - integer, random, FORM, STOCHASTIC).to(tl.int32)
    # Where a mantissa is rounded up to the next binade, the addition carries into the exponent.
    code = ((exponent - LOWEST) << MANTISSA) + integer.to(tl.int32) + up
    if IS_SQUARE:
        code = kept_positive(code, x)
    SIGN: tl.constexpr = 16 if FORM == "fp16" else 24
    code = tl.where(finite, code | ((bits >> SIGN) & (0x80000000 >> SIGN)), 0)
    return code, tl.where(finite, byte, 255)
