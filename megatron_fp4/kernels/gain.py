"""Block scales that give each group of elements a gain of 1, in Triton (MS-EDEN, arXiv 2601.22813).

The bits are those of arithmetic/gain.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_fp4.kernels.float_scales import (
    code_of,
    rounded,
    scale_of,
    spread,
    stochastic_code,
)


@triton.jit
def _firsts(of_elements, ALONG: tl.constexpr):
    """Of values of elements, int32 [rows, columns], those of the first element of each block of
    ALONG columns: int32 [rows, columns / ALONG]."""
    R: tl.constexpr = of_elements.shape[0]
    C: tl.constexpr = of_elements.shape[1] // ALONG
    is_first = tl.arange(0, ALONG)[None, None, :] == 0
    return tl.sum(tl.where(is_first, tl.reshape(of_elements, (R, C, ALONG)), 0), 2)


@triton.jit
def correction(v, scaled, scale, live, ALONG: tl.constexpr, GROUP: tl.constexpr):
    """<x, x> / <x, q> of each group of GROUP elements of a row: float64 [rows, columns / GROUP].

    v: float32 [rows, columns], x. scaled: its magnitudes in units of the block scales; rounded they
    are q. scale: float64 [rows, columns / ALONG], the block scales times the tensor scale. live: of
    this shape, 1 for a block that is finite, else 0; other blocks count nowhere. The result is 1
    where all of a group's elements are rounded to zero.
    """
    R: tl.constexpr = v.shape[0]
    G: tl.constexpr = v.shape[1] // GROUP
    counts = spread(live, 1, ALONG) != 0
    x = tl.where(counts, tl.abs(v), 0.0).to(tl.float64)
    q = tl.where(counts, rounded(scaled), 0.0).to(tl.float64) * spread(scale, 1, ALONG)
    xx = tl.sum(tl.reshape(x * x, (R, G, GROUP)), 2)
    xq = tl.sum(tl.reshape(x * q, (R, G, GROUP)), 2)
    return tl.where(xq > 0.0, xx / tl.where(xq > 0.0, xq, 1.0), 1.0)


@triton.jit
def of_unit_gain(
    v,
    scaled,
    code,
    live,
    tensor_scale,
    random,
    BIAS: tl.constexpr,
    MAX: tl.constexpr,
    ALONG: tl.constexpr,
    GROUP: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """The codes of the block scales that give each group a gain of 1: int32
    [rows, columns / ALONG].

    v, scaled, live, GROUP: see `correction`. code: the codes of the scales so far. tensor_scale:
    float32 []. random: int32 [rows, columns], in [0, 65536); a block takes that of its first
    element.
    BIAS, MAX: of the scale format, its exponent bias and largest number. STOCHASTIC: whether the
    scales are rounded stochastically; else to nearest, and `random` is not read.
    """
    given = scale_of(code, BIAS).to(tl.float64)
    by = correction(v, scaled, given * tensor_scale.to(tl.float64), live, ALONG, GROUP)
    wanted = (given * spread(by, 1, GROUP // ALONG)).to(tl.float32)
    if STOCHASTIC:
        return stochastic_code(wanted, _firsts(random, ALONG), BIAS, MAX)
    return code_of(wanted, BIAS, MAX, False)
