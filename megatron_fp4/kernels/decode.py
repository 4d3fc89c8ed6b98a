"""Decodes E2M1 codes with E8M0 scales to BF16, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_fp4.kernels.encode import permuted


@triton.jit
def halves(words):
    """(low, high): the BF16 in the low and in the high half of each word, in float32."""
    low = (words << 16).to(tl.float32, bitcast=True)
    return low, (words & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def bf16_of(code):
    """The bits of the BF16 value of each E2M1 code, without a scale; int32. code: int32, whose
    lowest four bits count."""
    magnitude = code & 7
    bits = tl.where(magnitude < 2, magnitude * 0x3F00, 0x3F00 + (magnitude << 6))
    return bits | ((code & 8) << 12)


@triton.jit
def _bf16_of_codes(words):
    """BF16 bits, int32 [..., 8], of words [...] of eight codes, without their scales.

    For Triton's interpreter, which runs no assembly.
    """
    SHAPE: tl.constexpr = words.shape
    shifts = 4 * tl.arange(0, 8)
    codes = tl.reshape(words, (words.numel, 1)) >> tl.reshape(shifts, (1, 8))
    return tl.reshape(bf16_of(codes), SHAPE + (8,))


@triton.jit
def _bf16_of_four(words):
    """BF16 values of the four codes in the lower half of words, as two words of two, without
    scales."""
    magnitudes = words & 0x7777
    shape: tl.constexpr = words.shape
    # Each magnitude selects a byte from a table of eight: of the high bytes, then of the low bytes.
    high = permuted(tl.full(shape, 0x3F3F3F00, tl.int32), 0x40404040, magnitudes)
    low = permuted(tl.full(shape, -0x3F800000, tl.int32), -0x3F7FC000, magnitudes)
    signs = (words >> 3) & 0x1111
    high |= permuted(tl.full(shape, 0x8000, tl.int32), 0, signs)
    return permuted(low, high, 0x5140), permuted(low, high, 0x7362)


@triton.jit
def pairs(words, byte, BLOCK: tl.constexpr, INTERPRETED: tl.constexpr):
    """Decodes words [L, 8, n] of eight codes to words [L, 8, 4 n] of two BF16 values.

    byte: int32 [L, 8, 8 n / BLOCK], the E8M0 scales of blocks of BLOCK elements. A block whose
        scale is NaN (255) has codes 0 and is decoded to NaN.
    """
    L: tl.constexpr = words.shape[0]
    N: tl.constexpr = words.shape[2]
    # 2^(byte - 127), which is subnormal for 0. 255 gives Inf, and 0 times Inf is NaN.
    scale = tl.maximum(byte << 7, 0x40)
    scale = tl.broadcast_to(scale[:, :, :, None], (L, 8, N * 8 // BLOCK, BLOCK // 2))
    scale = tl.reshape(scale, (L, 8, N * 4))
    if INTERPRETED:
        low, high = tl.split(tl.reshape(_bf16_of_codes(words), (L, 8, N * 4, 2)))
        factor = (scale << 16).to(tl.float32, bitcast=True)
        low = ((low << 16).to(tl.float32, bitcast=True) * factor).to(tl.int32, bitcast=True)
        high = ((high << 16).to(tl.float32, bitcast=True) * factor).to(tl.int32, bitcast=True)
        return ((low >> 16) & 0xFFFF) | (high & -0x10000)
    p0, p1 = _bf16_of_four(words)
    p2, p3 = _bf16_of_four(words >> 16)
    values = tl.reshape(tl.join(tl.join(p0, p2), tl.join(p1, p3)), (L, 8, N * 4))
    return tl.inline_asm_elementwise(
        "fma.rn.bf16x2 $0, $1, $2, $3;",
        "=r,r,r,r",
        [values, scale * 0x10001, tl.full(values.shape, -0x7FFF8000, tl.int32)],  # adds -0
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )
