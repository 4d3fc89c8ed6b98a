"""Encodes BF16 values as E2M1 codes, eight to a word, with E8M0 block scales, in Triton.

Most functions take BF16 values as words of two: an int32 holds two neighbours of a row, the left
one in its low half. One instruction then processes both. On Hopper integer units have half the
throughput of floating-point units, so integer steps are computed in floating point where that is
possible. Where this needs assembly, Triton's interpreter (INTERPRETED) computes the same bits in
plain arithmetic.

The grid of E2M1 has steps of 1/2 up to 2, of 1 up to 4, and of 2 above. BF16 numbers have steps of
1/2 below 128 and of 1 above. So v + 126, rounded to BF16, is as many BF16 numbers above 126 as the
code of v is above 0, for v up to 4. From 4 on this holds for v / 2 + 128. The smaller of the two
gives the code (`nearest_pairs`), and one multiply-add scales v and rounds it. `nearest` uses
float32 in this way, whose steps are 1/2 below 2^23.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def nearest_even(bits, CUT: tl.constexpr):
    """Integers divided by 2^CUT and rounded to nearest, ties to even.

    bits: int32. If they are the bits of floats, the result is the bits of the floats with CUT fewer
        mantissa bits.
    """
    return (bits + ((1 << (CUT - 1)) - 1) + ((bits >> CUT) & 1)) >> CUT


@triton.jit
def bf16_bits(x):
    """The bits of float32 values rounded to BF16, nearest even, as int32 in [0, 65536).

    NaN becomes 0x7FC0. A plain cast would not do: Triton's interpreter truncates.
    """
    even = nearest_even(x.to(tl.int32, bitcast=True), 16) & 0xFFFF
    return tl.where(x == x, even, 0x7FC0)


@triton.jit
def rounded_pairs(low, high, INTERPRETED: tl.constexpr):
    """Words of two BF16 values: `low` and `high`, float32, rounded to nearest even."""
    if INTERPRETED:
        return bf16_bits(low) | (bf16_bits(high) << 16)
    return tl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def permuted(a, b, selector):
    """A word of four bytes selected from the words a and b (PTX prmt).

    selector: four hex digits. Digit i, from the lowest, names the source of byte i of the result: 0
        to 3 are the bytes of a from the lowest on, 4 to 7 those of b. b and selector may be
        constants.
    """
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
    """The larger of two BF16 magnitudes, for each half of words of two; NaN if either is NaN."""
    return tl.inline_asm_elementwise(
        "max.NaN.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def smaller(a, b, INTERPRETED: tl.constexpr):
    """The smaller of two BF16 magnitudes, for each half of words of two.

    If one is NaN the result is the other.
    INTERPRETED: whether Triton's interpreter runs it, which has no inline assembly.
    """
    if INTERPRETED:
        return tl.minimum(a & 0xFFFF, b & 0xFFFF) | (tl.minimum(a >> 16, b >> 16) << 16)
    return tl.inline_asm_elementwise(
        "min.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def larger_of(a, b, INTERPRETED: tl.constexpr):
    """As `larger`, but runs in Triton's interpreter too, if INTERPRETED.

    In the interpreter magnitudes are compared as integers, where a NaN is above all numbers.
    """
    if INTERPRETED:
        return tl.maximum(a & 0xFFFF, b & 0xFFFF) | (tl.maximum(a >> 16, b >> 16) << 16)
    return larger(a, b)


@triton.jit
def live(maxima):
    """-1 (all bits set) where a block is finite, else 0.

    maxima: words with the largest magnitude of the block, BF16, in the high half.
    """
    return tl.where(maxima < 0x7F800000, -1, 0)


@triton.jit
def unpacked(pairs):
    """float32 values [..., 2 n] of words [..., n] of two BF16, the low half first."""
    SHAPE: tl.constexpr = pairs.shape
    both = tl.join(pairs << 16, pairs & -0x10000).to(tl.float32, bitcast=True)
    return tl.reshape(both, SHAPE[:-1] + (SHAPE[-1] * 2,))


@triton.jit
def fused(a, b, c, INTERPRETED: tl.constexpr):
    """a b + c, rounded once, for BF16 values in words of two."""
    if INTERPRETED:
        SHAPE: tl.constexpr = a.shape
        # a and b have 8 significant bits, so float32 holds the product exactly. The sum is exact
        # wherever it is near a rounding boundary of BF16.
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
    """Half of the scaled magnitudes, |x| 2^(-s - 1), in words of two BF16.

    pairs: words of two BF16 values x.
    inverse: 2^(-s - 1) in both halves, from `exponents.powers`.
    CLIPS: whether scaled magnitudes above 6 are clipped to 6, so that halves are at most 3.

    The result is exact unless it is subnormal. Such a value is too small to be rounded to any code
    but 0.
    """
    nothing = tl.full(pairs.shape, -0x7FFF8000, tl.int32)  # -0 in both halves
    half = fused(pairs & 0x7FFF7FFF, inverse, nothing, INTERPRETED)
    if CLIPS:
        three = tl.full(pairs.shape, 0x40404040, tl.int32)  # 3, half of 6
        half = smaller(half, three, INTERPRETED)
    return half


@triton.jit
def nearest_pairs(magnitudes, signed, whole, half, CLIPS: tl.constexpr, INTERPRETED: tl.constexpr):
    """Codes with signs, rounded to nearest, of BF16 values in words of two.

    magnitudes: the magnitudes of the values.
    signed: the values with their signs; only bits 15 and 31 are read.
    whole, half: 2^-s and 2^(-s - 1) in both halves, from `exponents.powers`.
    CLIPS: whether scaled magnitudes above 6 can occur; they get the code of 6.

    Returns words with one code, 0 to 15, in each half. For Inf or NaN the half is a larger number,
    which changes the other codes when eight are packed into a word: discard that word.
    """
    SHAPE: tl.constexpr = magnitudes.shape
    below = tl.full(SHAPE, 0x42FC42FC, tl.int32)  # 126
    above = tl.full(SHAPE, 0x43004300, tl.int32)  # 128
    first = fused(magnitudes, whole, below, INTERPRETED)
    second = fused(magnitudes, half, above, INTERPRETED)
    codes = smaller(first, second, INTERPRETED)
    if CLIPS:
        codes = smaller(codes, above + 0x00030003, INTERPRETED)  # the sum for code 7
    return codes + ((signed >> 12) & 0x00080008 | -0x42FC42FC)


@triton.jit
def nearest(magnitudes):
    """Codes without signs, int32, rounded to nearest, of scaled float32 magnitudes of at most 6."""
    below = tl.full([], 2.0**23 - 2, tl.float32)
    above = tl.full([], 2.0**23, tl.float32)
    first = (magnitudes + below).to(tl.int32, bitcast=True)
    second = (magnitudes * 0.5 + above).to(tl.int32, bitcast=True)
    return tl.minimum(first, second) - 0x4AFFFFFC


@triton.jit
def stochastic(half, rest, PRESCALE: tl.constexpr, INTERPRETED: tl.constexpr):
    """15 - code, in the highest byte of a word, for stochastically rounded magnitudes.

    half: half of the scaled magnitudes, float32, at most 3 after the multiplication by PRESCALE.
    rest: int32, 256 r + 0xF000083 for random integers r in [0, 65536), from `philox.rest16`.
    PRESCALE: multiplies the magnitudes before they are rounded.

    Returns int32 of which the three lower bytes are undefined. `words_of_highest` packs such words
    and undoes the complement.

    Divided by 2^126, the grid point 1 is the smallest normal number of float32, and 1/2 is
    subnormal, as both are in E2M1. So the bits of such a magnitude are 2^22 times its position
    among the codes. The product is rounded up, so that a magnitude just above a threshold stays
    above it. With f the fractional part of the position, the upper code is taken where 65536 f > r
    + 1/2.
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
    """Whether scaled magnitudes lie strictly between two grid points of E2M1.

    code: the code of the grid point at or below the magnitude.
    rest: the distance from that grid point, in steps to the next code.
    bits: the float32 bits of the number before it was scaled. A number that is not zero lies
        between 0 and 1/2 even if scaling it underflows to 0.
    """
    return (rest > 0) | ((code == 0) & ((bits & 0x7FFFFFFF) != 0))


