"""Block scales in E4M3 and UE5M3, with three mantissa bits: their codes and values, in Triton.

The rules mse-fp8 (fp8_scales.py) and four-over-six (four_over_six.py), and scales with a gain of 1
(gain.py), use these functions.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_fp4.arithmetic import formats
from megatron_fp4.kernels.float_blocks import power
from megatron_fp4.kernels.rows import fp8_code

# By its exponent bias kernels tell E8M0 from the formats of this file.
E8M0_BIAS = tl.constexpr(formats.E8M0_BIAS)


@triton.jit
def code_of(wanted, BIAS: tl.constexpr, MAX: tl.constexpr, UP: tl.constexpr):
    """Rounds numbers to block scales, and returns the scales' codes, int32.

    wanted: float32, not negative. Larger numbers than MAX, the format's largest, become MAX.
    BIAS: the format's exponent bias. UP: whether numbers are rounded up, not to nearest even.
    """
    magnitude = tl.minimum(wanted, MAX)
    if UP:
        normal = ((magnitude.to(tl.int32, bitcast=True) + 0xFFFFF) >> 20) - ((127 - BIAS) << 3)
        wanted = magnitude * 2.0 ** (BIAS + 2)
        below = wanted.to(tl.int32)  # tl.ceil would flush a subnormal number to 0
        steps = below + (below.to(tl.float32) < wanted).to(tl.int32)
        code = tl.where(magnitude < 2.0 ** (1 - BIAS), steps, normal)
    else:
        code = fp8_code(magnitude, 3, BIAS)
    return code


@triton.jit
def code_for(
    maxima,
    tensor_scale,
    TARGET: tl.constexpr,
    INFLATE: tl.constexpr,
    BIAS: tl.constexpr,
    MAX: tl.constexpr,
    UP: tl.constexpr,
):
    """Chooses block scales by the largest magnitudes of blocks. Returns the scales' codes, int32 of
    maxima's shape.

    maxima: float32, the largest magnitude of each block. TARGET: what it becomes when it is divided
    by the block scale, before the scale is rounded, and by the tensor scale. tensor_scale: float32
    []. INFLATE: multiplies block scales before they are rounded. BIAS, MAX, UP: see `code_of`.
    """
    wanted = tl.div_rn(maxima, tl.broadcast_to(tensor_scale * TARGET, maxima.shape)) * INFLATE
    return code_of(wanted, BIAS, MAX, UP)


@triton.jit
def reciprocal(x):
    """1 / x for float32 numbers, rounded to nearest."""
    return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), x)


@triton.jit
def stochastic_code(wanted, random, BIAS: tl.constexpr, MAX: tl.constexpr):
    """Rounds numbers stochastically to block scales, and returns the scales' codes, int32.

    A number between two scales becomes the upper one with the probability that keeps its mean.
    wanted, BIAS, MAX: see `code_of`. random: int32 of the shape of wanted, in [0, 65536).
    """
    magnitude = tl.minimum(wanted, MAX)
    exponent = tl.maximum((magnitude.to(tl.int32, bitcast=True) >> 23) - 127, 1 - BIAS)
    steps = magnitude * power(3 - exponent)
    below = steps.to(tl.int32)
    up = (steps - below.to(tl.float32)) * 65536 > random.to(tl.float32) + 0.5
    return ((exponent + (BIAS - 1)) << 3) + below + up.to(tl.int32)


@triton.jit
def scale_of(code, BIAS: tl.constexpr):
    """The float32 value of each code of a block scale. BIAS: the format's exponent bias."""
    normal = ((code << 20) + ((127 - BIAS) << 23)).to(tl.float32, bitcast=True)
    return tl.where(code < 8, code.to(tl.float32) * 2.0 ** (-BIAS - 2), normal)


@triton.jit
def divisor_of(code, tensor_scale, BIAS: tl.constexpr):
    """What a block's elements are divided by: the block scale times the tensor scale.

    code: the code of the block scale. If the product is 0 the divisor is Inf, so that all quotients
        are 0.
    """
    divisor = scale_of(code, BIAS) * tensor_scale
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
    """Repeats a value of each block for all elements of the block: [rows, columns].

    of_blocks: [rows / ACROSS, columns / ALONG]. A block has ACROSS rows and ALONG columns.
    """
    R: tl.constexpr = of_blocks.shape[0]
    C: tl.constexpr = of_blocks.shape[1]
    whole = tl.broadcast_to(of_blocks[:, None, :, None], (R, ACROSS, C, ALONG))
    return tl.reshape(whole, (R * ACROSS, C * ALONG))
