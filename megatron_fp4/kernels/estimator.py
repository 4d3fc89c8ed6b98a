"""DGE's factor on the gradient of a weight, in Triton; see `estimators.DGE`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_fp4.arithmetic.estimators import DGE
from megatron_fp4.arithmetic.quantizer import QuantizedTensor
from megatron_fp4.kernels.launch import kernel, on, run, tiles

TILE, WARPS = 2048, 4


@triton.jit
def _per_unit(x):
    """How many steps of E2M1's grid a unit holds at the magnitudes x."""
    return tl.where(x < 2.0, 2.0, tl.where(x < 4.0, 1.0, 0.5))


@triton.jit
def _place(x):
    """Where magnitudes x lie between their neighbours on E2M1's grid, from -1 to 1."""
    per_unit = _per_unit(x)
    steps = x * per_unit
    low = tl.minimum(tl.floor(steps), 4.0 * per_unit)  # 6 ends the last step
    return 2.0 * (steps - low) - 1.0


@triton.jit
def _factor(x, power, share, clip):
    """min(share |u|^power, clip) for magnitudes x with u = `_place`(x); NaN for NaN."""
    u = tl.maximum(tl.abs(_place(x)), 1e-37)  # 0 has no logarithm
    factor = tl.minimum(tl.exp2(tl.log2(u) * power) * share, clip)
    return tl.where(x == x, factor, float("nan"))


@kernel(fp_fusion=True)
def factor_kernel(
    dw_ptr,
    weight_ptr,
    gamma_ptr,
    n_columns,
    power,
    share,
    clip,
    TILE: tl.constexpr,
):
    """dw *= min(share |u|^power, clip), where u in [-1, 1] is the scaled weight's place between
    its neighbours on E2M1's grid."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    there = at < n_columns
    bits = tl.load(weight_ptr + row * n_columns + at, mask=there, other=0).to(tl.int32)  # of BF16
    x = tl.abs((bits << 16).to(tl.float32, bitcast=True) * tl.load(gamma_ptr + row))
    factor = _factor(x, power, share, clip)
    places = dw_ptr + row * n_columns + at
    tl.store(places, tl.load(places, mask=there) * factor, mask=there)


def scale(estimator: DGE, dw: Tensor, w: QuantizedTensor, weight: Tensor) -> Tensor:
    """dw [out, in], float32 and contiguous, multiplied in place by the factor of `weight`, BF16, of
    which `w` was made with a float32 scale for each row."""
    rows, columns = dw.shape
    weight = weight.contiguous()
    with on(dw):
        run(
            factor_kernel,
            (rows, tiles(columns, TILE)),
            [
                dw,
                weight.view(torch.int16),
                w.scales,
                columns,
                1 / estimator.k - 1,
                1 / estimator.k,
                estimator.clip,
            ],
            TILE=TILE,
            num_warps=WARPS,
        )
    return dw
