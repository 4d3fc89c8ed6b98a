"""Clamps each token to two of its quantiles, in Triton, and returns what that changed, sparsely.

This is `OutlierClamp.split` without a sort; docs/numerics.md, Outlier clamp, defines it.

BF16 has 2^16 numbers. They are mapped to integers in the same order, so that the element of a given
rank is found bit by bit, from the highest bit: a bit is set if no more elements than the rank lie
below the integer with this bit. One program holds a row in its registers and searches for both
quantiles at once. It then stores the few elements that were clamped, each at the place given by a
running count.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_fp4.arithmetic.outliers import OutlierClamp, Residual, index_dtype, ranks
from megatron_fp4.kernels.encode import bf16_bits
from megatron_fp4.kernels.launch import Launch, kernel, planned

WIDEST = torch.iinfo(torch.int16).max  # the most features, since two counts share a word
PER_WARP = 1024  # elements: 32 for each thread


@triton.jit
def _number(bits):
    """float32 values of BF16 bits (int32)."""
    return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def _key(bits):
    """Integers from 0 to 0xFFFF in the order of BF16 numbers, from BF16 bits; 0xFFFF for any NaN.

    -0 comes before 0, which does not change the value of a quantile.
    """
    key = tl.where(bits < 0x8000, bits + 0x8000, 0xFFFF - bits)
    return tl.where((bits & 0x7FFF) > 0x7F80, 0xFFFF, key)


@triton.jit
def _keys(bits, there):
    """`_key` of a row's elements, and 0x10000, which is above all keys, beyond the end of the row.

    there: whether an element is in the row.
    """
    return tl.where(there, _key(bits), 0x10000)


@triton.jit
def _number_of(key):
    """The float64 value of the number with this key; see `_key`."""
    return _number(tl.where(key < 0x8000, 0xFFFF - key, key - 0x8000)).to(tl.float64)


@triton.jit
def _counted(low, high):
    """The numbers of elements for which `low` and `high` are true, in the low and the high half of
    a word."""
    return tl.sum(low.to(tl.int32) + (high.to(tl.int32) << 16), 0)


@triton.jit
def _next(keys, key, count, rank):
    """The key of the element at `rank` (from 0), which is `key` or the next larger one.

    keys: of all elements. count: how many keys are not above `key`.
    """
    larger = tl.min(tl.where(keys > key, keys, 0x10000), 0)
    return tl.where(count > rank, key, larger)


@triton.jit
def _between(first, second, weight):
    """A quantile, float32: first + weight (second - first) in float64, of the values of two keys.

    weight: the bits of a float64, as an integer; see Quantile.
    """
    a, b = _number_of(first), _number_of(second)
    return (a + (b - a) * tl.full([], weight, tl.int64).to(tl.float64, bitcast=True)).to(tl.float32)


@triton.jit
def _own_zeros(clamped, bits):
    """`clamped`, but a zero that is clamped to a zero keeps its own sign. Both are BF16 bits."""
    return tl.where(_number(clamped) == _number(bits), bits, clamped)


@triton.jit
def _clamped(bits, low, high, invalid):
    """BF16 bits, clamped to the float32 bounds `low` and `high`; NaN where `invalid`."""
    x = _number(bits)
    clamped = tl.where(x < low, low, x)
    clamped = bf16_bits(tl.where(clamped > high, high, clamped))
    clamped = _own_zeros(clamped, bits)
    return tl.where(invalid, 0x7FC0, clamped)


@triton.jit
def _taken_off(bits, clamped):
    """The difference between numbers and the clamped numbers, float32, from BF16 bits.

    It is NaN for an infinite number that is not clamped.
    """
    return _number(bits) - _number(clamped)


@triton.jit
def _slots(is_outlier):
    """The index of each outlier among the outliers of its row, from 0."""
    return tl.cumsum(is_outlier.to(tl.int32), 0) - 1


@triton.jit
def _first(at, taken):
    """The element of `taken` at index 0. at: the index of each element."""
    return tl.sum(tl.where(at == 0, taken.to(tl.int32), 0), 0)


class Quantile(NamedTuple):
    """A quantile lies between the elements with the ranks BELOW and ABOVE, a fraction of the way
    from the first to the second (`outliers.ranks`). WEIGHT: the bits of this fraction in float64,
    as an integer, since Triton would round a float to float32."""

    BELOW: int
    ABOVE: int
    WEIGHT: int


# docs/numerics.md rounds the product in a quantile before the sum.
@kernel(fp_fusion=False)
def split_kernel(
    x_ptr,
    clamped_ptr,
    values_ptr,
    places_ptr,
    n_slots,
    n_features,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    FEATURES: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Clamps each row of x to two quantiles, and stores the differences of the elements it changed.

    x_ptr, clamped_ptr: BF16 bits, int16 [rows, n_features].
    values_ptr: BF16 bits, int16 [rows, n_slots], x minus clamped x for the changed elements.
    places_ptr: int16 [rows, n_slots], the indices of these elements in the row, ascending.
    LOW, HIGH: the lower and the upper Quantile.
    FEATURES, SLOTS: n_features and n_slots, rounded up to powers of two.

    Unused slots repeat the difference of the row's first element, with the index 0. A row with a
    bound that is NaN becomes NaN, and its differences are 0. Each program clamps one row.
    """
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
        low = tl.where((count & 0xFFFF) <= LOW.BELOW, low | bit, low)
        high = tl.where((count >> 16) <= HIGH.BELOW, high | bit, high)
    count = _counted(keys <= low, keys <= high)
    low = _between(low, _next(keys, low, count & 0xFFFF, LOW.ABOVE), LOW.WEIGHT)
    high = _between(high, _next(keys, high, count >> 16, HIGH.ABOVE), HIGH.WEIGHT)
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
    # Unused slots repeat the difference of the first element, whether or not it was clamped. An
    # element that was not clamped, with the difference 0, need not exist.
    first = _first(at, taken)
    slots = tl.arange(0, SLOTS)
    left = (slots >= tl.sum(is_outlier.to(tl.int32), 0)) & (slots < n_slots)
    tl.store(values_ptr + slots, first.to(tl.int16), mask=left)
    tl.store(places_ptr + slots, 0, mask=left)


