"""Block scales that FP8 tensor cores can multiply with (rule mse-fp8).

An E2M1 element has the significand 1 or 3. Times a scale whose significand is 1, 3 or 5 it has at
most four significant bits (1, 3, 5, 9 or 15), and so is exact in E4M3. docs/numerics.md, Scales,
defines the bits.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from megatron_fp4.arithmetic.formats import E2M1, E8M0_BIAS, SCALE_FLOATS, decode_e8m0, table

SIGNIFICANDS = (1, 3, 5)
# The candidates of a block, counted from the smallest scale that clips nothing.
CANDIDATES = (-1, 0, 1, 2)
# A squared error counts in whole units of 2^-18 of the square of a power of two near the scale, so
# that the order of a sum does not matter.
_PER_SQUARE = 2.0**18


@cache
def scales_in_fp8(scale: str) -> tuple[tuple[float, int], ...]:
    """(value, code) of each scale of a format whose significand is one of SIGNIFICANDS, in
    ascending order."""
    form = SCALE_FLOATS[scale]
    found = []
    for code, value in enumerate(form.decode(torch.arange(256), torch.float64).tolist()):
        if value > 0 and code != form.nan and _significand(value) in SIGNIFICANDS:
            found.append((value, code))
    return tuple(sorted(found))


def _significand(value: float) -> int:
    """The odd number of which `value` is a multiple by a power of two."""
    numerator = value.as_integer_ratio()[0]
    return numerator // (numerator & -numerator)


def choose(blocks: Tensor, amax: Tensor, scale: str) -> tuple[Tensor, Tensor]:
    """(scales, their uint8 codes), of the shape of amax: of four candidates the one that gives a
    block the smallest squared error, and of equal ones the smallest.

    blocks: [..., elements], in units of the scale of the tensor or row. amax: [...], their largest
    magnitudes, finite. A block of zeros has the scale 0.
    """
    values, codes = zip(*scales_in_fp8(scale), strict=True)
    grid = table(values, blocks.dtype, blocks.device)
    wanted = amax / torch.full_like(amax, E2M1.max)
    start = torch.searchsorted(grid, wanted)
    magnitudes, exponent = blocks.abs(), torch.frexp(wanted)[1]
    best, least = start, None
    for offset in CANDIDATES:
        index = (start + offset).clamp(0, len(values) - 1)
        error = _error(magnitudes, grid[index], exponent)
        better = torch.ones_like(error, dtype=torch.bool) if least is None else error < least
        best = torch.where(better, index, best)
        least = error if least is None else torch.minimum(error, least)
    code = table(codes, torch.int32, blocks.device)[best]
    return torch.where(amax > 0, grid[best], 0), torch.where(amax > 0, code, 0).to(torch.uint8)


def _error(magnitudes: Tensor, scale: Tensor, exponent: Tensor) -> Tensor:
    """The counted squared error of each block, int64 [...], with these scales [...].

    exponent: of the power of two in whose square errors are counted.
    """
    scaled = magnitudes / scale[..., None]
    rounded = E2M1.decode(E2M1.encode(scaled), magnitudes.dtype) * scale[..., None]  # exact
    unit = decode_e8m0(E8M0_BIAS - exponent.clamp(-125, 126), magnitudes.dtype)
    off = (rounded - magnitudes) * unit[..., None]
    return (off * off * _PER_SQUARE).to(torch.int64).sum(-1)
