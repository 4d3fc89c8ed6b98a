"""GEMMs of MXFP4 operands on FP4 tensor cores, by Triton's dot_scaled: D = alpha a b^T (+ D).

a is [M, K] and b is [N, K], both in E2M1 with an E8M0 scale for each 32 elements along K.

For compute capability 10.x it compiles to tcgen05.mma of kind mxf4 with block scales, and for 12.x
to mma.sync of kind mxf4nvf4. On other GPUs Triton decodes the operands to BF16 first, which is
exact and slow.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_fp4.kernels.launch import Launch, kernel, planned, tiles

TILE_M, TILE_N, TILE_K = 128, 128, 128
BAND = 8  # rows of tiles that share each column of tiles, so that b's tiles stay in the cache
WARPS, STAGES = 4, 3


@triton.jit
def _tile_of(n_rows, n_columns, TILE_M: tl.constexpr, TILE_N: tl.constexpr, BAND: tl.constexpr):
    """(row, column) of this program's tile of D, counted in tiles.

    n_rows, n_columns: the size of D.

    Programs are ordered in bands of BAND rows of tiles. Within a band they take one column of tiles
    after the other.
    """
    across = tl.cdiv(n_columns, TILE_N)
    in_band = BAND * across
    first = (tl.program_id(0) // in_band) * BAND
    high = tl.minimum(tl.cdiv(n_rows, TILE_M) - first, BAND)
    place = tl.program_id(0) % in_band
    return first + place % high, place // high


@triton.jit
def _operand(codes_ptr, scales_ptr, rows, n_rows, start, k, TILE_K: tl.constexpr):
    """Codes [rows, TILE_K / 2] and scales [rows, TILE_K / 32], uint8, of TILE_K elements of each
    row.

    rows: int32, the indices of the rows.
    n_rows, k: the number of rows of the matrix, and the length of a row.
    start: the first of the elements.

    Codes and scale bytes outside of the matrix are 0.
    """
    at = start // 2 + tl.arange(0, TILE_K // 2)
    there = (rows < n_rows)[:, None]
    rows = rows.to(tl.int64)[:, None]
    codes = tl.load(
        codes_ptr + rows * (k // 2) + at[None, :], mask=there & (at < k // 2)[None, :], other=0
    )
    at = start // 32 + tl.arange(0, TILE_K // 32)
    scales = tl.load(
        scales_ptr + rows * (k // 32) + at[None, :], mask=there & (at < k // 32)[None, :], other=0
    )
    return codes, scales


@kernel(fp_fusion=True)
def product_kernel(
    a_ptr,
    a_scales_ptr,
    b_ptr,
    b_scales_ptr,
    out_ptr,
    m,
    n,
    k,
    ALPHA: tl.constexpr,
    ADDS: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    BAND: tl.constexpr,
):
    """Computes one tile of D = ALPHA a b^T.

    a_ptr, b_ptr: codes uint8 [m, k / 2] and [n, k / 2].
    a_scales_ptr, b_scales_ptr: uint8 [m, k / 32] and [n, k / 32].
    out_ptr: D [m, n], BF16 or float32.
    ADDS: whether the product is added to D instead of replacing it.
    """
    row, column = _tile_of(m, n, TILE_M, TILE_N, BAND)
    rows = row * TILE_M + tl.arange(0, TILE_M)
    columns = column * TILE_N + tl.arange(0, TILE_N)
    total = tl.zeros((TILE_M, TILE_N), tl.float32)
    for start in range(0, k, TILE_K):
        a, a_scales = _operand(a_ptr, a_scales_ptr, rows, m, start, k, TILE_K)
        b, b_scales = _operand(b_ptr, b_scales_ptr, columns, n, start, k, TILE_K)
        total = tl.dot_scaled(a, a_scales, "e2m1", tl.trans(b), b_scales, "e2m1", total)
    if ALPHA != 1.0:
        total *= ALPHA
    places = out_ptr + rows.to(tl.int64)[:, None] * n + columns[None, :]
    there = (rows < m)[:, None] & (columns < n)[None, :]
    if ADDS:
        total += tl.load(places, mask=there, other=0.0)
    tl.store(places, total.to(out_ptr.dtype.element_ty), mask=there)


def product(
    a: tuple[Tensor, Tensor],
    b: tuple[Tensor, Tensor],
    out: Tensor,
    *,
    alpha: float = 1.0,
    accumulates: bool = False,
) -> Tensor:
    """Writes alpha a b^T to `out`, or adds it, and returns `out`.

    a, b: (codes uint8 [rows, K / 2], scales uint8 [rows, K / 32]).
    out: BF16 or float32 [M, N], row-major.
    accumulates: whether the product is added.
    """
    (codes, scales), (others, other_scales) = a, b
    m, n, k = len(codes), len(others), 32 * scales.shape[1]
    launch = _launch(m, n, k, alpha, out.dtype, accumulates)
    launch(codes.device, codes, scales, others, other_scales, out, m, n, k)
    return out


@planned
def _launch(m: int, n: int, k: int, alpha: float, dtype: torch.dtype, adds: bool) -> Launch:
    constants = dict(ALPHA=alpha, ADDS=adds, TILE_M=TILE_M, TILE_N=TILE_N, TILE_K=TILE_K, BAND=BAND)
    types = *(torch.uint8,) * 4, dtype, m, n, k
    grid = (tiles(m, TILE_M) * tiles(n, TILE_N),)
    return Launch(product_kernel, grid, types, constants, num_warps=WARPS, num_stages=STAGES)
