"""E2M1 codes, eight to a word, and E8M0 scales of blocks of BF16 values, in Triton.

BF16 comes in words of two neighbours, which nearest rounding leaves together. Hopper's units for
integers are half as wide as those for floating-point numbers: what can be done in the latter is.
Where that takes assembly, Triton's interpreter does the same in plain arithmetic.

E2M1's steps are 1/2 up to 2, 1 up to 4, then 2. Those of BF16 numbers are 1/2 below 128, then 1:
v + 126, rounded, is as many numbers above 126 as v's code is above 0, until 4; v / 2 + 128 from 4
on. One multiply-add scales and rounds, and of the two the smaller is it (`nearest_pairs`; of values
that are no BF16 in float32, whose steps are 1/2 below 2^23, `nearest`).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def nearest_even(bits, CUT: tl.constexpr):
    """Integers without their CUT lowest bits, rounded to nearest, ties to even. Of the bits of a
    float they are those of one with a shorter mantissa."""
    return (bits + ((1 << (CUT - 1)) - 1) + ((bits >> CUT) & 1)) >> CUT


@triton.jit
def bf16_bits(x):
    """Of float32, rounded to nearest even as BF16; Triton's interpreter would cut them off."""
    even = nearest_even(x.to(tl.int32, bitcast=True), 16) & 0xFFFF
    return tl.where(x == x, even, 0x7FC0)


