"""E8M0 scales of blocks, by the rules floor, ceil, nearest and mse, in Triton.

docs/numerics.md, E8M0, defines them. As in encode.py a word holds two BF16 values, and here a word
of exponents holds those of two blocks: 128 times the exponent with its bias in each half, which are
the bits of a power of two in BF16.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_fp4.kernels.encode import larger_of, unpacked


@triton.jit
def of_maxima(maxima, ROUNDING: tl.constexpr, INTERPRETED: tl.constexpr):
    """The exponents of the largest magnitudes of two blocks, from which `powers` gives their
    scales by the rule; those of floor for the rule mse.

    maxima: words of two BF16 magnitudes, the maxima of two blocks. The result is undefined for a
        block whose maximum is Inf or NaN.
    ROUNDING: a Rounding.
    """
    each = tl.full(maxima.shape, 0x00010001, tl.int32)
    if ROUNDING.RULE == "nearest":
        # For a maximum below 1.125 2^e it takes the exponent before. 0x70 carries from 1.125 on.
        exponents = (maxima + each * 0x70) & 0x7F807F80
        return larger_of(exponents, each * 0x180, INTERPRETED) - each * 0x80
    # For a maximum above 1.5 2^e rule ceil takes the next exponent. 0x3F carries above 1.5.
    exponents = (maxima + each * 0x3F if ROUNDING.RULE == "ceil" else maxima) & 0x7F807F80
    return larger_of(exponents, each * 0x100, INTERPRETED)


@triton.jit
def powers(exponents, INTERPRETED: tl.constexpr):
    """The scales 2^s of two blocks: three words, each with one number for each block in its halves.

    exponents: from `of_maxima`.

    Returns the byte s + 127, 2^-s in BF16, and 2^(-s - 1) in BF16.
    """
    each = tl.full(exponents.shape, 0x00010001, tl.int32)
    whole = -0x7FFF8000 - exponents
    # 2^-127 is a subnormal number, 0x40.
    half = larger_of(whole - 0x00800080, each * 0x40, INTERPRETED)
    return (exponents >> 7) - each * 2, whole, half


@triton.jit
def _finer(v):
    """The part of `more_errors` that comes from magnitudes below 2, where the scale itself errs
    less.

    v: magnitudes divided by the scale, float32. From 2 to 7 both scales round v to the same number.
    Below 2 one rounds v to steps of 1/2, and twice the scale to steps of 1. These differ where v is
    nearest to 1/2 or 3/2, at a distance d of at most 1/4: the errors are then d and 1/2 - d. Their
    squares differ by 1/4 - d, a multiple of 2^-9 for BF16 values.
    """
    distance = tl.minimum(tl.abs(v - 0.5), tl.abs(v - 1.5))
    return tl.maximum(0.25 - distance, 0)


@triton.jit
def _wider(v):
    """The part of `more_errors`, negated, that comes from magnitudes above 7, where twice the scale
    errs less.

    v: magnitudes below 8 divided by the scale, float32. The scale itself rounds them to 6, twice
    the scale to 8: (v - 6)^2 - (8 - v)^2 = 4 v - 28.
    """
    return tl.maximum(4 * v - 28, 0)


@triton.jit
def more_errors(pairs, whole):
    """Compares two scales of a block, 2^s and 2^(s + 1): for each element the squared error of
    rounding under the second one less that under the first one, divided by 2^(2 s).

    pairs: words [..., n], each with two BF16 elements.
    whole: 2^-s in both halves of a word, for the s of rule floor, from `powers`.

    Returns float32 [..., 2 n]. The second scale is the better one for a block if the sum over the
    block is below 0. All numbers are multiples of 2^-9 and at most 4 in magnitude, so that the sum
    is exact in any order.
    """
    v = tl.abs(unpacked(pairs)) * unpacked(whole)
    return _finer(v) - _wider(v)
