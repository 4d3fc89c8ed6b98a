"""Products of MXFP4 operands by torch's own GEMM, torch.nn.functional.scaled_mm.

For compute capability 10.x alone. It writes BF16 and nothing else: it has no factor for the
product, adds to no output, and drops a bias that it is given without a word (torch 2.11); none of
these is asked of it here.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

TILE = 128, 4  # rows and blocks whose scales lie together


def swizzle(scales: Tensor) -> Tensor:
    """Scales [rows, blocks], one byte each, as block-scaled tensor cores read them.

    cuBLAS, "1D block scaling factors layout": tiles of 128 rows and 4 blocks in row-major order;
    within one, row r and block b lie at 16 (r mod 32) + 4 floor(r / 32) + b. Scales that fill up
    the last tiles belong to no element, and are 0. Returns [tiles * 512].
    """
    rows, blocks = scales.shape
    missing = [-size % tile for size, tile in zip((rows, blocks), TILE, strict=True)]
    if any(missing):
        scales = nn.functional.pad(scales, (0, missing[1], 0, missing[0]))
    down, across = (size // tile for size, tile in zip(scales.shape, TILE, strict=True))
    # Row of tiles, 32 rows of a tile in turn, row of those, tile in its row, block in its tile.
    return scales.view(down, 4, 32, across, 4).permute(0, 3, 2, 1, 4).reshape(-1)


def product(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> Tensor:
    """a b^T in BF16. a, b: (codes uint8 [rows, K / 2], scales uint8 [rows, K / 32])."""
    (codes, scales), (others, other_scales) = a, b
    kind, order = nn.functional.ScalingType.BlockWise1x32, nn.functional.SwizzleType.SWIZZLE_32_4_4
    return nn.functional.scaled_mm(
        codes.view(torch.float4_e2m1fn_x2),
        others.view(torch.float4_e2m1fn_x2).t(),
        swizzle(scales).view(torch.float8_e8m0fnu),
        kind,
        swizzle(other_scales).view(torch.float8_e8m0fnu),
        kind,
        swizzle_a=order,
        swizzle_b=order,
        output_dtype=torch.bfloat16,
    )
