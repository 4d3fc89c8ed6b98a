"""Block scales in E4M3 and UE5M3, with three mantissa bits: their codes and values, in Triton.

The rules mse-fp8 (fp8_scales.py) and four-over-six (four_over_six.py) stand on these functions.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_fp4.kernels.rows import fp8_code


@triton.jit
def code_of(wanted, BIAS: tl.constexpr, MAX: tl.constexpr, UP: tl.constexpr):
    """Codes of block scales.

    wanted: float32, not negative. Larger numbers than MAX, the format's largest, become MAX.
    BIAS: the format's exponent bias.
    UP: whether the scale is rounded up instead of to nearest even.
    """
    magnitude = tl.minimum(wanted, MAX)
    if UP:
        normal = ((magnitude.to(tl.int32, bitcast=True) + 0xFFFFF) >> 20) - ((127 - BIAS) << 3)
        steps = tl.ceil(magnitude * 2.0 ** (BIAS + 2)).to(tl.int32)
        code = tl.where(magnitude < 2.0 ** (1 - BIAS), steps, normal)
    else:
        code = fp8_code(magnitude, 3, BIAS)
    return code


@triton.jit
def scale_of(code, BIAS: tl.constexpr):
    """The float32 value of each code of a block scale. BIAS: the format's exponent bias."""
    normal = ((code << 20) + ((127 - BIAS) << 23)).to(tl.float32, bitcast=True)
    return tl.where(code < 8, code.to(tl.float32) * 2.0 ** (-BIAS - 2), normal)


@triton.jit
def divisor_of(code, unit, BIAS: tl.constexpr):
    """What a block's elements are divided by: the block scale times the tensor scale `unit`.

    code: the code of the block scale. If the product is 0 the divisor is Inf, so that all quotients
        are 0.
    """
    divisor = scale_of(code, BIAS) * unit
    return tl.where(divisor > 0.0, divisor, float("inf"))


@triton.jit
def rounded(scaled):
    """Scaled magnitudes, rounded to nearest numbers of E2M1: float32. Those above 6 become 6.

    Adding a large number and subtracting it again rounds to multiples of the large number's last
    bit. The large number is chosen so that this bit is the distance of E2M1's numbers: 1/2 below 2,
    1 below 4, and 2 above.
    """
    clipped = tl.minimum(scaled, 6.0)
    binade = tl.maximum(clipped.to(tl.int32, bitcast=True) & 0x7F800000, 0x3F800000)
    large = binade.to(tl.float32, bitcast=True) * 6291456.0  # half of it is the distance
    return (clipped + large) - large


@triton.jit
def spread(of_blocks, ACROSS: tl.constexpr, ALONG: tl.constexpr):
    """What belongs to a block, for each of its elements: [rows, columns].

    of_blocks: [rows / ACROSS, columns / ALONG].
    """
    R: tl.constexpr = of_blocks.shape[0]
    C: tl.constexpr = of_blocks.shape[1]
    whole = tl.broadcast_to(of_blocks[:, None, :, None], (R, ACROSS, C, ALONG))
    return tl.reshape(whole, (R * ACROSS, C * ALONG))
