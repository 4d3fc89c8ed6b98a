"""Clamps each token to two of its quantiles, in Triton, and returns what that changed, sparsely.

This is `OutlierClamp.split` without a sort; docs/numerics.md, Outlier clamp, defines it.

BF16 has 2^16 numbers. They are mapped to integers in the same order (keys), so that the element of
a given rank is found bit by bit, from the highest bit: a bit is set if no more elements than the
rank lie below the number with this key. One program holds a row in its registers and searches for
both quantiles at once. It then stores the few elements that were clamped, each at the place given
by a running count.

A register holds two neighbours of a row, and one instruction compares both with a bound. GPUs
before compute capability 9.0 have no such instructions for BF16 (NATIVE is False there, and in the
interpreter).
"""

from __future__ import annotations

import struct
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_fp4.arithmetic.outliers import OutlierClamp, Residual, index_dtype, ranks
from megatron_fp4.kernels.encode import bf16_bits
from megatron_fp4.kernels.launch import INTERPRETED, Launch, in_words, kernel, planned

WIDEST = torch.iinfo(torch.int16).max  # the most features, since two counts share a word
PER_WARP = 2048  # elements: 64 for each thread
NAN = tl.constexpr(0x7FFF)  # the bits of a NaN
ABOVE_ALL = tl.constexpr(0xFF80)  # the largest key of a number, which is Inf


