"""Block scales by rule mse-fp8, in Triton: of the scales that FP8 GEMMs take, the one with the
smallest squared error.

The bits are those of arithmetic/fp8_scales.py. The scales of a format are counted in ascending
order, from index 0. Its subnormal numbers have the first six, 1 to 6 times the smallest (7 times it
is not among them). Each binade above has three: 1, 1.25 and 1.5 times a power of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_fp4.kernels.float_scales import reciprocal, rounded, scale_of

_SUBNORMAL = tl.constexpr(6)  # subnormal scales


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
def inverse_of(code, BIAS: tl.constexpr):
    """The reciprocals of scales with these codes, float32; 0 for the code 0."""
    scale = scale_of(code, BIAS)
    return tl.where(code > 0, reciprocal(scale), 0.0)


@triton.jit
def _off(scaled):
    """By how much rounding to E2M1 changes each scaled magnitude: float32, rounded to a multiple of
    2^-8. Magnitudes above 6 become 6."""
    return ((rounded(scaled) - scaled) + 49152.0) - 49152.0  # 1.5 * 2^15


@triton.jit
def best_in_fp8(v, maxima, BIAS: tl.constexpr, MAX: tl.constexpr, ALONG: tl.constexpr):
    """The codes of block scales by rule mse-fp8: int32 [rows, columns / ALONG]; 0 for zeros.

    v: float32 [rows, columns], divided by the tensor scale. maxima: float32
    [rows, columns / ALONG], the largest magnitudes of blocks of ALONG columns; 0 for a block that
    is not finite.
    BIAS, MAX: of the scale format, its exponent bias and largest number.
    """
    R: tl.constexpr = v.shape[0]
    C: tl.constexpr = v.shape[1] // ALONG
    magnitudes = tl.reshape(tl.abs(v), (R, C, ALONG))
    first = _first(tl.div_rn(maxima, tl.full(maxima.shape, 6.0, tl.float32)), BIAS)
    last = (
        _first(tl.full(maxima.shape, MAX, tl.float32), BIAS) - 1
    )  # MAX has the significand 7 or 15
    best, least = first, tl.full(maxima.shape, float("inf"), tl.float32)
    for offset in range(-1, 3):
        index = tl.minimum(tl.maximum(first + offset, 0), last)
        code = _code_of(index)
        inverse = tl.broadcast_to(inverse_of(code, BIAS)[:, :, None], (R, C, ALONG))
        off, scale = _off(magnitudes * inverse), scale_of(code, BIAS)
        error = tl.sum(off * off, 2) * (scale * scale)
        best = tl.where(error < least, index, best)
        least = tl.minimum(error, least)
    best = tl.where(first > last, last, best)  # of a maximum that all scales clip
    return tl.where(maxima > 0.0, _code_of(best), 0)
