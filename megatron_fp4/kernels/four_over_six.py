"""Block scales by rule four-over-six, in Triton: those that map a block's largest magnitude to 6 or
to 4, whichever gives the smaller squared error (arXiv 2512.02010).

The bits are those of `_smaller_error` in arithmetic/scaling.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_fp4.kernels.float_scales import (
    code_for,
    divisor_of,
    reciprocal,
    rounded,
    scale_of,
    spread,
)


@triton.jit
def _error(v, code, tensor_scale, BIAS: tl.constexpr, ALONG: tl.constexpr):
    """The squared error of each block with these scales: float64 [rows, columns / ALONG].

    In float64 an element's error is exact. The order of the sum could decide only between
    candidates that are equal to within some 2^-50.
    """
    R: tl.constexpr = code.shape[0]
    C: tl.constexpr = code.shape[1]
    magnitude = tl.abs(v)
    scaled = tl.div_rn(magnitude, spread(divisor_of(code, tensor_scale, BIAS), 1, ALONG))
    scale = scale_of(code, BIAS).to(tl.float64) * tensor_scale.to(tl.float64)
    off = rounded(scaled).to(tl.float64) * spread(scale, 1, ALONG) - magnitude.to(tl.float64)
    return tl.sum(tl.reshape(off * off, (R, C, ALONG)), 2)


@triton.jit
def _estimate(v, divisor, ALONG: tl.constexpr):
    """Estimates in float32 the sum of squared rounding errors of each block, in units of its
    divisor: float32 [rows, columns / ALONG].

    divisor: float32 [rows, columns / ALONG], what the elements of blocks are divided by.
    """
    R: tl.constexpr = divisor.shape[0]
    C: tl.constexpr = divisor.shape[1]
    scaled = tl.abs(v) * spread(reciprocal(divisor), 1, ALONG)
    off = rounded(scaled) - scaled
    return tl.sum(tl.reshape(off * off, (R, C, ALONG)), 2)


@triton.jit
def smaller_error(
    v,
    maxima,
    six,
    tensor_scale,
    BIAS: tl.constexpr,
    MAX: tl.constexpr,
    INFLATE: tl.constexpr,
    ALONG: tl.constexpr,
):
    """Chooses one of two scales for each block: the one that maps the block's largest magnitude to
    6, or the one that maps it to 4. It takes the one with the smaller squared rounding error of the
    block, and at a tie that of 6. Returns the scales' codes, int32 [rows, columns / ALONG].

    v: float32 [rows, columns]. maxima: the largest magnitudes of its blocks of ALONG columns; 0 for
    a block that is not finite. six: the codes of the scales that map them to 6. tensor_scale:
    float32 [].
    BIAS, MAX: of the scale format, its exponent bias and largest number. INFLATE: multiplies block
    scales before they are rounded.

    Estimates in float32 decide where they differ by more than their error. If they differ by less
    in one block of the tile, float64 decides for the whole tile. An element's distance to the grid
    is off by at most 5 * 2^-24 times its scaled magnitude, which is at most 6.4 if it is not
    clipped. So the sum e of the squares in a block of 16 is off by less than 2^-17 (1 + e). The
    divisor of `four` is at most twice that of `six`, so that in units of `six` its sum is off by at
    most four times that, and both together by 5 * 2^-17 (1 + of_six + of_four). UNSURE is 8 * 2^-17
    here, and grows with the block. Where an estimate is not finite no comparison holds, and float64
    decides.
    """
    four = code_for(maxima, tensor_scale, 4.0, INFLATE, BIAS, MAX, False)
    divisor = divisor_of(six, tensor_scale, BIAS)
    larger = divisor_of(four, tensor_scale, BIAS)
    of_six, ratio = _estimate(v, divisor, ALONG), tl.div_rn(larger, divisor)
    of_four = _estimate(v, larger, ALONG) * (ratio * ratio)
    UNSURE: tl.constexpr = 2.0**-18 * max(ALONG, 16)
    by = UNSURE * (1.0 + of_six + of_four)
    takes_four = of_six - of_four > by
    decided = takes_four | (of_four - of_six > by) | (six == four)
    if tl.min(tl.min(decided.to(tl.int32), 1), 0) == 0:
        in_six = _error(v, six, tensor_scale, BIAS, ALONG)
        takes_four = _error(v, four, tensor_scale, BIAS, ALONG) < in_six
    return tl.where(takes_four, four, six)