@triton.jit
def _number(bits):
    """float32 values of BF16 bits, which are the low half of int32."""
    return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def _high_number(bits):
    """float32 values of the BF16 bits in the high half of int32."""
    return (bits & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def _bits_of(key):
    """The BF16 bits of the number with this key.

    Keys are integers from 0 to 0xFFFF in the order of the numbers. The lowest and the highest ones
    are those of NaN.
    """
    return tl.where(key < 0x8000, 0xFFFF - key, key - 0x8000)


@triton.jit
def _padded(words, there):
    """Words of two elements; beyond the row's end those of two NaN, which no bound counts as less
    than itself."""
    return tl.where(there, words, NAN * 0x10001)


@triton.jit
def _holds(x, bound, OP: tl.constexpr):
    """Whether numbers are less than a bound ("lt"), equal at most ("le"), greater ("gt"), or not
    equal ("neu", true for NaN, for which the others are false)."""
    if OP == "lt":
        return x < bound
    if OP == "le":
        return x <= bound
    if OP == "gt":
        return x > bound
    return x != bound


@triton.jit
def _mask(words, bound, OP: tl.constexpr, NATIVE: tl.constexpr):
    """Words with 0xFFFF in each half whose number `_holds`, else 0. bound: BF16 bits."""
    if NATIVE:
        asm: tl.constexpr = "set." + OP + ".u32.bf16x2 $0, $1, $2;"
        return tl.inline_asm_elementwise(
            asm, "=r,r,r", [words, bound | (bound << 16)], dtype=tl.int32, is_pure=True, pack=1
        )
    other = _number(bound)
    low = _holds(_number(words), other, OP)
    high = _holds(_high_number(words), other, OP)
    return tl.where(low, 0xFFFF, 0) | tl.where(high, -0x10000, 0)


@triton.jit
def _minus(a, b, NATIVE: tl.constexpr):
    """The differences of two BF16 numbers in each word, rounded to BF16."""
    if NATIVE:
        return tl.inline_asm_elementwise(
            "sub.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
        )
    low = bf16_bits(_number(a) - _number(b))
    high = bf16_bits(_high_number(a) - _high_number(b))
    return low | (high << 16)


@triton.jit
def _count(words, bound, OP: tl.constexpr, NATIVE: tl.constexpr):
    """The number of elements for which `_holds` is true. bound: BF16 bits."""
    if NATIVE:
        mask = _mask(words, bound, OP, NATIVE)
        # A true low half adds 2^16 - 1 and a true high half subtracts 2^16, modulo 2^32.
        total = -tl.sum(mask, 0)
        low = total & 0xFFFF
        return 2 * low + ((total - low) >> 16)
    other = _number(bound)
    low, high = _holds(_number(words), other, OP), _holds(_high_number(words), other, OP)
    return tl.sum(low.to(tl.int32) + high.to(tl.int32), 0)


@triton.jit
def _below(words, key, ordered, NATIVE: tl.constexpr):
    """The number of elements whose key is lower. ordered: the number of elements that are no NaN,
    whose keys count as the highest ones."""
    return tl.where(key > ABOVE_ALL, ordered, _count(words, _bits_of(key), "lt", NATIVE))


@triton.jit
def _next(words, bits, ordered, rank, NATIVE: tl.constexpr):
    """The element at `rank` (from 0): the number with these bits, or the next larger one."""
    count = _count(words, bits, "le", NATIVE)
    mask = _mask(words, bits, "gt", NATIVE)
    larger = (words & mask) | (0x7F807F80 & ~mask)  # Inf where it is not larger
    larger = tl.min(tl.minimum(_number(larger), _high_number(larger)), 0)
    larger = tl.where(ordered > rank, larger, float("nan"))
    return tl.where(count > rank, _number(bits), larger)


@triton.jit
def _wide(x):
    """Float64 numbers, in which a quantile is computed."""
    return x.to(tl.float64)


@triton.jit
def _between(first, second, weight):
    """A quantile, float32: first + weight (second - first) in float64.

    weight: the bits of a float64, as an integer; see Quantile.
    """
    a, b = _wide(first), _wide(second)
    return (a + (b - a) * tl.full([], weight, tl.int64).to(tl.float64, bitcast=True)).to(tl.float32)


@triton.jit
def _either_nan(low, high):
    """Whether a bound is NaN."""
    return (low != low) | (high != high)


@triton.jit
def _clamped(words, low, high, NATIVE: tl.constexpr):
    """Words of two BF16 numbers, clamped to bounds, which are BF16 bits.

    The bounds are the quantiles rounded to BF16: a number lies beyond a quantile if it lies beyond
    the rounded one, or it equals the latter. A zero that is clamped to a zero keeps its own sign.
    """
    mask = _mask(words, low, "lt", NATIVE)
    words = (words & ~mask) | ((low | (low << 16)) & mask)
    mask = _mask(words, high, "gt", NATIVE)
    return (words & ~mask) | ((high | (high << 16)) & mask)


@triton.jit
def _slots(count, LANES: tl.constexpr):
    """The index of the first outlier of each word among the outliers of its row, from 0.

    count: the numbers of outliers in the words. The outliers of the words i, i + LANES, ... come
    one after the other. These words are those of one thread, so that the threads exchange one
    number each, and not one for each word.
    """
    WORDS: tl.constexpr = count.shape[0]
    own = tl.reshape(count, (WORDS // LANES, LANES))
    each = tl.sum(own, 0)
    before = tl.cumsum(each, 0) - each
    return tl.reshape(before[None, :] + tl.cumsum(own, 0) - own, (WORDS,))


@triton.jit
def _first(at, words):
    """The low half of the word at index 0. at: the index of each word."""
    return tl.sum(tl.where(at == 0, words & 0xFFFF, 0), 0)


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
    n_words,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    WORDS: tl.constexpr,
    SLOTS: tl.constexpr,
    LANES: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Clamps each row of x to two quantiles, and stores the differences of the elements it changed.

    x_ptr, clamped_ptr: words of two BF16 numbers, int32 [rows, n_words].
    values_ptr: BF16 bits, int16 [rows, n_slots], x minus clamped x for the changed elements.
    places_ptr: int16 [rows, n_slots], the indices of these elements in the row.
    LOW, HIGH: the lower and the upper Quantile.
    WORDS, SLOTS: n_words and n_slots, rounded up to powers of two. LANES: see `_slots`.

    Unused slots repeat the difference of the row's first element, with the index 0. A row with a
    bound that is NaN becomes NaN, and its differences are 0. Each program clamps one row.
    """
    row = tl.program_id(0).to(tl.int64)
    values_ptr += row * n_slots
    places_ptr += row * n_slots
    at = tl.arange(0, WORDS)
    there = at < n_words
    words = _padded(tl.load(x_ptr + row * n_words + at, mask=there, other=0), there)
    ordered = _count(words, tl.full([], 0x7F80, tl.int32), "le", NATIVE)
    low = tl.full([], 0, tl.int32)
    high = tl.full([], 0, tl.int32)
    for i in range(16):
        bit = 0x8000 >> i
        low = tl.where(_below(words, low | bit, ordered, NATIVE) <= LOW.BELOW, low | bit, low)
        high = tl.where(_below(words, high | bit, ordered, NATIVE) <= HIGH.BELOW, high | bit, high)
    first, second = _bits_of(low), _bits_of(high)
    above = _next(words, first, ordered, LOW.ABOVE, NATIVE)
    low = _between(_number(first), above, LOW.WEIGHT)
    above = _next(words, second, ordered, HIGH.ABOVE, NATIVE)
    high = _between(_number(second), above, HIGH.WEIGHT)
    invalid = _either_nan(low, high)
    clamped = _clamped(words, bf16_bits(low), bf16_bits(high), NATIVE)
    # It is NaN for an infinite number that is not clamped.
    difference = tl.where(there, _minus(words, clamped, NATIVE), 0)
    difference = tl.where(invalid, 0, difference)
    clamped = tl.where(invalid, 0x7FC07FC0, clamped)
    tl.store(clamped_ptr + row * n_words + at, clamped, mask=there)
    mask = _mask(difference, tl.full([], 0, tl.int32), "neu", NATIVE)
    is_low, is_high = mask & 1, (mask >> 16) & 1
    count = is_low + is_high
    slot = _slots(count, LANES)
    live = (is_low != 0) & (slot < n_slots)
    tl.store(values_ptr + slot, difference.to(tl.int16), mask=live)
    tl.store(places_ptr + slot, (2 * at).to(tl.int16), mask=live)
    slot += is_low
    live = (is_high != 0) & (slot < n_slots)
    tl.store(values_ptr + slot, (difference >> 16).to(tl.int16), mask=live)
    tl.store(places_ptr + slot, (2 * at + 1).to(tl.int16), mask=live)
    # Unused slots repeat the difference of the first element, whether or not it was clamped. An
    # element that was not clamped, with the difference 0, need not exist.
    rest = _first(at, difference)
    slots = tl.arange(0, SLOTS)
    left = (slots >= tl.sum(count, 0)) & (slots < n_slots)
    tl.store(values_ptr + slots, rest.to(tl.int16), mask=left)
    tl.store(places_ptr + slots, 0, mask=left)


def split(x: Tensor, clamp: OutlierClamp) -> tuple[Tensor, Residual]:
    """`clamp.split(x)` for BF16 x [tokens, features], whose number of features is even.

    Unused slots of a row come last, with the place 0.
    """
    x = in_words(x)
    tokens, features = x.shape
    slots = 2 * clamp.kept(features)
    clamped, values = torch.empty_like(x), x.new_empty(tokens, slots)
    places = x.new_empty(tokens, slots, dtype=index_dtype(features))
    launch = _launch(tokens, features, clamp, _is_native(x.device))
    launch(x.device, x, clamped, values, places, slots, features // 2)
    return clamped, Residual(values, places, "token", x.shape)


@cache
def _is_native(device: torch.device) -> bool:
    """Whether a GPU compares two BF16 numbers by one instruction."""
    if INTERPRETED or device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


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
    return max(block // PER_WARP, 1)


@planned
def _launch(tokens: int, features: int, clamp: OutlierClamp, native: bool) -> Launch:
    slots, block = 2 * clamp.kept(features), triton.next_power_of_2(features)
    constants = dict(
        LOW=_quantile(1 - clamp.alpha, features),
        HIGH=_quantile(clamp.alpha, features),
        WORDS=block // 2,
        SLOTS=triton.next_power_of_2(slots),
        LANES=min(block // 2, 128 * warps(block)),
        NATIVE=native,
    )
    types = torch.int32, torch.int32, torch.int16, torch.int16, slots, features // 2
    return Launch(split_kernel, (tokens,), types, constants, num_warps=warps(block))


def _quantile(q: float, features: int) -> Quantile:
    below, above, weight = ranks(q, features)
    return Quantile(below, above, _bits(weight))


def _bits(x: float) -> int:
    """The bits of x as a float64, as a signed integer."""
    return int(struct.unpack("<q", struct.pack("<d", x))[0])
