"""QuantizedTensor: the codes and scales of a tensor, and how they are decoded."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_fp4.arithmetic import formats
from megatron_fp4.arithmetic.formats import widen
from megatron_fp4.arithmetic.quantizer import WHOLE_AXIS, Quantizer
from megatron_fp4.arithmetic.scaling import per_block

COUNTS = 4  # integers of `QuantizedTensor.counts` before the reciprocals


@dataclass(frozen=True)
class QuantizedTensor:
    """Codes and scales of one tensor, with the blocked axis last.

    codes: uint8: 4-bit codes, two in a byte, [..., K / 2]; or FP8 codes [..., K].
    scales: one for each block: [..., K / length], or [rows / height, K / length] where the block
        height is not 1. uint8 for E8M0, E4M3 and UE5M3. float32 scales are stored as the factor
        that multiplied the tensor: the decoded value is code / scale.
    tensor_scale: the outer scale, float32, which multiplies block scales, or None. A scalar; or
        [rows, 1] of rows with scales of their own: with `row_max`, or rows of several tensors.
    shape: the shape of the tensor that was quantized. axis: the blocked axis of that tensor.
    counts: int32 [4], which a kernel writes: the tally and two unused zeros. [4 + rows] beside
        float32 scales, with the bits of the reciprocal of each. None: no kernel wrote it.
    """

    codes: Tensor
    scales: Tensor
    tensor_scale: Tensor | None
    quantizer: Quantizer
    shape: torch.Size
    axis: int
    counts: Tensor | None = None

    @property
    def reciprocals(self) -> Tensor:
        """The reciprocals of float32 scales, [rows, 1], that a kernel has written."""
        assert self.counts is not None
        return self.counts[COUNTS:].view(torch.float32).view(-1, 1)

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def elements(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values of the codes without any scale, [..., K] with the blocked axis last."""
        return self.quantizer.format.decode_stored(self.codes, dtype)

    def block_scales(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The decoded block scales, in `dtype` and the shape of `scales`, without the outer scale.

        Each is the factor by which the elements of its block are multiplied.
        """
        if self.quantizer.scale == "e8m0":
            return formats.decode_e8m0(self.scales, dtype)
        if self.quantizer.scale == "fp32":
            if self.counts is not None and dtype == torch.float32:
                return self.reciprocals[: self.scales.numel()].view(self.scales.shape)
            return self.scales.to(dtype).reciprocal()
        return formats.SCALE_FLOATS[self.quantizer.scale].decode(self.scales, dtype)

    def with_row_factors(self, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor | None]:
        """(values, row factors): the decoded matrix is their product.

        values: [rows, K] in `dtype` with the blocked axis last, exact in BF16 (where
        `Quantizer.exact_in_bf16` says so); block scales are multiplied in, unless a block spans
        the axis. Row factors: [rows, 1], [1, 1] or None, the scales that are left to multiply the
        rows of the product with.
        """
        values = self.elements(dtype)
        values = values.reshape(math.prod(values.shape[:-1]), values.shape[-1])
        if self.quantizer.spans_axis:
            factors = self.block_scales(formats.wide(dtype)).view(-1, 1)
            return values, factors if self.tensor_scale is None else factors * self.tensor_scale
        if self.quantizer.scale == "fp32":
            scales = self.scales.to(dtype)
            return per_block(values, self.quantizer.block, scales, torch.div), None
        values = per_block(values, self.quantizer.block, self.block_scales(dtype), torch.mul)
        if self.tensor_scale is None:
            return values, None
        return values, self.tensor_scale.view(-1, 1).to(formats.wide(dtype))

    def unscaled(self) -> QuantizedTensor:
        """A tensor with float32 scales, which are replaced by one scale of 1 for the tensor."""
        assert self.quantizer.scale == "fp32"
        quantizer = replace(self.quantizer, block=(WHOLE_AXIS, WHOLE_AXIS))
        scales = formats.table((1.0,), torch.float32, self.device).view(1, 1)
        return replace(self, scales=scales, quantizer=quantizer, counts=None)

    def along(self, axis: int) -> QuantizedTensor:
        """A matrix with one scale for the tensor, transposed if `axis` is not last already. Both
        of its sizes must be even where two codes share a byte."""
        if axis == self.axis:
            return self
        if self.quantizer.format.packed:
            codes = formats.pack(formats.unpack(self.codes).t().contiguous())
        else:
            codes = self.codes.t().contiguous()
        return replace(self, codes=codes, axis=axis, counts=None)

    def tally(self) -> Tensor:
        """int32 [2], as `operands.Decoded.tally`: 0 rounded elements, and 1 if any block is NaN, or
        their number where a kernel has counted them."""
        if self.counts is not None:
            return self.counts[:2]
        if self.quantizer.scale == "fp32":
            nan = self.scales.isnan().any()
        else:
            nan = (self.scales == (0x7F if self.quantizer.scale == "e4m3" else 0xFF)).any()
        return torch.stack((torch.zeros_like(nan), nan)).int()

    def grid_coordinates(self, x: Tensor) -> Tensor:
        """`x` divided by this tensor's scales and multiplied by the prescale: what is rounded.

        x: of the shape of the quantized tensor. Returns [rows, K] with the blocked axis last, in
        float32 (float64 for float64 input); NaN or Inf in blocks whose scale is zero or NaN. With
        `unit_gain` the scales changed after x was rounded, by a few percent in most groups.
        """
        matrix = widen(x).movedim(self.axis, -1)
        matrix = matrix.reshape(-1, matrix.shape[-1])
        if self.quantizer.prescale != 1.0:
            matrix = matrix * self.quantizer.prescale
        if self.quantizer.scale == "fp32":
            return per_block(matrix, self.quantizer.block, self.scales.to(matrix.dtype), torch.mul)
        scales = self.block_scales(matrix.dtype)
        if self.tensor_scale is not None:
            scales = scales.view(-1, scales.shape[-1]) * self.tensor_scale
        return per_block(matrix, self.quantizer.block, scales, torch.div)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The decoded tensor, in the shape of the tensor that was quantized, rounded to `dtype`."""
        wide = formats.wide(dtype)
        values, factors = self.with_row_factors(wide)
        if self.quantizer.scale == "fp32" and self.quantizer.spans_axis:
            values = values / self.scales.to(wide).view(-1, 1)
        elif factors is not None:
            values = values * factors
        moved = list(self.shape)
        moved.append(moved.pop(self.axis))
        return values.view(moved).movedim(-1, self.axis).to(dtype)
