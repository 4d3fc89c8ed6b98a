"""Statistics of one quantized operand.

x is the matrix that the quantizer read, times its prescale, and q the decoded codes. Blocks whose
scale is NaN, which have a NaN or an Inf, are left out of all counts and sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_fp4.arithmetic.quantized_tensor import QuantizedTensor
from megatron_fp4.arithmetic.scaling import in_blocks
from megatron_fp4.metrics.ratios import decibels, histogram, ratio

# The sums, in their order in the vector; the histogram of scales follows.
_SUMS = (
    "elements",  # counts of elements
    "nonzero",  # with x != 0
    "zeros",  # with q = 0
    "lost",  # with x != 0 and q = 0
    "underflow",  # with x != 0 that rounding to nearest would make zero
    "clipped",  # with |x| beyond the largest element times the scale
    "saturated",  # whose code is the largest element
    "signal",  # the sum of x^2
    "product",  # the sum of q x
    "noise",  # the sum of (q - x)^2
    "carried",  # counts of elements that were multiplied in FP8 carriers
    "outside",  # and of those among them that the carrier rounded
)
# The binades of block scales that are counted: the smallest and largest products of a block scale
# and a tensor scale in float32, and some to spare.
_FIRST, _LAST = -192, 127
WIDTH = len(_SUMS) + _LAST - _FIRST + 1
# A magnitude beyond this times the largest element counts as clipped. Scales in float32 are
# rounded, so that the largest magnitude of a block may become 6 (1 + 2^-24).
_EXCESS = 1 + 2.0**-20


def operand_sums(x: Tensor, quantized: QuantizedTensor, share: float = 1.0) -> Tensor:
    """The counts and sums of one operand, float64 [WIDTH].

    x: the matrix that was quantized, or this rank's part of it. share: the share of each block that
    `quantized` holds, for blocks that ranks share (1 / ranks); each rank then counts its share of
    the block's scale.
    """
    return sums_of_parts(x, quantized, 1, share)[0]


def sums_of_parts(x: Tensor, quantized: QuantizedTensor, parts: int, share: float) -> Tensor:
    """The `operand_sums` of `parts` operands of one shape and quantizer, float64 [parts, WIDTH].

    x, quantized: their rows as one matrix [rows, K]; any operand, if there is one.
    """
    quantizer = quantized.quantizer
    scaled = quantized.grid_coordinates(x).abs()
    elements = quantized.elements(torch.float64).view(scaled.shape).abs()
    decoded = _rows(quantized.dequantize(torch.float64), quantized.axis)
    finite = ~decoded.isnan()
    exact = _rows(x, quantized.axis).double() * quantizer.prescale
    exact, decoded = torch.where(finite, exact, 0), torch.where(finite, decoded, 0)
    zero, nonzero = (elements == 0) & finite, exact != 0
    limit = quantizer.format.max
    sums = (
        finite,
        nonzero,
        zero,
        zero & nonzero,
        nonzero & (scaled < quantizer.format.smallest / 2),
        finite & (scaled > limit * _EXCESS),
        elements == limit,
        exact.square(),
        decoded * exact,
        (decoded - exact).square(),
    )
    carried = exact.new_zeros(parts, 2)
    summed = torch.stack([each.reshape(parts, -1).sum(1, dtype=torch.float64) for each in sums], 1)
    return torch.cat((summed, carried, _scale_counts(nonzero, quantized, parts) * share), 1)


def carrier_sums(rounded: Tensor, elements: Tensor) -> Tensor:
    """What adds carriers of n operands to the operands' sums, float64 [n, WIDTH].

    rounded: [n], how many elements the carriers rounded. elements: [n], of the operands.
    """
    sums = torch.zeros(len(rounded), WIDTH, dtype=torch.float64, device=rounded.device)
    sums[:, _SUMS.index("carried")] = elements.double()
    sums[:, _SUMS.index("outside")] = rounded.double()
    return sums


def operand_metrics(sums: Sequence[float]) -> dict[str, Any]:
    """The metrics of an operand from the sum of its `operand_sums`.

    zeros: the share of zeros among the elements with x != 0; zeros_overall: among all elements.
    underflow: the share of the elements with x != 0 whose scaled magnitude is below half the
        smallest positive element, so that rounding to nearest makes them zero.
    clipped: the share of elements with |x| beyond the largest element times the scale.
    saturated: the share of elements whose code is the largest element.
    sqnr_db: the signal-to-quantization-noise ratio, sum x^2 / sum (q - x)^2, in dB.
    gain: <q, x> / <x, x>; 1 is unbiased.
    scales: how many blocks have a scale of each power of two (other scales are rounded down to
        one, and times the tensor scale); blocks of zeros are not counted.
    outside_carrier: the share of elements that FP8 carriers rounded, since they lay outside the
        window. Only where FP8 carriers are multiplied.
    """
    of = dict(zip(_SUMS, sums, strict=False))
    metrics = {
        "zeros": ratio(of["lost"], of["nonzero"]),
        "zeros_overall": ratio(of["zeros"], of["elements"]),
        "underflow": ratio(of["underflow"], of["nonzero"]),
        "clipped": ratio(of["clipped"], of["elements"]),
        "saturated": ratio(of["saturated"], of["elements"]),
        "sqnr_db": decibels(of["signal"], of["noise"]),
        "gain": ratio(of["product"], of["signal"]),
        "scales": histogram(sums[len(_SUMS) :], _FIRST),
    }
    if of["carried"]:
        metrics["outside_carrier"] = ratio(of["outside"], of["carried"])
    return metrics


def _rows(x: Tensor, axis: int) -> Tensor:
    """[rows, K] with the axis last."""
    moved = x.movedim(axis, -1)
    return moved.reshape(-1, moved.shape[-1])


def _scale_counts(nonzero: Tensor, quantized: QuantizedTensor, parts: int) -> Tensor:
    """A histogram of the block scales of each part, float64 [parts, binades]: how many scales lie
    between a power of two and the next. Blocks of zeros are not counted."""
    scales = quantized.block_scales(torch.float64)
    if quantized.tensor_scale is not None:
        scales = scales * quantized.tensor_scale.double()
    counted = in_blocks(nonzero, quantized.quantizer.block).any(3).any(1)
    counted, scales = counted.reshape(parts, -1), scales.reshape(parts, -1)
    counted = counted & (scales > 0)  # so that a NaN is not counted
    binades = torch.frexp(scales)[1] - 1 - _FIRST
    binades = torch.where(counted, binades, 0).clamp(0, _LAST - _FIRST).long()
    counts = scales.new_zeros(parts, _LAST - _FIRST + 1)
    return counts.scatter_add_(1, binades, counted.double())
