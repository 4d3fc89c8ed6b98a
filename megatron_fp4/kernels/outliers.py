"""Tokens clamped to two of their quantiles, and what that took off, in Triton: `OutlierClamp.split`
without a sort (docs/numerics.md, Outlier clamp).

BF16 has 2^16 numbers. As integers in their order, an order statistic is found bit by bit: the next
bit is set where no more elements than its rank lie below. One program has a row in its registers,
counts for both ends at once, and writes the few elements that were clamped by their running count.
"""

from __future__ import annotations

import struct

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_fp4.arithmetic.outliers import OutlierClamp, Residual, index_dtype, ranks
from megatron_fp4.kernels.encode import bf16_bits
from megatron_fp4.kernels.launch import kernel, on, run

WIDEST = torch.iinfo(torch.int16).max  # features: two counts share a word
PER_WARP = 1024  # elements, 32 a thread


@triton.jit
def _number(bits):
    """float32 of BF16's bits."""
    return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def _key(bits):
    """Integers of 16 bits in the order of the numbers, any NaN last. -0 comes before 0: as
    neighbours of a quantile the two are worth the same."""
    key = tl.where(bits < 0x8000, bits + 0x8000, 0xFFFF - bits)
    return tl.where((bits & 0x7FFF) > 0x7F80, 0xFFFF, key)


@triton.jit
def _keys(bits, there):
    """`_key` of a row's elements, and above all of those what lies beyond the row."""
    return tl.where(there, _key(bits), 0x10000)


@triton.jit
def _number_of(key):
    """float64 of the number that has a key."""
    return _number(tl.where(key < 0x8000, 0xFFFF - key, key - 0x8000)).to(tl.float64)


@triton.jit
def _counted(low, high):
    """How many elements are so, of two conditions, in the halves of one word."""
    return tl.sum(low.to(tl.int32) + (high.to(tl.int32) << 16), 0)


@triton.jit
def _next(keys, key, count, rank):
    """The key of that rank, which is that of `key` or the next; count: of keys up to `key`."""
    larger = tl.min(tl.where(keys > key, keys, 0x10000), 0)
    return tl.where(count > rank, key, larger)


@triton.jit
def _between(first, second, weight):
    """The bound between two keys, float32. weight: the bits of a float64, which Triton would
    round to float32."""
    a, b = _number_of(first), _number_of(second)
    return (a + (b - a) * weight.to(tl.int64).to(tl.float64, bitcast=True)).to(tl.float32)


@triton.jit
def _own_zeros(clamped, bits):
    """The bits that were clamped; a zero that is clamped to a zero keeps its own sign."""
    return tl.where(_number(clamped) == _number(bits), bits, clamped)


@triton.jit
def _clamped(bits, low, high, invalid):
    """BF16's bits clamped to float32 bounds; NaN where the bounds are invalid."""
    x = _number(bits)
    clamped = tl.where(x < low, low, x)
    clamped = bf16_bits(tl.where(clamped > high, high, clamped))
    clamped = _own_zeros(clamped, bits)
    return tl.where(invalid, 0x7FC0, clamped)


@triton.jit
def _taken_off(bits, clamped):
    """What clamping took off, float32; NaN for an infinite number that stays."""
    return _number(bits) - _number(clamped)


@triton.jit
def _slots(is_outlier):
    """The place of each outlier among those of its row, from 0."""
    return tl.cumsum(is_outlier.to(tl.int32), 0) - 1


@triton.jit
def _first(at, taken):
    """What was taken off a row's first element."""
    return tl.sum(tl.where(at == 0, taken.to(tl.int32), 0), 0)


_PLAIN = ["low_below", "low_above", "low_weight", "high_below", "high_above", "high_weight"]


# The contract's product is rounded before it is added to.
@kernel(fp_fusion=False, do_not_specialize=[*_PLAIN, "n_slots"])
def split_kernel(
    x_ptr,
    clamped_ptr,
    values_ptr,
    places_ptr,
    low_below,
    low_above,
    low_weight,
    high_below,
    high_above,
    high_weight,
    n_slots,
    n_features,
    FEATURES: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """x, clamped [rows, n_features]; values, places [rows, n_slots]: BF16's bits, and int16."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * n_features
    clamped_ptr += row * n_features
    values_ptr += row * n_slots
    places_ptr += row * n_slots
    at = tl.arange(0, FEATURES)
    there = at < n_features
    bits = tl.load(x_ptr + at, mask=there, other=0).to(tl.int32) & 0xFFFF
    keys = _keys(bits, there)
    low = tl.full([], 0, tl.int32)
    high = tl.full([], 0, tl.int32)
    for i in range(16):
        bit = 0x8000 >> i
        count = _counted(keys < (low | bit), keys < (high | bit))
        low = tl.where((count & 0xFFFF) <= low_below, low | bit, low)
        high = tl.where((count >> 16) <= high_below, high | bit, high)
    count = _counted(keys <= low, keys <= high)
    low = _between(low, _next(keys, low, count & 0xFFFF, low_above), low_weight)
    high = _between(high, _next(keys, high, count >> 16, high_above), high_weight)
    invalid = (low != low) | (high != high)
    clamped = _clamped(bits, low, high, invalid)
    tl.store(clamped_ptr + at, clamped.to(tl.int16), mask=there)
    difference = tl.where(invalid, 0.0, _taken_off(bits, clamped))
    taken = bf16_bits(difference).to(tl.int16)
    is_outlier = there & (difference != 0.0)
    slot = _slots(is_outlier)
    live = is_outlier & (slot < n_slots)
    tl.store(values_ptr + slot, taken, mask=live)
    tl.store(places_ptr + slot, at.to(tl.int16), mask=live)
    # Slots that are left repeat the first element, clamped or not: all elements may be.
    first = _first(at, taken)
    slots = tl.arange(0, SLOTS)
    left = (slots >= tl.sum(is_outlier.to(tl.int32), 0)) & (slots < n_slots)
    tl.store(values_ptr + slots, first.to(tl.int16), mask=left)
    tl.store(places_ptr + slots, 0, mask=left)


def split(x: Tensor, clamp: OutlierClamp) -> tuple[Tensor, Residual]:
    """`clamp.split(x)` for x [tokens, features]. The residual's places ascend."""
    x = x.contiguous()
    tokens, features = x.shape
    slots = 2 * clamp.kept(features)
    clamped, values = torch.empty_like(x), x.new_empty(tokens, slots)
    places = x.new_empty(tokens, slots, dtype=index_dtype(features))
    low, high = ranks(1 - clamp.alpha, features), ranks(clamp.alpha, features)
    block = triton.next_power_of_2(features)
    with on(x):
        run(
            split_kernel,
            (tokens,),
            [
                x.view(torch.int16),
                clamped.view(torch.int16),
                values.view(torch.int16),
                places,
                *low[:2],
                _float64_bits(low[2]),
                *high[:2],
                _float64_bits(high[2]),
                slots,
                features,
            ],
            FEATURES=block,
            SLOTS=triton.next_power_of_2(slots),
            num_warps=warps(block),
        )
    return clamped, Residual(values, places, "token", x.shape)


def warps(block: int) -> int:
    """Of a program with a row of that many elements."""
    return min(max(block // PER_WARP, 1), 16)


def _float64_bits(x: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", x))[0])
