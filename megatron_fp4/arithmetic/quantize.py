"""Quantizes tensors in plain PyTorch: the reference of all kernels, which give the same bits.

docs/numerics.md is the specification.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_fp4.arithmetic import formats
from megatron_fp4.arithmetic.block_sizes import check_divides
from megatron_fp4.arithmetic.gain import scales_of_unit_gain
from megatron_fp4.arithmetic.philox import WHOLE, Key, random_bits16
from megatron_fp4.arithmetic.quantized_tensor import QuantizedTensor
from megatron_fp4.arithmetic.quantizer import Quantizer, get_quantizer
from megatron_fp4.arithmetic.scaling import (
    average_for,
    largest_for_scales,
    per_block,
    rows_along,
    scale_average,
    scale_blocks,
)
from megatron_fp4.errors import ConfigError
from megatron_fp4.inputs import check_tensor


def quantize_matrix(
    x: Tensor,
    quantizer: Quantizer,
    *,
    axis: int,
    bits: Tensor | None = None,
    average: Tensor | None = None,
    largest: Tensor | None = None,
) -> QuantizedTensor:
    """Quantize `x` in blocks along `axis`.

    x: at least one axis; float32 and narrower are computed in float32, float64 in float64.
    bits: random integers in [0, 65536) of x's shape; required by a quantizer that draws.
    average: a moving average of x, of its shape; required for rounding ema. Scales and signs are
        x's.
    largest: the maximum of `largest_magnitudes` over the ranks that share a scale of x
        (`Quantizer.scale_spans`); None if x is the whole tensor.
    Raises ConfigError if a block does not divide the axis or the rows, or if the bits or the
    average that the rounding needs are missing.
    """
    if not isinstance(axis, int) or not -x.dim() <= axis < x.dim():
        raise ConfigError(f"a tensor of {x.dim()} axes has no axis {axis!r}")
    axis %= x.dim()
    moved = x.detach().movedim(axis, -1)
    rows, k = math.prod(moved.shape[:-1]), moved.shape[-1]
    check_divides(quantizer, rows, k, axis)
    matrix = rows_along(x, axis)
    scaled, scales, tensor_scale, finite = scale_blocks(matrix, quantizer, largest)
    form = quantizer.format
    if quantizer.prescale != 1.0:
        scaled = scaled * quantizer.prescale
    if isinstance(form, formats.Fp4):
        if quantizer.draws:
            if bits is None:
                raise ConfigError("a stochastic quantizer needs random bits: give it a seed")
            bits = bits.movedim(axis, -1).reshape(rows, k).contiguous()
        toward = None
        average = average_for(x.shape, quantizer, average)
        if average is not None:
            kept = rows_along(average, axis).to(matrix.dtype)
            toward, scales, finite = scale_average(kept, matrix, scales, finite, quantizer)
        codes = form.encode(scaled, bits if quantizer.stochastic else None, toward)
        if quantizer.unit_gain:
            drawn = bits if quantizer.draws else None
            scales = scales_of_unit_gain(matrix, codes, scales, tensor_scale, quantizer, drawn)
    else:
        codes = form.encode(scaled)
    codes = per_block(codes, quantizer.block, finite.to(torch.uint8), torch.mul)
    codes = form.stored(codes)
    codes = codes.view(*moved.shape[:-1], codes.shape[-1])
    if quantizer.block[0] == 1:
        scales = scales.view(*moved.shape[:-1], scales.shape[-1])
    return QuantizedTensor(codes, scales, tensor_scale, quantizer, x.shape, axis)


def largest_magnitudes(x: Tensor, quantizer: Quantizer, axis: int) -> Tensor:
    """The largest magnitudes of this rank's part of a tensor whose scales ranks share.

    Their maximum over the ranks is `quantize_matrix`'s `largest`. Returns [rows, 1] for row scales,
    and a single element for a tensor scale; Inf stands for NaN too.
    """
    return largest_for_scales(rows_along(x, axis), quantizer)


def quantize(
    x: Tensor,
    quantizer: Quantizer | str,
    *,
    axis: int = -1,
    seed: int | None = None,
    average: Tensor | None = None,
) -> QuantizedTensor:
    """Quantize a whole tensor in blocks along `axis`.

    x: a dense tensor in float16, bfloat16, float32 or float64.
    quantizer: a Quantizer, or a name that `list_quantizers` lists.
    seed: the key of a stochastic quantizer's random bits (step 0, stream 0); required for one.
    average: a moving average of x, of its shape; required for rounding ema.
    The result is not differentiable, and neither is its `dequantize`: this function is for looking
    at codes. Raises ConfigError for an unknown name, a missing seed or average, an unsupported
    tensor, or an axis that is not a multiple of the block.
    """
    if not isinstance(quantizer, Quantizer):
        quantizer = get_quantizer(quantizer)
    check_tensor(x, "quantize: x")
    if average is not None and quantizer.rounding != "ema":
        raise ConfigError(f"rounding {quantizer.rounding} takes no average: leave it out")
    bits = None
    if quantizer.draws:
        if seed is None:
            raise ConfigError("a stochastic quantizer needs random bits: pass seed=<integer>")
        rows, columns = math.prod(x.shape[:-1]), x.shape[-1] if x.dim() else 1
        bits = random_bits16(rows, columns, Key(seed), 0, WHOLE, x.device).view(x.shape)
    return quantize_matrix(x, quantizer, axis=axis, bits=bits, average=average)