@triton.jit
def permuted(a, b, selector):
    """A word of four bytes of a (0-3) and b (4-7), which the selector's digits name, last first.
    b and the selector may be numbers."""
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, $3;",
        "=r,r,r,r",
        [a, b, selector],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def larger(a, b):
    """The larger BF16 magnitude of each half; NaN above all."""
    return tl.inline_asm_elementwise(
        "max.NaN.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def smaller(a, b, INTERPRETED: tl.constexpr):
    """The smaller of BF16 magnitudes in words of two."""
    if INTERPRETED:
        return tl.minimum(a & 0xFFFF, b & 0xFFFF) | (tl.minimum(a >> 16, b >> 16) << 16)
    return tl.inline_asm_elementwise(
        "min.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def larger_of(a, b, INTERPRETED: tl.constexpr):
    """`larger`, in the interpreter too."""
    if INTERPRETED:
        return tl.maximum(a & 0xFFFF, b & 0xFFFF) | (tl.maximum(a >> 16, b >> 16) << 16)
    return larger(a, b)


@triton.jit
def scales(widest, CEIL: tl.constexpr, INTERPRETED: tl.constexpr):
    """Of the largest magnitudes of two blocks, BF16 in words of two: E8M0 bytes s + 127, 2^-s and
    2^(-s - 1) in BF16, in the halves of words. Anything where they are not finite."""
    each = tl.full(widest.shape, 0x00010001, tl.int32)
    # Above 1.5 2^e, 6 is too small, and the exponent goes up.
    exponent = (widest + each * 0x3F if CEIL else widest) & 0x7F807F80
    exponent = larger_of(exponent, each * 0x100, INTERPRETED)
    whole = -0x7FFF8000 - exponent
    # 2^-127 is subnormal.
    half = larger_of(whole - 0x00800080, each * 0x40, INTERPRETED)
    return (exponent >> 7) - each * 2, whole, half


@triton.jit
def live(widest):
    """-1 where the BF16 magnitude in the higher half of a word is finite, else 0."""
    return tl.where(widest < 0x7F800000, -1, 0)


@triton.jit
def unpacked(pairs):
    """float32 [..., 2 n] of words [..., n] of two BF16."""
    SHAPE: tl.constexpr = pairs.shape
    both = tl.join(pairs << 16, pairs & -0x10000).to(tl.float32, bitcast=True)
    return tl.reshape(both, SHAPE[:-1] + (SHAPE[-1] * 2,))


@triton.jit
def fused(a, b, c, INTERPRETED: tl.constexpr):
    """a b + c of BF16 in words of two, rounded once."""
    if INTERPRETED:
        SHAPE: tl.constexpr = a.shape
        # Exact in float32 wherever it is near to a boundary of BF16, a and b having 8 bits.
        bits = bf16_bits(unpacked(a) * unpacked(b) + unpacked(c))
        low, high = tl.split(tl.reshape(bits, SHAPE + (2,)))
        return low | (high << 16)
    return tl.inline_asm_elementwise(
        "fma.rn.bf16x2 $0, $1, $2, $3;",
        "=r,r,r,r",
        [a, b, c],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def halved(pairs, inverse, CLIPS: tl.constexpr, INTERPRETED: tl.constexpr):
    """Half of the scaled magnitudes of BF16 in words of two. inverse: 2^(-s - 1), of
    `scales`. What becomes too small for BF16 is too small to be rounded to another code
    than 0."""
    nothing = tl.full(pairs.shape, -0x7FFF8000, tl.int32)  # - 0
    half = fused(pairs & 0x7FFF7FFF, inverse, nothing, INTERPRETED)
    if CLIPS:
        three = tl.full(pairs.shape, 0x40404040, tl.int32)  # half of 6
        half = smaller(half, three, INTERPRETED)
    return half


@triton.jit
def nearest_pairs(magnitudes, signed, whole, half, CLIPS: tl.constexpr, INTERPRETED: tl.constexpr):
    """Codes, as integers in the halves of words, of BF16 magnitudes in words of two, with the signs
    of others. whole, half: 2^-s and 2^(-s - 1), of `scales`. What is not finite spoils its word."""
    SHAPE: tl.constexpr = magnitudes.shape
    below = tl.full(SHAPE, 0x42FC42FC, tl.int32)  # 126
    above = tl.full(SHAPE, 0x43004300, tl.int32)  # 128
    first = fused(magnitudes, whole, below, INTERPRETED)
    second = fused(magnitudes, half, above, INTERPRETED)
    codes = smaller(first, second, INTERPRETED)
    if CLIPS:
        codes = smaller(codes, above + 0x00030003, INTERPRETED)  # 6's
    return codes + ((signed >> 12) & 0x00080008 | -0x42FC42FC)


@triton.jit
def nearest(magnitudes):
    """Codes of scaled float32 magnitudes, as integers."""
    below = tl.full([], 2.0**23 - 2, tl.float32)
    above = tl.full([], 2.0**23, tl.float32)
    first = (magnitudes + below).to(tl.int32, bitcast=True)
    second = (magnitudes * 0.5 + above).to(tl.int32, bitcast=True)
    return tl.minimum(first, second) - 0x4AFFFFFC


@triton.jit
def stochastic(half, rest, PRESCALE: tl.constexpr, INTERPRETED: tl.constexpr):
    """15 - codes of half magnitudes, in the highest byte of words, by rest = 256 r + 0xF000083 of
    random integers r in [0, 65536).

    Divided by 2^126 the grid's 1 is float32's smallest normal number, and 1/2 subnormal in both:
    the bits of a magnitude are its place among the codes, in units of 2^-22. Rounded up, no way
    above a threshold is lost: up if it is above (r + 1/2) 2^6.
    """
    factor = tl.full(half.shape, PRESCALE * 2.0**-125, tl.float32)
    if INTERPRETED:
        product = half * factor
        short = (product.to(tl.float64) < half.to(tl.float64) * (PRESCALE * 2.0**-125)).to(tl.int32)
        way = product.to(tl.int32, bitcast=True) + short
    else:
        way = tl.inline_asm_elementwise(
            "mul.rp.f32 $0, $1, $2;", "=r,f,f", [half, factor], dtype=tl.int32, is_pure=True, pack=1
        )
    return rest - way * 4


@triton.jit
def _is_between(rest, code, bits):
    """Whether scaled magnitudes lie strictly between two values of E2M1. code: of the value at or
    below; rest: the distance from it, in steps to the next code; bits: of the number as float32
    before it was scaled. A number whose scaled BF16 underflows to 0 is between 0 and 1/2."""
    return (rest > 0) | ((code == 0) & ((bits & 0x7FFFFFFF) != 0))


@triton.jit
def nearer(half, pairs, inverse, average):
    """Codes, as bits, of the half magnitudes of `pairs` scaled by `inverse` (`halved`): of the two
    on either side the one that the average, float32 and not yet scaled, is nearer to."""
    half = unpacked(half)
    bits = unpacked(pairs).to(tl.int32, bitcast=True)
    toward = average * unpacked(inverse)
    toward = tl.where(bits < 0, -toward, toward)
    place = tl.minimum(tl.minimum(half * 4, half * 2 + 2), half + 4)  # among the codes
    code = place.to(tl.int32)
    lower = code.to(tl.float32)
    rest = place - lower
    midway = lower + 0.5
    middle = tl.maximum(tl.maximum(midway * 0.25, midway * 0.5 - 1), midway - 4)
    nearest_up = (rest > 0.5) | ((rest == 0.5) & ((code & 1) == 1))
    up = tl.where(toward == middle, nearest_up, toward > middle)
    return code + (up & _is_between(rest, code, bits)).to(tl.int32)


@triton.jit
def words(codes):
    """Words [...] of eight codes [..., 2, 2, 2] without their signs. Small integers are added as
    the float32 of their bits."""
    even, odd = tl.split(codes.to(tl.float32, bitcast=True))
    first, second = tl.split(odd * 16.0 + even)
    low, high = tl.split((second * 256.0 + first).to(tl.int32, bitcast=True))
    return low | (high << 16)


@triton.jit
def pack(low, high):
    """Bytes of two 4-bit codes each, in int32: `low` in the low nibble, `high` in the high one, as
    `formats.pack` packs elements 2i and 2i + 1."""
    return low | (high << 4)


@triton.jit
def words_of_pairs(codes, INTERPRETED: tl.constexpr):
    """Words [...] of eight signed codes in words [..., 2, 2] of two neighbours."""
    even, odd = tl.split(codes)
    p0, p2 = tl.split(even)
    p1, p3 = tl.split(odd)
    if INTERPRETED:
        low = p0 & 15 | (p1 & 15) << 8 | (p2 & 15) << 16 | (p3 & 15) << 24
        high = p0 >> 16 & 15 | (p1 >> 16 & 15) << 8 | (p2 >> 16 & 15) << 16 | (p3 >> 16 & 15) << 24
    else:
        first, second = permuted(p0, p1, 0x6240), permuted(p2, p3, 0x6240)
        low, high = permuted(first, second, 0x5410), permuted(first, second, 0x7632)
    return low + high * 16


@triton.jit
def words_below(codes, INTERPRETED: tl.constexpr):
    """Words [..., 2 n] of eight signed codes below each other, of words [..., n, 2, 2, 2] of two
    neighbours."""
    even, odd = tl.split(codes)
    first, second = tl.split(odd * 16 + even)
    low, high = tl.split(second * 256 + first)
    if INTERPRETED:
        both = tl.join(low & 0xFFFF | high << 16, low >> 16 & 0xFFFF | high & -0x10000)
    else:
        both = tl.join(permuted(low, high, 0x5410), permuted(low, high, 0x7632))
    SHAPE: tl.constexpr = low.shape
    return tl.reshape(both, SHAPE[:-1] + (SHAPE[-1] * 2,))


@triton.jit
def _highest(codes, INTERPRETED: tl.constexpr):
    """The highest bytes of words [..., 2, 2] in one."""
    first, second = tl.split(codes)
    if INTERPRETED:
        low, high = tl.split(((first >> 24) & 0xFF) | ((second >> 16) & 0xFF00))
        return low | (high << 16)
    low, high = tl.split(permuted(first, second, 0x73))
    return permuted(low, high, 0x5410)


@triton.jit
def words_of_highest(codes, INTERPRETED: tl.constexpr):
    """The same of 15 - codes in the highest bytes."""
    even, odd = tl.split(codes)
    return ~(_highest(even, INTERPRETED) + _highest(odd, INTERPRETED) * 16)


@triton.jit
def _gathered(p0, p1, p2, p3, INTERPRETED: tl.constexpr):
    """(bytes with the signs of the low halves of four words, of the high halves), in bit 7."""
    if INTERPRETED:
        low = (p0 >> 8) & 0x80 | p1 & 0x8000 | (p2 << 8) & 0x800000 | (p3 << 16) & -0x80000000
        high = (p0 >> 24) & 0x80 | (p1 >> 16) & 0x8000 | (p2 >> 8) & 0x800000 | p3 & -0x80000000
        return low, high
    first, second = permuted(p0, p1, 0x7351), permuted(p2, p3, 0x7351)
    return permuted(first, second, 0x5410), permuted(first, second, 0x7632)


@triton.jit
def gathered(pairs, INTERPRETED: tl.constexpr):
    """The same of words [..., 2, 2]."""
    even, odd = tl.split(pairs)
    p0, p2 = tl.split(even)
    p1, p3 = tl.split(odd)
    return _gathered(p0, p1, p2, p3, INTERPRETED)


@triton.jit
def signs(even, odd):
    """The sign bits of a word's codes, of bytes with those of its even and of its odd elements."""
    return (odd & -0x7F7F7F80) | ((even >> 4) & 0x08080808)
