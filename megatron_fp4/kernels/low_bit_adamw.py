"""The kernel of an AdamW step whose moments are stored in few bits: decode, update, encode.

It reads and writes each element once, and makes no moment in float32 in memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_fp4.arithmetic.low_bit import LowBit, Owned, scale_key, stream_of
from megatron_fp4.arithmetic.moments import Moments
from megatron_fp4.arithmetic.philox import GROUP, Key, signed
from megatron_fp4.arithmetic.ramping import Adam
from megatron_fp4.kernels.float_blocks import decoded, encoded
from megatron_fp4.kernels.launch import INTERPRETED, NUMBER, Launch, kernel, planned, tiles
from megatron_fp4.kernels.philox import random16, random16_of_groups
from megatron_fp4.kernels.ramping import Scalars, number, scalars, stepped

_ROWS = 8
_BLOCK = 128  # of `Moments`, the columns of a tile


class Moment(NamedTuple):
    """A moment as it is stored: codes (`kernels.float_blocks`), their scales, and the stream of its
    random bits."""

    codes: Any
    scales: Any
    stream: Any


class Where(NamedTuple):
    """Which elements a launch updates.

    size: their number. shift: how many elements of the first one's block are before it. block: the
    number of that block in the rank's parameter, flattened. first_low, first_high, columns, stride:
    the parameter's `Place`, of which `first` has two words.
    """

    size: Any
    shift: Any
    block: Any
    first_low: Any
    first_high: Any
    columns: Any
    stride: Any


class StepAndSeed(NamedTuple):
    """What random bits depend on, beside element and stream: step, and both words of the seed."""

    step: Any
    seed_low: Any
    seed_high: Any


@triton.jit
def _place(local, where, SHARDED: tl.constexpr):
    """Where the elements of the rank's parameter lie in the unsharded one. local: int64."""
    first = (where.first_high.to(tl.int64) << 32) | (where.first_low.to(tl.int64) & 0xFFFFFFFF)
    if SHARDED:
        local = local // where.columns * where.stride + local % where.columns
    return first + local


