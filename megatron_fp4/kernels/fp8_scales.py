"""Block scales by rule mse-fp8, in Triton: of the scales that FP8 products take, the one with the
smallest squared error.

The bits are those of arithmetic/fp8_scales.py. The scales of a format are counted in ascending
order, from index 0. Its subnormal numbers have the first six, 1 to 6 times the smallest (7 times it
is not among them). Each binade above has three: 1, 1.25 and 1.5 times a power of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

_SUBNORMAL = tl.constexpr(6)  # subnormal scales
_MOST = tl.constexpr(0x7FFFFFFF)


@triton.jit
def scale_of(code, BIAS: tl.constexpr):
    """The float32 value of each code of a block scale with three mantissa bits. BIAS: the format's
    exponent bias."""
    normal = ((code << 20) + ((127 - BIAS) << 23)).to(tl.float32, bitcast=True)
    return tl.where(code < 8, code.to(tl.float32) * 2.0 ** (-BIAS - 2), normal)


@triton.jit
def _first(wanted, BIAS: tl.constexpr):
    """The index of the smallest scale that is not below `wanted`, float32 and not negative; beyond
    the format's end, that of a scale it does not have."""
    steps = wanted * 2.0 ** (BIAS + 2)  # in units of the smallest scale
    whole = steps.to(tl.int32)
    below = whole - (whole.to(tl.float32) == steps).to(tl.int32)  # how many scales are below
    subnormal = tl.maximum(tl.minimum(below, _SUBNORMAL), 0)
    bits = wanted.to(tl.int32, bitcast=True)
    quarters = ((bits & 0x7FFFFF) + 0x1FFFFF) >> 21  # above 1.5 the next binade begins
    normal = _SUBNORMAL + 3 * ((bits >> 23) - (128 - BIAS)) + tl.minimum(quarters, 3)
    return tl.where(wanted < 2.0 ** (1 - BIAS), subnormal, normal)


@triton.jit
def _code_of(index):
    """The codes of scales with these indices."""
    above = index - _SUBNORMAL
    return tl.where(above < 0, index + 1, ((above // 3 + 1) << 3) + 2 * (above % 3))


@triton.jit
def _rounded(magnitudes):
    """Scaled float32 magnitudes rounded to E2M1, nearest even, as numbers."""
    v = tl.minimum(magnitudes, 6.0)
    half, one, two = v + 6291456.0, v + 12582912.0, v + 25165824.0  # 1.5 * 2^22, 2^23, 2^24
    by_one = tl.where(v < 4.0, one - 12582912.0, two - 25165824.0)
    return tl.where(v < 2.0, half - 6291456.0, by_one)


@triton.jit
def _errors(magnitudes, scale, unit):
    """Counted squared errors of elements, int32. scale: what they are divided by. unit: 2^-e, by
    which errors are multiplied before they are squared."""
    rounded = _rounded(tl.div_rn(magnitudes, scale)) * scale  # exact
    off = (rounded - magnitudes) * unit
    return (off * off * 262144.0).to(tl.int32)  # 2^18


@triton.jit
def best_in_fp8(v, amax, BIAS: tl.constexpr, MAX: tl.constexpr, ALONG: tl.constexpr):
    """The codes of block scales by rule mse-fp8: int32 [rows, columns / ALONG]; 0 for zeros.

    v: float32 [rows, columns], in units of the tensor scale. amax: float32 [rows, columns / ALONG],
    the largest magnitudes of blocks of ALONG columns; 0 for a block that is not finite.
    BIAS, MAX: of the scale format, its exponent bias and largest number.
    """
    R: tl.constexpr = v.shape[0]
    C: tl.constexpr = v.shape[1] // ALONG
    magnitudes = tl.reshape(tl.abs(v), (R, C, ALONG))
    wanted = tl.div_rn(amax, tl.full(amax.shape, 6.0, tl.float32))
    first = _first(wanted, BIAS)
    exponent = tl.maximum(wanted.to(tl.int32, bitcast=True) >> 23, 1) - 126
    unit = ((127 - tl.minimum(exponent, 126)) << 23).to(tl.float32, bitcast=True)
    unit = tl.broadcast_to(unit[:, :, None], (R, C, ALONG))
    last = _first(tl.full(amax.shape, MAX, tl.float32), BIAS) - 1  # MAX has the significand 7 or 15
    best, least = first, tl.full(amax.shape, _MOST, tl.int32)
    for offset in range(-1, 3):
        index = tl.minimum(tl.maximum(first + offset, 0), last)
        scale = tl.broadcast_to(scale_of(_code_of(index), BIAS)[:, :, None], (R, C, ALONG))
        error = tl.sum(_errors(magnitudes, scale, unit), 2)
        better = error < least
        best, least = tl.where(better, index, best), tl.where(better, error, least)
    return tl.where(amax > 0.0, _code_of(best), 0)
