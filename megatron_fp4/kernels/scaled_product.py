"""Multiplies float32 products by the scales of their operands' rows or tensors, in Triton.

PyTorch would pass over the product for each factor, and again to round it or to add it to a sum.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_fp4.kernels.encode import bf16_bits
from megatron_fp4.kernels.launch import Launch, kernel, planned, tiles

TILE = 32, 128  # rows and columns of a program
WARPS = 4
# What a factor is of: nothing, the whole operand, or each of its rows.
_Of = Literal["", "tensor", "rows"]


@triton.jit
def _factor(ptr, lines, n_lines, OF: tl.constexpr):
    """The factors of `lines`: float32 of their shape, or one for all of them."""
    if OF == "rows":
        factors = tl.load(ptr + lines, mask=lines < n_lines, other=0.0)
    else:
        factors = tl.load(ptr)
    return factors


@kernel(fp_fusion=False)
def scale_kernel(
    product_ptr,
    a_ptr,
    b_ptr,
    out_ptr,
    n_rows,
    n_columns,
    A: tl.constexpr,
    B: tl.constexpr,
    CORRECTION: tl.constexpr,
    ADDS: tl.constexpr,
    IN_BF16: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Multiplies a product by its operands' factors and CORRECTION, as `base.scale_product`.

    product_ptr: float32 [n_rows, n_columns].
    a_ptr, b_ptr: float32, a factor for each of the rows or columns, or one; A and B say which, and
        "" that there is none.
    out_ptr: as the product, float32 or, if IN_BF16, the bits of BF16, int16. The result is added to
        it if ADDS.
    ROWS, COLUMNS: of the tile of a program.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    there = (rows < n_rows) & (columns < n_columns)
    places = rows.to(tl.int64) * n_columns + columns
    x = tl.load(product_ptr + places, mask=there, other=0.0)
    if A != "" and B == "tensor":  # the product of the factors is rounded first
        x *= _factor(a_ptr, rows, n_rows, A) * tl.load(b_ptr)
    else:
        if A != "":
            x *= _factor(a_ptr, rows, n_rows, A)
        if B != "":
            x *= _factor(b_ptr, columns, n_columns, B)
    if CORRECTION != 1.0:
        x *= CORRECTION
    out_ptr += places
    if ADDS:
        before = tl.load(out_ptr, mask=there, other=0)
        if IN_BF16:
            before = (before.to(tl.int32) << 16).to(tl.float32, bitcast=True)
        x += before
    tl.store(out_ptr, bf16_bits(x).to(tl.int16) if IN_BF16 else x, mask=there)


def scaled(
    product: Tensor,
    a_factors: Tensor | None,
    b_factors: Tensor | None,
    correction: float,
    out_dtype: torch.dtype,
    into: Tensor | None,
) -> Tensor:
    """What `base.finish` returns for `base.scale_product` of these arguments.

    product: float32. a_factors, b_factors: float32. into: contiguous, or None. out_dtype, into's
    dtype: BF16 or float32.
    """
    (rows, columns), out = product.shape, into
    if out is None:
        out = product.new_empty(rows, columns, dtype=out_dtype)
    kinds = _kind(a_factors), _kind(b_factors)
    launch = _launch(rows, columns, *kinds, correction, out.dtype, into is not None)
    launch(product.device, product, a_factors, b_factors, out, rows, columns)
    return out


def _kind(factors: Tensor | None) -> _Of:
    if factors is None:
        return ""
    return "tensor" if factors.numel() == 1 else "rows"


@planned
def _launch(
    rows: int, columns: int, a: _Of, b: _Of, correction: float, dtype: torch.dtype, adds: bool
) -> Launch:
    in_bf16 = dtype == torch.bfloat16
    constants = dict(A=a, B=b, CORRECTION=correction, ADDS=adds, IN_BF16=in_bf16)
    constants |= dict(ROWS=TILE[0], COLUMNS=TILE[1])
    of_out = torch.int16 if in_bf16 else torch.float32
    types = torch.float32, torch.float32, torch.float32, of_out, rows, columns
    grid = tiles(rows, TILE[0]), tiles(columns, TILE[1])
    return Launch(scale_kernel, grid, types, constants, num_warps=WARPS)
