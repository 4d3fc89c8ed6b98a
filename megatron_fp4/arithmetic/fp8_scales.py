"""Block scales that FP8 tensor cores can multiply with (rule mse-fp8).

An E2M1 element has the significand 1 or 3. Times a scale whose significand is 1, 3 or 5 it has at
most four significant bits (1, 3, 5, 9 or 15), and so is exact in E4M3. docs/numerics.md, Scales,
defines the bits.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from megatron_fp4.arithmetic.formats import E2M1, SCALE_FLOATS, table

SIGNIFICANDS = (1, 3, 5)
# The candidates of a block, counted from the smallest scale that clips nothing.
CANDIDATES = (-1, 0, 1, 2)
# Errors, in units of the scale, are rounded to multiples of 2^-8. The sum of the squares of LONGEST
# errors of at most 2 is then exact in float32, so that its order does not matter.
_PER_ERROR, LONGEST = 2.0**8, 64


@cache
def scales_in_fp8(scale: str) -> tuple[tuple[float, int], ...]:
    """(value, code) of each scale of a format whose significand is one of SIGNIFICANDS, in
    ascending order."""
    form = SCALE_FLOATS[scale]
    found = []
    values = form.decode(torch.arange(256, device="cpu"), torch.float64)
    for code, value in enumerate(values.tolist()):
        if value > 0 and code != form.nan and _significand(value) in SIGNIFICANDS:
            found.append((value, code))
    return tuple(sorted(found))


def _significand(value: float) -> int:
    """The odd number of which `value` is a multiple by a power of two."""
    numerator = value.as_integer_ratio()[0]
    return numerator // (numerator & -numerator)


def choose(blocks: Tensor, maxima: Tensor, scale: str) -> tuple[Tensor, Tensor]:
    """(the reciprocals of the scales, the scales' uint8 codes), of the shape of maxima: of four
    candidates the one that gives a block the smallest squared error, and of equal ones the
    smallest.

    blocks: [..., elements], divided by the outer scale. maxima: [...], the largest magnitudes of
    blocks, finite. A block of zeros has the scale 0, and the reciprocal 0.
    """
    values, codes = zip(*scales_in_fp8(scale), strict=True)
    grid, last = table(values, blocks.dtype, blocks.device), len(values) - 1
    first = torch.searchsorted(grid, maxima / torch.full_like(maxima, E2M1.max))
    magnitudes, best, least = blocks.abs(), first, torch.full_like(maxima, math.inf)
    for offset in CANDIDATES:
        index = (first + offset).clamp(0, last)
        error = _error(magnitudes, grid[index])
        best = torch.where(error < least, index, best)
        least = torch.minimum(error, least)
    best = torch.where(first > last, last, best)  # of a maximum that all scales clip
    code = table(codes, torch.int32, blocks.device)[best]
    inverse = torch.where(maxima > 0, 1 / grid[best], 0)
    return inverse, torch.where(maxima > 0, code, 0).to(torch.uint8)


def _error(magnitudes: Tensor, scale: Tensor) -> Tensor:
    """The squared error [...] of each block with these scales [...]."""
    scaled = magnitudes * (1 / scale)[..., None]
    off = E2M1.decode(E2M1.encode(scaled), scaled.dtype) - scaled
    off = torch.round(off * _PER_ERROR) / _PER_ERROR
    return off.square().sum(-1) * scale.square()
