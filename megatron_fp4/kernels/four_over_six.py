"""Block scales by rule four-over-six, in Triton: those that map a block's largest magnitude to 6 or
to 4, whichever gives the smaller squared error (arXiv 2512.02010).

The bits are those of `_smaller_error` in arithmetic/scaling.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_fp4.kernels.float_scales import code_of, divisor_of, rounded, scale_of, spread


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
    """The codes of block scales, of the two candidates those with the smaller error: int32
    [rows, columns / ALONG]. A tie takes `six`.

    v: float32 [rows, columns]. maxima: the largest magnitudes of its blocks of ALONG columns; 0 for
    a block that is not finite. six: the codes of the scales that map them to 6. tensor_scale:
    float32 [].
    BIAS, MAX: of the scale format, its exponent bias and largest number. INFLATE: multiplies block
    scales before they are rounded.
    """
    wanted = tl.div_rn(maxima, tl.broadcast_to(tensor_scale * 4.0, maxima.shape)) * INFLATE
    four = code_of(wanted, BIAS, MAX, False)
    of_six = _error(v, six, tensor_scale, BIAS, ALONG)
    return tl.where(_error(v, four, tensor_scale, BIAS, ALONG) < of_six, four, six)
