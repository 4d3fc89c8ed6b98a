"""Quantizer (element format, scale format, block, scale rule, rounding) and QuantizedTensor.

The reference of all kernels, which give the same bits. docs/numerics.md is the specification.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal
from zlib import crc32

import torch
from torch import Tensor

from megatron_fp4.arithmetic import formats
from megatron_fp4.arithmetic.block_sizes import check_divides
from megatron_fp4.arithmetic.formats import widen
from megatron_fp4.arithmetic.gain import scales_of_unit_gain
from megatron_fp4.arithmetic.philox import WHOLE, Key, random_bits16
from megatron_fp4.arithmetic.quantizer_fields import Rule, check_fields
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

WHOLE_AXIS = 0  # a block size that means the whole axis
COUNTS = 4  # integers of `QuantizedTensor.counts` before the reciprocals


@dataclass(frozen=True)
class Quantizer:
    """How a matrix is quantized to 4-bit (or FP8) codes and block scales.

    element: the format of the codes: e2m1, or e1m2 (a uniform grid); in FP8 e4m3 or e5m2.
    scale: the format of the block scales: e8m0, e4m3, ue5m3 or fp32.
    block: (across, along): the elements that share a scale: `across` rows (the block height) by
        `along` elements of the blocked axis (the block length). 0 is the whole axis: (1, 0) is a
        scale for each row, (0, 0) one for the tensor; no other block has a 0.
    rule: how a block's scale follows from its largest magnitude.
        e8m0: floor (OCP; may clip), ceil (never clips; TetraJet, arXiv 2502.20853, section 3.2),
        nearest (may clip), or mse (floor's scale or twice that, by the smaller squared error).
        e4m3, ue5m3: nearest, up, and of e2m1 four-over-six (the maximum is scaled to 6 or 4, by the
        smaller error; arXiv 2512.02010) or mse-fp8 (the best of those that FP8 takes). fp32: absmax
    rounding: nearest (ties to even), stochastic, or ema: to the neighbour on the grid that is
        nearer to a moving average of the tensor (e2m1 and e8m0; Q-EMA, arXiv 2502.20853).
    prescale: multiplies the scaled value before it is rounded (3/4 in "Training LLMs with MXFP4",
        arXiv 2502.20586). Decoded values contain it; the GEMM's `correction` undoes it.
    tensor_max: e4m3 and ue5m3 only. Adds a tensor scale, chosen so that the largest block scale is
        about `tensor_max` (NVFP4: 448); 0 adds none.
    inflate: multiplies e4m3 and ue5m3 block scales; with 17/16 a rounded scale never clips.
    row_max: e8m0, e4m3 and ue5m3. As tensor_max, but each row has a scale of its own, chosen so
        that its largest block scale is about `row_max`; under e8m0, where it is a power of two, so
        that its largest magnitude is row_max times the largest element. 0 adds none.
    unit_gain: e4m3 and ue5m3. Elements along the blocked axis in groups of which the block scales
        are multiplied by <x, x> / <x, q> after x was rounded to q, so that the gain
        <x, q> / <x, x> is 1 (MS-EDEN, arXiv 2601.22813). 0 multiplies nothing.
    scale_rounding: how such products are rounded to scales: nearest or stochastic.
    Raises ConfigError for fields that contradict each other.
    """

    element: Literal["e2m1", "e1m2", "e4m3", "e5m2"] = "e2m1"
    scale: Literal["e8m0", "e4m3", "ue5m3", "fp32"] = "e8m0"
    block: tuple[int, int] = (1, 32)
    rule: Rule = "floor"
    rounding: Literal["nearest", "stochastic", "ema"] = "nearest"
    prescale: float = 1.0
    tensor_max: float = 0.0
    inflate: float = 1.0
    row_max: float = 0.0
    unit_gain: int = 0
    scale_rounding: Literal["nearest", "stochastic"] = "nearest"

    def __post_init__(self) -> None:
        check_fields(self)

    def __hash__(self) -> int:  # cheap, since every call of a linear hashes it to find its plan
        return self._hash

    @cached_property
    def _hash(self) -> int:
        words = self.element, self.scale, self.block, self.rule, self.rounding
        return crc32(repr(words).encode())  # equal in every process, since pickling stores it

    @cached_property
    def fields(self) -> tuple[Any, ...]:
        """The arguments of the constructor. Their hash takes no Python code."""
        return tuple(getattr(self, field.name) for field in fields(self))

    @cached_property
    def format(self) -> formats.Fp4 | formats.Fp8:
        return formats.ELEMENTS[self.element]

    @cached_property
    def stochastic(self) -> bool:
        return self.rounding == "stochastic"

    @cached_property
    def draws(self) -> bool:
        """Whether it draws random bits, for elements or for scales."""
        return self.stochastic or self.scale_rounding == "stochastic"

    @cached_property
    def mxfp4(self) -> bool:
        """Whether the format is OCP's MXFP4: E2M1 with an E8M0 scale for each block of 32."""
        form = self.element, self.scale, self.block, self.row_max
        return form == ("e2m1", "e8m0", (1, 32), 0.0)

    @cached_property
    def spans_axis(self) -> bool:
        """Whether a block spans the whole blocked axis: its scale can then multiply the product."""
        return self.block[1] == WHOLE_AXIS

    @cached_property
    def scales_product(self) -> bool:
        """Whether a scale of rows or of the tensor is left to multiply the product with."""
        return self.spans_axis or self.tensor_max > 0 or self.row_max > 0

    @cached_property
    def exact_in_bf16(self) -> bool:
        """Whether elements times block scales are BF16 numbers: no float32 scale lies within the
        blocked axis."""
        return self.spans_axis or self.scale != "fp32"

    def nbytes(self, rows: int, k: int) -> int:
        """The bytes of codes and scales of a [rows, k] matrix with the blocked axis last."""
        codes = rows * k // 2 if self.format.packed else rows * k
        across, along = self.block[0] or rows, self.block[1] or k
        scales = (rows // across) * (k // along) * (4 if self.scale == "fp32" else 1)
        return codes + scales + 4 * (rows if self.row_max else self.tensor_max > 0)

    def scale_spans(self, sharded: int | None, axis: int) -> bool:
        """Whether ranks share a scale of a matrix that is blocked along `axis` and sharded over
        ranks along the axis `sharded` (None: not sharded)."""
        if self.tensor_max or self.block == (WHOLE_AXIS, WHOLE_AXIS):
            return sharded is not None
        return (self.spans_axis or self.row_max > 0) and sharded == axis


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
        """The factors that multiply the elements of each block, without the tensor scale."""
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
        average = average_for(x, quantizer, average)
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


# --- names --------------------------------------------------------------------------------------

NVFP4 = Quantizer(scale="e4m3", block=(1, 16), rule="nearest", tensor_max=448.0)

_NAMED = {
    "mxfp4": Quantizer(rule="floor"),
    "mxfp4-ceil": Quantizer(rule="ceil"),
    "nvfp4": NVFP4,
    "nvfp4-four-over-six": replace(NVFP4, rule="four-over-six", tensor_max=256.0),
    # A block scale that is rounded down makes values exceed 6. They are clipped, which biases
    # stochastic rounding. Scales larger by 17/16 prevent this. tensor_max 256 leaves room for
    # them below E4M3's maximum of 448.
    "nvfp4-17-16": replace(NVFP4, inflate=17 / 16, tensor_max=256.0),
    "vector": Quantizer(scale="fp32", block=(1, WHOLE_AXIS), rule="absmax"),
}


def list_quantizers() -> list[str]:
    """All names that `quantize` takes; "-sr" is the same quantizer with stochastic rounding."""
    twins = [f"{n}-sr" for n, q in _NAMED.items() if q.rule != "four-over-six"]
    return sorted([*_NAMED, *twins])


def get_quantizer(name: str) -> Quantizer:
    """The named Quantizer. Raises ConfigError, which lists the known names, for an unknown one."""
    if name not in list_quantizers():
        raise ConfigError(f"unknown quantizer {name!r}; known: {', '.join(list_quantizers())}")
    if name in _NAMED:
        return _NAMED[name]
    return replace(_NAMED[name.removesuffix("-sr")], rounding="stochastic")
