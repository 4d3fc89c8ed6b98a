"""Multiplies the gradient of a weight by the factor of the DGE estimator, in Triton.

`arithmetic.estimators.Estimator` defines the factor, of form dge.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_fp4.arithmetic.estimators import Estimator
from megatron_fp4.arithmetic.quantized_tensor import QuantizedTensor
from megatron_fp4.kernels.float_blocks import e8m0_scale
from megatron_fp4.kernels.launch import Launch, kernel, planned, tiles

TILE, WARPS = 2048, 4


@triton.jit
def _per_unit(x):
    """The number of E2M1 grid steps in an interval of length 1 at the magnitudes x: 2, 1 or 1/2."""
    return tl.where(x < 2.0, 2.0, tl.where(x < 4.0, 1.0, 0.5))


@triton.jit
def _place(x):
    """The position u of magnitudes x between their neighbours on the E2M1 grid, from -1 to 1."""
    per_unit = _per_unit(x)
    steps = x * per_unit
    low = tl.minimum(tl.floor(steps), 4.0 * per_unit)  # 6 ends the last step
    return 2.0 * (steps - low) - 1.0


@triton.jit
def _factor(x, power, share, clip):
    """min(share |u|^power, clip) for magnitudes x, with u = `_place`(x). NaN for NaN."""
    u = tl.maximum(tl.abs(_place(x)), 1e-37)  # 0 has no logarithm
    factor = tl.minimum(tl.exp2(tl.log2(u) * power) * share, clip)
    return tl.where(x == x, factor, float("nan"))


@triton.jit
def _inverse(code):
    """1 over the E8M0 scales of these codes: 2^(127 - code); NaN for 255."""
    return e8m0_scale(tl.where(code == 255, code, 254 - code))


@kernel(fp_fusion=True)
def factor_kernel(
    dw_ptr,
    into_ptr,
    weight_ptr,
    scales_ptr,
    n_columns,
    BLOCK: tl.constexpr,
    ADDS: tl.constexpr,
    POWER: tl.constexpr,
    SHARE: tl.constexpr,
    CLIP: tl.constexpr,
    TILE: tl.constexpr,
):
    """Multiplies dw by min(SHARE |u|^POWER, CLIP), in place or, if ADDS, into a sum.

    u in [-1, 1] is the position of the scaled weight between its neighbours on the E2M1 grid.

    dw_ptr: float32 [rows, n_columns]. into_ptr: as dw_ptr, to which the product is added if ADDS.
    weight_ptr: the bits of BF16 [rows, n_columns], int16.
    scales_ptr: if BLOCK is 0 float32 [rows], which multiply the weights, else the codes of the E8M0
    scales of blocks of BLOCK elements, uint8 [rows, n_columns / BLOCK], which divide them.
    POWER, SHARE, CLIP: 1/k - 1, 1/k, and the upper bound of the factor, of the estimator.
    TILE: columns of a program, which has one row.
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    there = at < n_columns
    bits = tl.load(weight_ptr + row * n_columns + at, mask=there, other=0).to(tl.int32)  # of BF16
    if BLOCK == 0:
        gamma = tl.load(scales_ptr + row)
    else:
        codes = scales_ptr + row * (n_columns // BLOCK) + at // BLOCK
        gamma = _inverse(tl.load(codes, mask=there, other=127).to(tl.int32))
    x = tl.abs((bits << 16).to(tl.float32, bitcast=True) * gamma)
    factor = _factor(x, POWER, SHARE, CLIP)
    places = row * n_columns + at
    product = tl.load(dw_ptr + places, mask=there) * factor
    if ADDS:
        into_ptr += places
        tl.store(into_ptr, tl.load(into_ptr, mask=there) + product, mask=there)
    else:
        tl.store(dw_ptr + places, product, mask=there)


def scale(
    estimator: Estimator, dw: Tensor, w: QuantizedTensor, weight: Tensor, into: Tensor | None = None
) -> Tensor:
    """Multiplies dw by the DGE factor of the weight, in place, and returns it; or adds the product
    to `into`, and returns that.

    dw, into: float32 [out, in], contiguous.
    w: the quantized weight, with a float32 scale for each row, or E8M0 scales for blocks of a row.
    weight: BF16 [out, in], from which `w` was made.
    """
    rows, columns = dw.shape
    quantizer = w.quantizer
    block = quantizer.block[1] if quantizer.scale == "e8m0" else 0
    launch = _launch(rows, columns, block, estimator, into is not None)
    launch(dw.device, dw, into, weight.contiguous(), w.scales, columns)
    return dw if into is None else into


@planned
def _launch(rows: int, columns: int, block: int, estimator: Estimator, adds: bool) -> Launch:
    """block: of E8M0 scales; 0: a float32 scale for each row."""
    constants = dict(
        BLOCK=block, ADDS=adds, POWER=1 / estimator.k - 1, SHARE=1 / estimator.k,
        CLIP=estimator.clip, TILE=TILE,
    )  # fmt: skip
    scales = torch.uint8 if block else torch.float32
    types = torch.float32, torch.float32, torch.int16, scales, columns
    return Launch(factor_kernel, (rows, tiles(columns, TILE)), types, constants, num_warps=WARPS)