def split(x: Tensor, clamp: OutlierClamp) -> tuple[Tensor, Residual]:
    """`clamp.split(x)` for BF16 x [tokens, features].

    The places of the changed elements ascend in each row; unused slots follow, with the place 0.
    """
    x = x.contiguous()
    tokens, features = x.shape
    slots = 2 * clamp.kept(features)
    clamped, values = torch.empty_like(x), x.new_empty(tokens, slots)
    places = x.new_empty(tokens, slots, dtype=index_dtype(features))
    _launch(tokens, features, clamp)(x.device, x, clamped, values, places, slots, features)
    return clamped, Residual(values, places, "token", x.shape)


@kernel(fp_fusion=True)
def dense_kernel(
    values_ptr,
    places_ptr,
    out_ptr,
    n_slots,
    n_features,
    FEATURES: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Writes each row of a residual with all its zeros.

    values_ptr, places_ptr: see `split_kernel`. out_ptr: BF16 bits, int16 [rows, n_features].
    FEATURES, SLOTS: n_features and n_slots, rounded up to powers of two.
    """
    row = tl.program_id(0).to(tl.int64)
    out_ptr += row * n_features
    at, slots = tl.arange(0, FEATURES), tl.arange(0, SLOTS)
    used = slots < n_slots
    values = tl.load(values_ptr + row * n_slots + slots, mask=used, other=0)
    places = tl.load(places_ptr + row * n_slots + slots, mask=used, other=0)
    tl.store(out_ptr + at, tl.zeros((FEATURES,), tl.int16), mask=at < n_features)
    tl.debug_barrier()  # other threads have stored the zeros
    tl.store(out_ptr + places.to(tl.int32), values, mask=used)


def dense(residual: Residual) -> Tensor:
    """`residual.dense()` of BF16 [tokens, features], for the scope token."""
    tokens, features = residual.shape
    slots = residual.values.shape[1]
    out = residual.values.new_empty(tokens, features)
    launch = _dense_launch(tokens, features, slots)
    launch(out.device, residual.values, residual.places, out, slots, features)
    return out


@planned
def _dense_launch(tokens: int, features: int, slots: int) -> Launch:
    block = triton.next_power_of_2(features)
    constants = dict(FEATURES=block, SLOTS=triton.next_power_of_2(slots))
    types = *(torch.int16,) * 3, slots, features
    return Launch(dense_kernel, (tokens,), types, constants, num_warps=warps(block))


def warps(block: int) -> int:
    """The number of warps of a program that holds a row of `block` elements."""
    return min(max(block // PER_WARP, 1), 16)


@planned
def _launch(tokens: int, features: int, clamp: OutlierClamp) -> Launch:
    slots, block = 2 * clamp.kept(features), triton.next_power_of_2(features)
    constants = dict(
        LOW=_quantile(1 - clamp.alpha, features),
        HIGH=_quantile(clamp.alpha, features),
        FEATURES=block,
        SLOTS=triton.next_power_of_2(slots),
    )
    types = *(torch.int16,) * 4, slots, features
    return Launch(split_kernel, (tokens,), types, constants, num_warps=warps(block))


def _quantile(q: float, features: int) -> Quantile:
    below, above, weight = ranks(q, features)
    return Quantile(below, above, _bits(weight))


def _bits(x: float) -> int:
    """The bits of x as a float64, as a signed integer."""
    return int(struct.unpack("<q", struct.pack("<d", x))[0])
