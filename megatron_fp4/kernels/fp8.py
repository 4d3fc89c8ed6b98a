"""FP8 elements with a float32 scale for each row or for the tensor, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_fp4.quantizer import QuantizedTensor, Quantizer
from megatron_fp4.scaling import gamma

EXPONENTS = {"e4m3": (3, 7), "e5m2": (2, 15)}  # mantissa bits and bias
TILE, WARPS = 2048, 4


@triton.jit
def cast_kernel(
    x_ptr,
    gamma_ptr,
    out_ptr,
    n_columns,
    PER_ROW: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Codes of x * gamma, which is in range, to nearest even; 0 where gamma is NaN."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    there = at < n_columns
    x = tl.load(x_ptr + row * n_columns + at, mask=there, other=0)  # the bits of BF16
    v = (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    scale = tl.load(gamma_ptr + (row if PER_ROW else 0))
    magnitude = tl.abs(v * scale)
    CUT: tl.constexpr = 23 - MANTISSA
    bits = magnitude.to(tl.int32, bitcast=True)
    normal = bits + ((1 << (CUT - 1)) - 1) + ((bits >> CUT) & 1)
    normal = (normal >> CUT) - ((127 - BIAS) << MANTISSA)
    # Subnormal numbers have steps of one length: added to a number with that as its last place.
    anchor = 2.0 ** (24 - BIAS - MANTISSA)
    steps = (magnitude + anchor).to(tl.int32, bitcast=True) & ((2 << MANTISSA) - 1)
    code = tl.where(magnitude < 2.0 ** (1 - BIAS), steps, normal)
    code |= (x.to(tl.int32) >> 8) & 0x80
    tl.store(
        out_ptr + row * n_columns + at, tl.where(scale == scale, code, 0).to(tl.uint8), mask=there
    )


def takes(x: Tensor, quantizer: Quantizer, axis: int) -> bool:
    """Whether the kernel makes this copy of x: BF16 in FP8, scaled along its rows or as a whole."""
    fp8 = quantizer.element in EXPONENTS and quantizer.scale == "fp32" and quantizer.prescale == 1.0
    return fp8 and axis == 1 and x.dim() == 2 and x.dtype == torch.bfloat16 and x.numel() > 0


def quantize(x: Tensor, quantizer: Quantizer, widest: Tensor | None = None) -> QuantizedTensor:
    """x [rows, columns] in FP8. widest: what ranks agreed on; see `quantize_matrix`."""
    x = x.contiguous()
    rows, columns = x.shape
    per_row = quantizer.block[0] == 1
    if widest is None:
        low, high = torch.aminmax(x, dim=1, keepdim=True) if per_row else torch.aminmax(x)
        widest = torch.maximum(high, -low).float()
    _, stored = gamma(widest.view(-1, 1), widest.view(-1, 1).isfinite(), quantizer)
    codes = torch.empty(rows, columns, dtype=torch.uint8, device=x.device)
    mantissa, bias = EXPONENTS[quantizer.element]
    with torch.cuda.device_of(x):  # Triton launches on the current one
        cast_kernel[(rows, triton.cdiv(columns, TILE))](
            x.view(torch.int16),
            stored,
            codes,
            columns,
            PER_ROW=per_row,
            MANTISSA=mantissa,
            BIAS=bias,
            TILE=TILE,
            num_warps=WARPS,
        )
    return QuantizedTensor(codes, stored, None, quantizer, x.shape, 1)
