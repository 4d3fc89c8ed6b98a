"""GEMMs of MXFP4 operands by torch.nn.functional.scaled_mm, for compute capability 10.x.

torch 2.11 writes BF16 only. It has no factor for the product, cannot add to the output, and ignores
a bias without an error. So none of these is used here.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

TILE = 128, 4  # rows and blocks of a tile of scales


def swizzle(scales: Tensor) -> Tensor:
    """Scales in the order in which block-scaled tensor cores read them.

    scales: [rows, blocks], one byte each.

    cuBLAS, "1D block scaling factors layout": tiles of 128 rows and 4 blocks in row-major order;
    within a tile, row r and block b lie at 16 (r mod 32) + 4 floor(r / 32) + b. The last tiles are
    filled with scales of 0, which belong to no element. Returns [tiles * 512].
    """
    rows, blocks = scales.shape
    missing = [-size % tile for size, tile in zip((rows, blocks), TILE, strict=True)]
    if any(missing):
        scales = nn.functional.pad(scales, (0, missing[1], 0, missing[0]))
    down, across = (size // tile for size, tile in zip(scales.shape, TILE, strict=True))
    # Axes: row of tiles, group of 32 rows in the tile, row in the group, column of tiles, block in
    # the tile.
    return scales.view(down, 4, 32, across, 4).permute(0, 3, 2, 1, 4).reshape(-1)


def product(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> Tensor:
    """a b^T in BF16, [M, N].

    a, b: (codes uint8 [rows, K / 2], scales uint8 [rows, K / 32]).
    """
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
