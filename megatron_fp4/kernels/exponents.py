"""E8M0 scales of blocks, by the rules floor, ceil and mse, in Triton.

docs/numerics.md, E8M0, defines them. As in encode.py a word holds two BF16 values, and here a word
of exponents holds those of two blocks: 128 times the exponent with its bias in each half, which are
the bits of a power of two in BF16.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_fp4.kernels.encode import larger_of, unpacked


@triton.jit
def of_maxima(widest, CEIL: tl.constexpr, INTERPRETED: tl.constexpr):
    """The exponents of the largest magnitudes of two blocks, from which `powers` gives their
    scales by the rule floor, or ceil if CEIL.

    widest: words of two BF16 magnitudes, the maxima of two blocks. The result is undefined for a
        block whose maximum is Inf or NaN.
    """
    each = tl.full(widest.shape, 0x00010001, tl.int32)
    # For a maximum above 1.5 2^e rule ceil takes the next exponent. 0x3F carries above 1.5.
    exponents = (widest + each * 0x3F if CEIL else widest) & 0x7F807F80
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
def _on_the_grid(v):
    """Magnitudes below 8, float32, rounded to nearest to the grid of E2M1.

    Near 2^22, 2^23 and 2^24 float32 has the grid's steps of 1/2, 1 and 2.
    """
    halves = (v + 4194304.0) - 4194304.0
    ones = (v + 8388608.0) - 8388608.0
    twos = (v + 16777216.0) - 16777216.0
    return tl.where(v < 2, halves, tl.where(v < 4, ones, tl.minimum(twos, 6.0)))


@triton.jit
def _squared(off):
    """Squares of errors of BF16 values in units of 2^-18, rounded to integers, as int32.

    off: float32, at most 2. Such an error has eight significant bits, so its square is exact, and
    it does not matter whether the sum below is fused.
    """
    return (off * off * 262144.0 + 8388608.0).to(tl.int32, bitcast=True) - 0x4B000000


@triton.jit
def squared_errors(pairs, whole):
    """By how much more twice the scale errs than the scale itself, for each element.

    pairs: words [..., n] of two BF16 values. whole: 2^-s in both halves, by rule floor, from
        `powers`.

    Returns int32 [..., 2 n], whose sum over a block is below 0 if it errs less.
    """
    scaled = tl.abs(unpacked(pairs)) * unpacked(whole)
    single = _squared(_on_the_grid(scaled) - scaled)
    return _squared(_on_the_grid(scaled * 0.5) * 2 - scaled) - single
