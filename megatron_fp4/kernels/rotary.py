"""Rotary embedding in Triton, which reads query, key and value where a projection wrote them.

A projection writes the heads of a token in groups: n query heads, a key head and a value head. The
kernel rotates query and key, and writes the heads of each kind to a tensor of their own. In the
other direction it turns the gradients back and writes the projection's gradient. So no head is
moved by a kernel that does nothing else.

Numbers are rotated in float32 and rounded once. A value is copied.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_fp4.kernels.launch import Launch, kernel, planned, tiles

_PAIRS = 1024  # pairs of numbers that a program rotates at once


@triton.jit
def _move(source, target, inside, COLUMNS: tl.constexpr):
    """Copies COLUMNS elements from each address of `source` to that of `target`."""
    at = tl.arange(0, triton.next_power_of_2(COLUMNS))
    mask = inside & (at < COLUMNS)[None, :]
    tl.store(target + at[None, :], tl.load(source + at[None, :], mask=mask), mask=mask)


@triton.jit
def _turn(source, target, cos, sin, inside, ROTATED: tl.constexpr, TAIL: tl.constexpr):
    """Rotates a head of each token, from the addresses of `source` to those of `target`.

    Element i of the first ROTATED is rotated with the one half of them further. The TAIL elements
    after them are copied.
    """
    HALF: tl.constexpr = ROTATED // 2
    at = tl.arange(0, triton.next_power_of_2(HALF))
    mask = inside & (at < HALF)[None, :]
    low = tl.load(source + at[None, :], mask=mask).to(tl.float32)
    high = tl.load(source + HALF + at[None, :], mask=mask).to(tl.float32)
    dtype = target.dtype.element_ty
    tl.store(target + at[None, :], (low * cos - high * sin).to(dtype), mask=mask)
    tl.store(target + HALF + at[None, :], (high * cos + low * sin).to(dtype), mask=mask)
    if TAIL:
        _move(source + ROTATED, target + ROTATED, inside, TAIL)


@triton.jit
def _head(part_ptr, token, batch, strides, head):
    """The addresses of a head of each token in a tensor [sequence, batch, heads, d]."""
    token = token.to(tl.int64)
    at = token // batch * strides[0] + token % batch * strides[1]
    return (part_ptr + at + head.to(tl.int64) * strides[2])[:, None]


@kernel(fp_fusion=True)
def rotary_kernel(
    mixed_ptr,
    query_ptr,
    key_ptr,
    value_ptr,
    cos_ptr,
    sin_ptr,
    tokens,
    batch,
    groups,
    query_strides,
    key_strides,
    value_strides,
    QUERIES: tl.constexpr,
    D: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_KEYS: tl.constexpr,
    BACKWARD: tl.constexpr,
):
    """Splits `mixed` and rotates its query and key; if BACKWARD, turns them back and joins them.

    mixed: [tokens, groups, heads of a group, D]: QUERIES query heads, then, if HAS_KEYS, a key and
    a value. query: [sequence, batch, groups * QUERIES, D]. key, value: [sequence, batch, groups,
    D]. *_strides: of the first three axes. cos, sin: float32 [tokens, ROTATED // 2].
    A program takes BLOCK tokens and a group.
    """
    HALF: tl.constexpr = ROTATED // 2
    HEADS: tl.constexpr = QUERIES + 2 if HAS_KEYS else QUERIES
    TAIL: tl.constexpr = D - ROTATED
    token, group = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1)
    inside = (token < tokens)[:, None]
    at = tl.arange(0, triton.next_power_of_2(HALF))
    angle, mask = (token * HALF)[:, None] + at[None, :], inside & (at < HALF)[None, :]
    cos = tl.load(cos_ptr + angle, mask=mask, other=0.0)
    sin = tl.load(sin_ptr + angle, mask=mask, other=0.0)
    if BACKWARD:
        sin = -sin
    mixed = (mixed_ptr + (token.to(tl.int64) * groups + group) * (HEADS * D))[:, None]
    for i in range(QUERIES):
        part = _head(query_ptr, token, batch, query_strides, group * QUERIES + i)
        if BACKWARD:
            _turn(part, mixed + i * D, cos, sin, inside, ROTATED, TAIL)
        else:
            _turn(mixed + i * D, part, cos, sin, inside, ROTATED, TAIL)
    if HAS_KEYS:
        key = _head(key_ptr, token, batch, key_strides, group)
        value = _head(value_ptr, token, batch, value_strides, group)
        if BACKWARD:
            _turn(key, mixed + QUERIES * D, cos, sin, inside, ROTATED, TAIL)
            _move(value, mixed + (QUERIES + 1) * D, inside, D)
        else:
            _turn(mixed + QUERIES * D, key, cos, sin, inside, ROTATED, TAIL)
            _move(mixed + (QUERIES + 1) * D, value, inside, D)


def split(mixed: Tensor, d: int, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    """(query, key, value) of `mixed`, query and key rotated, each of memory of its own.

    mixed: [sequence, batch, groups, (n + 2) * d] of any dtype, for n query heads in a group; or
    [..., d], heads that are all rotated, for which the result is (heads,).
    cos, sin: float32 [sequence * batch, rotated elements / 2], contiguous.
    """
    mixed = mixed.contiguous()
    *tokens, groups, elements = mixed.shape
    heads = elements // d
    counts = [1] if heads == 1 else [heads - 2, 1, 1]
    parts = tuple(mixed.new_empty((*tokens, groups * n, d)) for n in counts)
    _run(mixed, parts, cos, sin, backward=False)
    return parts


def join(parts: Sequence[Tensor], cos: Tensor, sin: Tensor) -> Tensor:
    """The gradient of `mixed` from those of the results of `split`, all of one dtype."""
    parts = [part if part.stride(-1) == 1 else part.contiguous() for part in parts]
    sequence, batch, _, d = parts[0].shape
    groups = parts[-1].shape[2]
    heads = sum(part.shape[2] for part in parts) // groups
    mixed = parts[0].new_empty((sequence, batch, groups, heads * d))
    _run(mixed, parts, cos, sin, backward=True)
    return mixed


def _run(mixed: Tensor, parts: Sequence[Tensor], cos: Tensor, sin: Tensor, backward: bool) -> None:
    if not mixed.numel():
        return
    sequence, batch, groups, elements = mixed.shape
    sizes = sequence * batch, batch, groups
    strides = tuple(part.stride()[:3] for part in parts)
    heads, d = elements // parts[0].shape[3], parts[0].shape[3]
    launch = _launch(mixed.dtype, sizes, strides, heads, d, 2 * cos.shape[1], backward)
    flat = [stride for each in _three(strides) for stride in each]
    launch(mixed.device, mixed, *_three(parts), cos, sin, *sizes, *flat)


def _three[T](given: Sequence[T]) -> Sequence[T]:
    """One item each for query, key and value. If only the query's is given, it is repeated: the
    kernel has three arguments, and reads the first alone."""
    return given if len(given) > 1 else [given[0]] * 3


@planned
def _launch(
    dtype: torch.dtype,
    sizes: tuple[int, int, int],
    strides: tuple[tuple[int, ...], ...],
    heads: int,
    d: int,
    rotated: int,
    backward: bool,
) -> Launch:
    """sizes: tokens, batch, groups. strides: of query, key and value, or of the query alone.
    heads: of a group."""
    has_keys = len(strides) > 1
    block = max(_PAIRS // triton.next_power_of_2(rotated // 2), 1)
    types = *[dtype] * 4, torch.float32, torch.float32, *sizes, *_three(strides)
    constants = dict(
        QUERIES=heads - 2 if has_keys else heads, D=d, ROTATED=rotated, BLOCK=block,
        HAS_KEYS=has_keys, BACKWARD=backward,
    )  # fmt: skip
    return Launch(rotary_kernel, (tiles(sizes[0], block), sizes[2]), types, constants, num_warps=4)
