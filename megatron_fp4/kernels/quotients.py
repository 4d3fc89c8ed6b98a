"""Divides the elements of blocks by numbers of their blocks, in Triton, with one division a block.

A division by IEEE 754 takes a dozen instructions. With the reciprocal r of d, rounded to nearest,
q = v r is within two units in the last place of v / d. Its error v - q d is exact in one fused
multiply-add, and a second adds the error times r. The result is v / d rounded to nearest for all
significands of 8 bits of v and of 24 bits of d (testing/kernels/compare_quotients.py counts them).
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_fp4.kernels.float_scales import reciprocal, spread


@triton.jit
def _rounded_to_odd(a, b):
    """a + b, for float64 numbers: of the two neighbours of a sum that is not exact, the one whose
    last bit is 1. Rounded again, to float32, it is then the sum rounded once."""
    about = a + b
    part = about - a
    off = (a - (about - part)) + (b - part)
    bits = about.to(tl.int64, bitcast=True)
    away = tl.where((off > 0) == (about > 0), 1, -1)
    return tl.where((off != 0) & ((bits & 1) == 0), bits + away, bits).to(tl.float64, bitcast=True)


@triton.jit
def _fused(a, b, c, INTERPRETED: tl.constexpr):
    """a b + c, rounded once, for float32 numbers."""
    if INTERPRETED:  # float64 holds the product exactly
        product = a.to(tl.float64) * b.to(tl.float64)
        return _rounded_to_odd(product, c.to(tl.float64)).to(tl.float32)
    return tl.inline_asm_elementwise(
        "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [a, b, c], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _normalized(divisor):
    """Brings divisors near 1 by powers of two. Returns (power, product), both float32.

    divisor: float32, above 0. power: of two, for each divisor. product: the divisor times its
    power, in [1, 4), or below 1 for a subnormal divisor.
    """
    byte = tl.maximum(254 - (divisor.to(tl.int32, bitcast=True) >> 23), 1)
    power = (byte << 23).to(tl.float32, bitcast=True)
    return power, divisor * power


@triton.jit
def quotients(v, divisor, ACROSS: tl.constexpr, ALONG: tl.constexpr, INTERPRETED: tl.constexpr):
    """|v| divided by the divisor of its block, rounded to nearest: float32 of v's shape.

    v: float32 [rows, columns] of BF16 values. divisor: float32 [rows / ACROSS, columns / ALONG],
    above 0; for Inf the quotients are 0. A quotient below 2^-100 may be rounded otherwise.
    """
    there = divisor < float("inf")
    power, near_1 = _normalized(tl.where(there, divisor, 1.0))
    inverse = reciprocal(near_1)
    scaled = tl.abs(v) * spread(tl.where(there, power, 0.0), ACROSS, ALONG)
    inverse, minus = spread(inverse, ACROSS, ALONG), spread(-near_1, ACROSS, ALONG)
    about = scaled * inverse
    return _fused(_fused(about, minus, scaled, INTERPRETED), inverse, about, INTERPRETED)