@triton.jit
def nearer(half, pairs, inverse, average):
    """Codes without signs, int32 [..., 2 n], rounded towards an average (rounding ema).

    half: the result of `halved` for `pairs`.
    pairs: words [..., n] of two BF16 values.
    inverse: 2^(-s - 1) in both halves, from `exponents.powers`.
    average: float32 [..., 2 n], not scaled.

    A value becomes the one of its two neighbours on the grid that is nearer to the average. If the
    average is midway between them, the value is rounded to nearest. A value on the grid does not
    change. See docs/numerics.md, Rounding towards an average.
    """
    half = unpacked(half)
    bits = unpacked(pairs).to(tl.int32, bitcast=True)
    toward = average * unpacked(inverse)
    toward = tl.where(bits < 0, -toward, toward)
    place = tl.minimum(tl.minimum(half * 4, half * 2 + 2), half + 4)  # position among the codes
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
    """Words [...] of eight codes without signs, int32 [..., 2, 2, 2] in row-major order.

    The sums are computed on the codes as float32 subnormal numbers, which is exact: floating-point
    units have twice the throughput of integer units.
    """
    even, odd = tl.split(codes.to(tl.float32, bitcast=True))
    first, second = tl.split(odd * 16.0 + even)
    low, high = tl.split((second * 256.0 + first).to(tl.int32, bitcast=True))
    return low | (high << 16)


@triton.jit
def pack(low, high):
    """Bytes of two codes, as int32: `low` in the low nibble and `high` in the high nibble.

    `formats.pack` packs elements 2i and 2i + 1 in this order.
    """
    return low | (high << 4)


@triton.jit
def words_of_pairs(codes, INTERPRETED: tl.constexpr):
    """Words [...] of the codes of eight neighbours in a row.

    codes: words [..., 2, 2] from `nearest_pairs`, each with the codes of two neighbours.
    """
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
    """Packs eight codes of a column, one from each of eight rows, into one word.

    codes: words [..., n, 2, 2, 2] from `nearest_pairs`. The last three axes are the eight rows, and
        the halves of a word are two neighbouring columns.

    Returns words [..., 2 n], one for each column.
    """
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
def _highest_bytes(codes, INTERPRETED: tl.constexpr):
    """Words [...] of the highest bytes of four words [..., 2, 2], in row-major order from the low
    byte."""
    first, second = tl.split(codes)
    if INTERPRETED:
        low, high = tl.split(((first >> 24) & 0xFF) | ((second >> 16) & 0xFF00))
        return low | (high << 16)
    low, high = tl.split(permuted(first, second, 0x73))
    return permuted(low, high, 0x5410)


@triton.jit
def words_of_highest(codes, INTERPRETED: tl.constexpr):
    """Words [...] of eight codes without signs.

    codes: words [..., 2, 2, 2] with 15 - code in the highest byte, from `stochastic`.
    """
    even, odd = tl.split(codes)
    return ~(_highest_bytes(even, INTERPRETED) + _highest_bytes(odd, INTERPRETED) * 16)


@triton.jit
def _sign_bytes(p0, p1, p2, p3, INTERPRETED: tl.constexpr):
    """Two words with the sign bits of p0, p1, p2 and p3, which are words of two BF16.

    Bit 7 of byte i is the sign of the i-th word's low half in the first result, and of its high
    half in the second. All other bits are undefined.
    """
    if INTERPRETED:
        low = (p0 >> 8) & 0x80 | p1 & 0x8000 | (p2 << 8) & 0x800000 | (p3 << 16) & -0x80000000
        high = (p0 >> 24) & 0x80 | (p1 >> 16) & 0x8000 | (p2 >> 8) & 0x800000 | p3 & -0x80000000
        return low, high
    first, second = permuted(p0, p1, 0x7351), permuted(p2, p3, 0x7351)
    return permuted(first, second, 0x5410), permuted(first, second, 0x7632)


@triton.jit
def sign_bytes(pairs, INTERPRETED: tl.constexpr):
    """`_sign_bytes` of words [..., 2, 2] of two BF16, in row-major order: two words [...]."""
    even, odd = tl.split(pairs)
    p0, p2 = tl.split(even)
    p1, p3 = tl.split(odd)
    return _sign_bytes(p0, p1, p2, p3, INTERPRETED)


@triton.jit
def signs(even, odd):
    """The sign bits of a word of eight codes: bit 3 of each nibble.

    even, odd: words with the sign of element 2i, and of 2i + 1, in bit 7 of byte i (`sign_bytes`).
    """
    return (odd & -0x7F7F7F80) | ((even >> 4) & 0x08080808)
