"""Block scales in E4M3, UE5M3 and E8M0 by each rule, and the elements divided by them, in Triton.

The bits are those of `_scale_float` and `_scale_e8m0` in arithmetic/scaling.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_fp4.kernels.float_blocks import power
from megatron_fp4.kernels.float_scales import E8M0_BIAS, code_for, divisor_of, spread
from megatron_fp4.kernels.four_over_six import smaller_error
from megatron_fp4.kernels.fp8_scales import best_in_fp8, inverse_of
from megatron_fp4.kernels.quotients import quotients


@triton.jit
def power_code(maxima, RULE: tl.constexpr):
    """Chooses E8M0 scales of E2M1 elements by rule floor, ceil or nearest. Returns their bytes,
    int32 of maxima's shape.

    maxima: float32, the largest magnitude of each block.
    """
    bits = maxima.to(tl.int32, bitcast=True)
    BELOW: tl.constexpr = 3 if RULE == "nearest" else 2
    if RULE == "ceil":
        bits += 0x3FFFFF  # carries to the next exponent above 1.5 2^e
    elif RULE == "nearest":
        bits += 0x700000  # from 1.125 2^e on
    return tl.maximum((bits >> 23) - BELOW, 0)


@triton.jit
def in_scales(
    v,
    maxima,
    tensor_scale,
    TENSOR_MAX: tl.constexpr,
    INFLATE: tl.constexpr,
    RULE: tl.constexpr,
    BIAS: tl.constexpr,
    MAX: tl.constexpr,
    ACROSS: tl.constexpr,
    ALONG: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Chooses a scale for each block of v by RULE, and divides the block's elements by it.

    Returns (the codes of the scales, int32 of maxima's shape; the magnitudes of v in units of the
    scales, float32 of v's shape).

    v: float32 [rows, columns]; of BF16 values, as `quotients` needs them, unless the scales are
    E8M0. maxima: float32 [rows / ACROSS, columns / ALONG], the largest magnitudes of its blocks; 0
    for a block that is not finite. tensor_scale: float32 []. For the constants see
    `blocks.cast_kernel`.
    """
    if BIAS == E8M0_BIAS:
        scale = power_code(maxima, RULE)
        scaled = tl.abs(v) * spread(power(127 - scale), ACROSS, ALONG)  # exact
    elif RULE == "mse-fp8":
        if TENSOR_MAX > 0:
            one_block = tl.broadcast_to(tensor_scale, (1, 1))  # the tile is one block
            v = quotients(v, one_block, v.shape[0], v.shape[1], INTERPRETED)
            maxima = tl.div_rn(maxima, tensor_scale)
        scale = best_in_fp8(v, maxima, BIAS, MAX, ALONG)
        scaled = tl.abs(v * spread(inverse_of(scale, BIAS), ACROSS, ALONG))
    else:
        scale = code_for(maxima, tensor_scale, 6.0, INFLATE, BIAS, MAX, RULE == "up")
        if RULE == "four-over-six":
            scale = smaller_error(v, maxima, scale, tensor_scale, BIAS, MAX, INFLATE, ALONG)
        divisor = divisor_of(scale, tensor_scale, BIAS)
        scaled = quotients(v, divisor, ACROSS, ALONG, INTERPRETED)
    return scale, scaled