@triton.jit
def _drawn(
    row, where, draws, stream,
    ROWS: tl.constexpr, SHARDED: tl.constexpr, GROUPED: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """The random integers in [0, 65536) by which the elements of ROWS blocks are rounded: int32
    [ROWS, 128].

    row: int64, the number of the first block in this rank's parameter, flattened. GROUPED: whether
    eight neighbouring elements, from each multiple of eight on, share a draw of random bits.
    """
    rows = (row + tl.arange(0, ROWS)[:, None]) * 128
    if not GROUPED:
        index = _place(rows + tl.arange(0, 128)[None, :], where, SHARDED)
        return random16(index, draws.step, stream, draws.seed_low, draws.seed_high)
    group = _place(rows + 8 * tl.arange(0, 16)[None, :], where, SHARDED) >> 3
    step, low, high = draws.step, draws.seed_low, draws.seed_high
    return random16_of_groups(group, step, stream, low, high, INTERPRETED)


@triton.jit
def _load(moment, place, inside, row, some, FORM: tl.constexpr):
    codes = tl.load(moment.codes + place, inside, 0)
    byte = row
    if FORM != "fp32" and FORM != "bf16":
        byte = tl.load(moment.scales + row, some, 0)
    return decoded(codes, byte.to(tl.int32), FORM)


@triton.jit
def _store(
    moment, x, random, place, inside, row, some,
    FORM: tl.constexpr, IS_SQUARE: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    if FORM == "fp32":
        tl.store(moment.codes + place, x, inside)
    else:
        codes, byte = encoded(tl.where(inside, x, 0.0), random, FORM, IS_SQUARE, STOCHASTIC)
        if FORM == "fp16":
            tl.store(moment.codes + place, codes.to(tl.int16).to(tl.float16, bitcast=True), inside)
        elif FORM == "bf16":
            tl.store(moment.codes + place, codes.to(tl.int16), inside)
        else:
            tl.store(moment.codes + place, codes.to(tl.uint8), inside)
        if FORM != "bf16":
            tl.store(moment.scales + row, byte.to(tl.uint8), some)


@kernel(fp_fusion=False)
def adamw_kernel(
    weights, gradients, first, second, where, draws, adam,
    M: tl.constexpr, V: tl.constexpr,
    M_DRAWS: tl.constexpr, V_DRAWS: tl.constexpr,
    SHIFTED: tl.constexpr, SHARDED: tl.constexpr, GROUPED: tl.constexpr,
    ROWS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """A step over the elements of `where`, in place; a program updates ROWS blocks.

    weights, gradients: float32. first, second: a `Moment` in form M, and one in form V, rounded by
    random bits if M_DRAWS and V_DRAWS. where, draws, adam: `Where`, `StepAndSeed` and `Scalars`.
    SHIFTED: whether `where.shift` is read; else it is 0. SHARDED, GROUPED: see `_drawn`.
    """
    start = tl.program_id(0).to(tl.int64) * ROWS
    row = start + tl.arange(0, ROWS)[:, None]
    place = row * 128 + tl.arange(0, 128)[None, :]
    if SHIFTED:
        place -= where.shift
        some = row * 128 < where.size + where.shift
    else:
        some = row * 128 < where.size
    inside = (place >= 0) & (place < where.size)
    weight = tl.load(weights + place, inside, 0.0) * number(adam.kept)
    gradient = tl.load(gradients + place, inside, 0.0)
    weight, m, v = stepped(
        weight,
        _load(first, place, inside, row, some, M),
        _load(second, place, inside, row, some, V),
        gradient, 1.0,
        number(adam.rest1), number(adam.beta2), number(adam.rest2), number(adam.root),
        number(adam.eps), number(adam.rate),
    )  # fmt: skip
    tl.store(weights + place, weight, inside)
    random = tl.zeros((ROWS, 128), tl.int32)
    block = where.block + start
    if M_DRAWS:
        random = _drawn(block, where, draws, first.stream, ROWS, SHARDED, GROUPED, INTERPRETED)
    _store(first, m, random, place, inside, row, some, M, False, M_DRAWS)
    if V_DRAWS:
        random = _drawn(block, where, draws, second.stream, ROWS, SHARDED, GROUPED, INTERPRETED)
    _store(second, v, random, place, inside, row, some, V, True, V_DRAWS)


def step(of: LowBit, gradient: Tensor, adam: Adam, seed: int) -> None:
    """`arithmetic.low_bit.step` of contiguous tensors on a GPU.

    Each operation of the update is rounded to float32, as in `kernels.ramping`. Codes and scales
    are the bits that the reference encodes the moments to.
    """
    size = of.weight.numel()
    if size == 0:
        return
    if not (of.weight.is_contiguous() and gradient.is_contiguous()):
        raise ValueError("the kernel of AdamW in few bits updates contiguous weights")
    where, sharded, grouped = _where(of.owned, size)
    programs = tiles(tiles(size + where.shift, _BLOCK), _ROWS)
    start = _launch(programs, of.moments, where.shift > 0, sharded, grouped)
    draws = StepAndSeed(*Key(seed, adam.step).signed_words)
    moments = [
        Moment(of.state[key], of.state.get(scale_key(key)), signed(stream_of(of.owned.name, key)))
        for key in of.moments.forms
    ]
    state = [each for moment in moments for each in moment]
    weight = of.weight.detach()
    start(weight.device, weight, gradient, *state, *where, *draws, *scalars(adam))


def _where(owned: Owned, size: int) -> tuple[Where, bool, bool]:
    """(Where, SHARDED, GROUPED) of a parameter with `size` elements."""
    first, columns, stride = owned.place.first, owned.place.columns, owned.place.stride
    block, shift = divmod(owned.start, _BLOCK)
    sharded = owned.start + size > columns
    if not sharded:
        columns = stride = GROUP
    grouped = not any(each % GROUP for each in (first, columns, stride))
    words = signed(first), first >> 32
    return Where(size, shift, block, *words, columns, stride), sharded, grouped


# How a moment is stored, by its name in `Moments`: the kernel's name for it, and the types of its
# codes and scales.
_FIRST: dict[str, tuple[str, torch.dtype]] = {
    "fp32": ("fp32", torch.float32),
    "bf16": ("bf16", torch.int16),
    "fp8": ("fp8", torch.uint8),
}
_SECOND = _FIRST | {"fp16": ("fp16", torch.float16), "fp8": ("root", torch.uint8)}


@planned
def _launch(programs: int, moments: Moments, shifted: bool, sharded: bool, grouped: bool) -> Launch:
    forms = _FIRST[moments.m], _SECOND[moments.v]
    draws = [moments.draws(key) for key in moments.forms]
    types = (
        torch.float32,
        torch.float32,
        *(Moment(dtype, torch.uint8, NUMBER) for _, dtype in forms),
        Where(*[NUMBER] * len(Where._fields)),
        StepAndSeed(*[NUMBER] * len(StepAndSeed._fields)),
        Scalars(*[NUMBER] * len(Scalars._fields)),  # type: ignore[arg-type]
    )
    constants = dict(
        M=forms[0][0], V=forms[1][0], M_DRAWS=draws[0], V_DRAWS=draws[1],
        SHIFTED=shifted, SHARDED=sharded, GROUPED=grouped, ROWS=_ROWS, INTERPRETED=INTERPRETED,
    )  # fmt: skip
    return Launch(adamw_kernel, (programs,), types, constants, num_warps=4)
