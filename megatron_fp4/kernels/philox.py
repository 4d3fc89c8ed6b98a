"""Philox-4x32-7 in Triton: the bits of megatron_fp4/philox.py."""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_fp4.kernels.encode import permuted


@triton.jit
def philox(index, step, stream, seed_low, seed_high):
    """Four words of Philox-4x32-7 for each 64-bit index."""
    c0 = index.to(tl.uint32)
    c1 = (index >> 32).to(tl.uint32)
    c2 = tl.zeros_like(c0) + step.to(tl.uint32)
    c3 = tl.zeros_like(c0) + stream.to(tl.uint32)
    k0 = seed_low.to(tl.uint32)
    k1 = seed_high.to(tl.uint32)
    for _ in tl.static_range(7):
        # One instruction gives both halves of a 64-bit product.
        first = c0.to(tl.uint64) * 0xD2511F53
        second = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (second >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (first >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = second.to(tl.uint32)
        c3 = first.to(tl.uint32)
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def rest16(index, step, stream, seed_low, seed_high, INTERPRETED: tl.constexpr):
    """256 (65535 - r) + 124 of random integers r in [0, 65536), eight for each group's index, along
    the last axis. Element j takes word j // 2 of the draw, the low half if j is even, else the high
    half. See `encode.stochastic`."""
    w0, w1, w2, w3 = philox(index, step, stream, seed_low, seed_high)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3)) ^ 0xFFFFFFFF  # [..., 2, 2]: w0 w1, w2 w3
    words = words.to(tl.int32, bitcast=True)
    if INTERPRETED:
        low, high = ((words & 0xFFFF) << 8) + 124, ((words >> 8) & 0xFFFF00) + 124
    else:
        added = tl.full(words.shape, 124, tl.int32)
        low, high = permuted(words, added, 0x5104), permuted(words, added, 0x5324)
    SHAPE: tl.constexpr = index.shape
    return tl.reshape(tl.join(low, high), SHAPE[:-1] + (SHAPE[-1] * 8,))
