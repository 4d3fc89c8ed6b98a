"""Converts E2M1 codes, times a block scale, to FP8 bytes, in Triton.

The elements of a block have eight magnitudes. Their FP8 bytes are computed once for the block, as
two words (`table`, `quick_table`), and each code selects one of them (`looked_up`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron_fp4.kernels.encode import nearest_even
from megatron_fp4.kernels.source import sampled

# Mantissa bits, exponent bias, the byte of NaN, and the window: the lowest and the highest k for
# which every code times 2^k is exact.
FORMATS = {
    torch.float8_e4m3fn: (3, 7, 0x7F, -8, 6),
    torch.float8_e5m2: (2, 15, 0x7F, -15, 13),
}
# The lowest k for which `quick_table` is right, by mantissa bits.
LOWEST = {3: -7, 2: -13}
_SAMPLES = tl.constexpr(128)


@triton.jit
def table(power, SECOND: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """The FP8 bytes of four E2M1 magnitudes times `power`, in one word, the smallest in the lowest
    byte.

    power: float32, powers of two, or 1.25 or 1.5 times these.
    SECOND: whether the magnitudes are 2, 3, 4 and 6; otherwise they are 0, 1/2, 1 and 3/2.
    MANTISSA, BIAS: mantissa bits and exponent bias of the FP8 format.

    Products are rounded to nearest even, to subnormal numbers too. None may exceed the format's
    largest number. Divided by 2^(127 - BIAS), a float32 has the exponent bits of the FP8 number, so
    that rounding is an integer addition.
    """
    word = tl.zeros(power.shape, tl.int32)
    for i in tl.static_range(4):
        if SECOND:
            magnitude = 2.0 + i if i < 3 else 6.0
        else:
            magnitude = 0.5 * i
        bits = (power * (magnitude * 2.0 ** (BIAS - 127))).to(tl.int32, bitcast=True)
        word |= nearest_even(bits, 23 - MANTISSA) << (8 * i)
    return word


@triton.jit
def looked_up(words, low, high, INTERPRETED: tl.constexpr):
    """The FP8 bytes of a word's eight codes, as two words of four bytes in the order of the codes.

    low, high: words with the bytes of the magnitudes 0, 1/2, 1, 3/2 and of 2, 3, 4, 6 (`table`).
        The sign of a code becomes bit 7 of its byte.
    """
    if INTERPRETED:
        first = tl.zeros(words.shape, tl.int32)
        second = tl.zeros(words.shape, tl.int32)
        for i in tl.static_range(8):
            code = words >> (4 * i)
            byte = tl.where((code & 4) != 0, high, low) >> (8 * (code & 3))
            byte = (byte & 0x7F) | ((code & 8) << 4)
            if i < 4:
                first |= byte << (8 * i)
            else:
                second |= byte << (8 * i - 32)
        return first, second
    # prmt selects a byte from a table of eight for each of four nibbles. The signs are bytes from a
    # table of 0x00 and 0x80.
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 magnitudes, signs, chosen;
        and.b32 magnitudes, $2, 0x77777777;
        prmt.b32 $0, $3, $4, magnitudes;
        shr.u32 magnitudes, magnitudes, 16;
        prmt.b32 $1, $3, $4, magnitudes;
        shr.u32 signs, $2, 3;
        and.b32 signs, signs, 0x11111111;
        prmt.b32 chosen, 0x8000, 0, signs;
        or.b32 $0, $0, chosen;
        shr.u32 signs, signs, 16;
        prmt.b32 chosen, 0x8000, 0, signs;
        or.b32 $1, $1, chosen;
        }
        """,
        "=&r,=&r,r,r,r",
        [words, low, high],
        dtype=(tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def quick_table(k, MANTISSA: tl.constexpr):
    """Both words of `table` for the power 2^k, from constants by integer operations.

    k: int32. The bytes are right for k from LOWEST to the top of the format's window (FORMATS); for
        other k they are arbitrary, and `carrier.carry_kernel` has to convert the block again.
    """
    if MANTISSA == 3:
        k = tl.minimum(tl.maximum(k, -7), 6)
        subnormal = 0x0C080400 >> tl.maximum(-6 - k, 0)
        low = tl.where(k < -5, subnormal, 0x3C383000 + k * 0x08080800)
        return low, 0x4C484440 + k * 0x08080808
    k = tl.minimum(tl.maximum(k, -13), 13)
    return 0x3E3C3800 + k * 0x04040400, 0x46444240 + k * 0x04040404


@triton.jit
def _finite_or_0(magnitude):
    """The bits of BF16 magnitudes, 0 for Inf and NaN."""
    return tl.where(magnitude < 0x7F80, magnitude, 0)


@triton.jit
def largest_of_sample(
    x,
    n_rows,
    n_columns,
    PACKED: tl.constexpr,
    READS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """The largest block scale that is found in a sample of a matrix, as an E8M0 byte.

    x: a Source [n_rows, n_columns]. PACKED: the block size if x is codes with scales; 0 if it is
        BF16. Of codes 128 scales are sampled. Of BF16 128 pairs of neighbours in a row are, and
        the largest number's scale is computed. READS: see source.py.

    Inf and NaN are ignored. The places of the sample depend on the matrix's size alone, so that all
    programs of a launch get the same result.
    """
    i = tl.arange(0, _SAMPLES).to(tl.int64)
    rows = (i * n_rows) // _SAMPLES
    mixed = ((i * 0x9E3779B1) & 0xFFFFFFFF) >> 16
    if PACKED > 0:
        at = rows * (n_columns // PACKED) + ((mixed * (n_columns // PACKED)) >> 16)
        byte = tl.load(x.scales + at).to(tl.int32)
        return tl.max(tl.where(byte == 255, 0, byte), 0)
    words = (mixed * (n_columns // 2)) >> 16
    pairs = sampled(x, rows, words, n_columns, READS, INTERPRETED)
    low, high = _finite_or_0(pairs & 0x7FFF), _finite_or_0((pairs >> 16) & 0x7FFF)
    return (tl.max(tl.maximum(low, high), 0) >> 7) - 2


@triton.jit
def likely_exponent(largest, MANTISSA: tl.constexpr):
    """Guesses a row exponent that fits most rows of a matrix, for its FP8 carriers.

    docs/numerics.md, Carriers, defines row exponents. largest: the result of `largest_of_sample`.
    MANTISSA: mantissa bits of the FP8 format. Returns the exponent with its bias of 127, at least
    1.
    """
    # Around the largest block of the sample E4M3 then holds blocks that are up to 7 binades larger
    # and 6 smaller, and E5M2 13 larger and 13 smaller.
    return tl.maximum(largest + 1 if MANTISSA == 3 else largest, 1)
