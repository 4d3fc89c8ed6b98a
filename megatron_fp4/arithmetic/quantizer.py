"""Quantizer: element grid, scale format, block, scale rule, rounding -> QuantizedTensor.

Plain PyTorch, and the oracle: every backend gives these codes and scales bit for bit
(docs/numerics.md is the contract).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal
from zlib import crc32

import torch
from torch import Tensor

from megatron_fp4.arithmetic import formats
from megatron_fp4.arithmetic.formats import widen
from megatron_fp4.arithmetic.philox import WHOLE, Key, random_bits16
from megatron_fp4.arithmetic.scaling import per_block, scale_average, scale_blocks, widest_max
from megatron_fp4.errors import ConfigError, check_choices
from megatron_fp4.inputs import check_tensor

WHOLE_AXIS = 0  # a block size that means the whole axis


@dataclass(frozen=True)
class Quantizer:
    """How a matrix becomes 4-bit (or FP8) codes and block scales.

    element: the grid of the codes: e2m1; e4m3 and e5m2 for operands that a method keeps in FP8.
    scale: the block scale's format: e8m0, e4m3, ue5m3, fp32.
    block: (across, along): the rows, and the elements of the blocked axis, that share a scale.
        0 is the whole axis: (1, 0) is a scale for each row, (0, 0) one for the tensor, and no
        other block has a 0.
    rule: e8m0: floor (OCP, may clip) or ceil (truncation-free: TetraJet, arXiv 2502.20853,
        section 3.2). e4m3, ue5m3: nearest, up, or four-over-six (a block's maximum goes to 6 or
        to 4, whichever errs less; arXiv 2512.02010). fp32: absmax.
    rounding: nearest (ties to even), stochastic, or ema: of the two neighbours on the grid the one
        nearer to a moving average of the tensor (e8m0 scales; Q-EMA, arXiv 2502.20853).
    prescale: multiplies the scaled value before it is rounded, and is not undone here: the
        GEMM's correction does (3/4 in "Training LLMs with MXFP4", arXiv 2502.20586).
    tensor_max: e4m3, ue5m3: the largest block scale that the tensor scale aims at (NVFP4: 448);
        0 leaves the tensor scale out.
    inflate: multiplies e4m3 and ue5m3 block scales (17/16: scale rounding no longer clips).
    """

    element: Literal["e2m1", "e4m3", "e5m2"] = "e2m1"
    scale: Literal["e8m0", "e4m3", "ue5m3", "fp32"] = "e8m0"
    block: tuple[int, int] = (1, 32)
    rule: Literal["floor", "ceil", "nearest", "up", "four-over-six", "absmax"] = "floor"
    rounding: Literal["nearest", "stochastic", "ema"] = "nearest"
    prescale: float = 1.0
    tensor_max: float = 0.0
    inflate: float = 1.0

    def __post_init__(self) -> None:
        check_choices(self)
        sizes = [b for b in self.block if isinstance(b, int) and b >= 0]
        if len(self.block) != 2 or sizes != list(self.block) or (not self.outer and 0 in sizes):
            raise ConfigError(f"block is [across, along], [1, 0] or [0, 0], not {self.block}")
        if self.outer and self.block[0] > 1:
            raise ConfigError(f"a block along a whole axis is [1, 0] or [0, 0], not {self.block}")
        factors = (self.prescale, self.inflate, self.tensor_max)
        if not (all(map(math.isfinite, factors)) and min(factors[:2]) > 0 and self.tensor_max >= 0):
            raise ConfigError(
                "prescale and inflate must be finite and above 0, tensor_max 0 or more"
            )
        rules = {"e8m0": ("floor", "ceil"), "fp32": ("absmax",)}.get(
            self.scale, ("nearest", "up", "four-over-six")
        )
        if self.scale in ("e8m0", "fp32") and (self.tensor_max or self.inflate != 1.0):
            raise ConfigError(f"scale {self.scale} takes neither tensor_max nor inflate")
        if self.rule not in rules:
            raise ConfigError(f"scale {self.scale} takes rule {' or '.join(rules)}: {self.rule!r}")
        if self.scale == "fp32" and not self.outer:
            raise ConfigError("fp32 scales take blocks of a whole axis: the GEMM leaves them out")
        if self.element != "e2m1" and (self.scale != "fp32" or self.stochastic):
            raise ConfigError(f"{self.element} elements take fp32 scales and nearest rounding")
        form = self.element, self.scale, self.prescale
        if self.rounding == "ema" and form != ("e2m1", "e8m0", 1.0):
            raise ConfigError("rounding ema takes e2m1 elements, e8m0 scales and no prescale")
        if self.rule == "four-over-six" and (self.block[0] != 1 or self.stochastic):
            raise ConfigError("four-over-six takes blocks of one row and nearest rounding")

    def __hash__(self) -> int:  # a key in every call of every linear
        return self._hash

    @cached_property
    def _hash(self) -> int:
        words = self.element, self.scale, self.block, self.rule, self.rounding
        return crc32(repr(words).encode())  # the same in a process that unpickles it

    @cached_property
    def stochastic(self) -> bool:
        return self.rounding == "stochastic"

    @cached_property
    def mxfp4(self) -> bool:
        """Whether it makes OCP's MXFP4: E2M1 with an E8M0 scale for each block of 32."""
        return (self.element, self.scale, self.block) == ("e2m1", "e8m0", (1, 32))

    @cached_property
    def outer(self) -> bool:
        """Whether the block scale spans the whole blocked axis, so that it leaves the GEMM."""
        return self.block[1] == WHOLE_AXIS

    def nbytes(self, rows: int, k: int) -> int:
        """The bytes of codes and scales of a [rows, k] matrix whose blocked axis is the last."""
        codes = rows * k // 2 if self.element == "e2m1" else rows * k
        across, along = self.block[0] or rows, self.block[1] or k
        return codes + (rows // across) * (k // along) * (4 if self.scale == "fp32" else 1)

    def scale_spans(self, sharded: int | None, axis: int) -> bool:
        """Whether ranks share a scale of a matrix blocked along `axis` and sharded along `sharded`
        (None: not sharded)."""
        if self.tensor_max or self.block == (WHOLE_AXIS, WHOLE_AXIS):
            return sharded is not None
        return self.outer and sharded == axis


@dataclass(frozen=True)
class QuantizedTensor:
    """Codes and scales of one matrix, the blocked axis last.

    codes: uint8; E2M1 packed two a byte [..., K / 2], FP8 one a byte [..., K].
    scales: one for each block [rows / across, K / along]: uint8 (E8M0, E4M3, UE5M3 codes) or
        float32 (what divides the tensor: the decoded value is code / scale).
    tensor_scale: float32 scalar that multiplies every block scale, or None.
    axis: the blocked axis of the tensor that was quantized; shape: that tensor's shape.
    """

    codes: Tensor
    scales: Tensor
    tensor_scale: Tensor | None
    quantizer: Quantizer
    shape: torch.Size
    axis: int

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def plain(self) -> QuantizedTensor:
        """Itself, without what else a backend has made with it."""
        return self

    def elements(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The codes' values on the element grid, the blocked axis last."""
        if self.quantizer.element == "e2m1":
            return formats.decode_packed_e2m1(self.codes, dtype)
        return formats.decode_fp8(self.codes, self.quantizer.element, dtype)

    def block_scales(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """What multiplies the elements of each block, without the tensor scale."""
        if self.quantizer.scale == "e8m0":
            return formats.decode_e8m0(self.scales, dtype)
        if self.quantizer.scale == "fp32":
            return self.scales.to(dtype).reciprocal()
        return formats.SCALE_FLOATS[self.quantizer.scale].decode(self.scales, dtype)

    def factors(self, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor | None]:
        """(values, outer): values [rows, K], exact in BF16, blocked axis last; outer: what is
        left to multiply the GEMM's output rows with: [rows, 1], a scalar [1, 1], or None."""
        values = self.elements(dtype)
        values = values.reshape(math.prod(values.shape[:-1]), values.shape[-1])
        if self.quantizer.outer:
            outer = self.block_scales(formats.wide(dtype)).view(-1, 1)
            return values, outer if self.tensor_scale is None else outer * self.tensor_scale
        values = per_block(values, self.quantizer.block, self.block_scales(dtype), torch.mul)
        return values, None if self.tensor_scale is None else self.tensor_scale.view(1, 1)

    def unscaled(self) -> QuantizedTensor:
        """A matrix with float32 scales, with one of 1."""
        assert self.quantizer.scale == "fp32"
        quantizer = replace(self.quantizer, block=(WHOLE_AXIS, WHOLE_AXIS))
        return replace(self, scales=self.scales.new_ones(1, 1), quantizer=quantizer)

    def along(self, axis: int) -> QuantizedTensor:
        """The same elements of a matrix with one scale, `axis` last. Both axes are even."""
        if axis == self.axis:
            return self
        if self.quantizer.element == "e2m1":
            codes = formats.pack(formats.unpack(self.codes).t().contiguous())
        else:
            codes = self.codes.t().contiguous()
        return replace(self, codes=codes, axis=axis)

    def tally(self) -> Tensor:
        """int32 [2]: how many elements were rounded (none here), and whether a block is NaN."""
        if self.quantizer.scale == "fp32":
            nan = self.scales.isnan().any()
        else:
            nan = (self.scales == (0x7F if self.quantizer.scale == "e4m3" else 0xFF)).any()
        return torch.stack((torch.zeros_like(nan), nan)).int()

    def grid_coordinates(self, x: Tensor) -> Tensor:
        """`x`, of the shape and blocked axis of the quantized tensor, divided by its scales (and
        prescaled): where its elements lie on the element grid. A matrix with the blocked axis
        last; NaN or Inf in blocks whose scale is zero or NaN."""
        matrix = widen(x).movedim(self.axis, -1)
        matrix = matrix.reshape(-1, matrix.shape[-1])
        if self.quantizer.prescale != 1.0:
            matrix = matrix * self.quantizer.prescale
        if self.quantizer.scale == "fp32":
            return matrix * self.scales.to(matrix.dtype).view(-1, 1)
        scales = self.block_scales(matrix.dtype)
        if self.tensor_scale is not None:
            scales = scales * self.tensor_scale
        return per_block(matrix, self.quantizer.block, scales, torch.div)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The tensor that the codes stand for, in the original layout and `dtype`."""
        wide = formats.wide(dtype)
        values, outer = self.factors(wide)
        if self.quantizer.scale == "fp32":
            values = values / self.scales.to(wide).view(-1, 1)
        elif outer is not None:
            values = values * outer
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
    widest: Tensor | None = None,
) -> QuantizedTensor:
    """Quantize `x` in blocks along `axis`.

    x: at least one axis; float32 and narrower are computed in float32, float64 in float64.
    bits: random integers in [0, 65536) of x's shape; required for stochastic rounding.
    average: a moving average of x, of its shape; required for rounding ema. Scales and signs are
        x's.
    widest: the largest `absolute_max` of the ranks that share a scale (`Quantizer.scale_spans`);
        None where no rank holds another part of it.
    Raises ConfigError where the block does not divide the axis, or what the rounding takes is not
    given.
    """
    if not isinstance(axis, int) or not -x.dim() <= axis < x.dim():
        raise ConfigError(f"a tensor of {x.dim()} axes has no axis {axis}")
    axis %= x.dim()
    moved = x.detach().movedim(axis, -1)
    rows, k = math.prod(moved.shape[:-1]), moved.shape[-1]
    check_divides(quantizer, rows, k, axis)
    matrix = _matrix(x, axis)
    scaled, scales, tensor_scale, finite = scale_blocks(matrix, quantizer, widest)
    if quantizer.prescale != 1.0:
        scaled = scaled * quantizer.prescale
    if quantizer.element == "e2m1":
        if quantizer.stochastic:
            if bits is None:
                raise ConfigError("a stochastic quantizer needs random bits: give it a seed")
            bits = bits.movedim(axis, -1).reshape(rows, k).contiguous()
        toward = None
        average = average_for(x, quantizer, average)
        if average is not None:
            kept = _matrix(average, axis).to(matrix.dtype)
            toward, scales, finite = scale_average(kept, matrix, scales, finite, quantizer)
        codes = formats.encode_e2m1(scaled, bits if quantizer.stochastic else None, toward)
    else:
        codes = formats.encode_fp8(scaled, quantizer.element)
    codes = per_block(codes, quantizer.block, finite.to(torch.uint8), torch.mul)
    if quantizer.element == "e2m1":
        codes = formats.pack(codes)
    codes = codes.view(*moved.shape[:-1], codes.shape[-1])
    if quantizer.block[0] == 1:
        scales = scales.view(*moved.shape[:-1], scales.shape[-1])
    return QuantizedTensor(codes, scales, tensor_scale, quantizer, x.shape, axis)


def average_for(
    x: Tensor | QuantizedTensor, quantizer: Quantizer, average: Tensor | None
) -> Tensor | None:
    """What the quantizer takes of a moving average of x. Raises ConfigError where it takes one and
    there is none of x's shape."""
    if quantizer.rounding != "ema":
        return None
    if average is None or average.shape != x.shape:
        raise ConfigError("rounding ema takes a moving average of the tensor's shape")
    return average


def absolute_max(x: Tensor, quantizer: Quantizer, axis: int) -> Tensor:
    """What ranks that hold parts of `x` take the maximum of before `quantize_matrix`: [rows, 1] for
    a scale of each row, one number for a scale of the tensor."""
    return widest_max(_matrix(x, axis), quantizer)


def _matrix(x: Tensor, axis: int) -> Tensor:
    """[rows, K] with the blocked axis last, float32 or wider."""
    moved = x.detach().movedim(axis, -1)
    rows, k = math.prod(moved.shape[:-1]), moved.shape[-1]
    return widen(moved.reshape(rows, k).contiguous())  # a transpose costs least while narrow


def quantize(
    x: Tensor,
    quantizer: Quantizer | str,
    *,
    axis: int = -1,
    seed: int | None = None,
    average: Tensor | None = None,
) -> QuantizedTensor:
    """Quantize a whole tensor along `axis`, by a Quantizer or the name of one.

    seed: keys the random bits of a stochastic quantizer (step 0, stream 0); without it a
        stochastic quantizer is an error.
    average: a moving average of x, which rounding ema takes.
    x: dense, in float16, bfloat16, float32 or float64.
    No gradient reaches x through the result or its `dequantize`: `linear` and `Linear` are
    differentiable, and this function is for looking at codes.
    Raises ConfigError for an unknown name, a missing seed or average, another tensor than that, or
    an axis that blocks do not divide.
    """
    if not isinstance(quantizer, Quantizer):
        quantizer = get_quantizer(quantizer)
    check_tensor(x, "quantize: x")
    bits = None
    if quantizer.stochastic:
        if seed is None:
            raise ConfigError("a stochastic quantizer needs random bits: pass seed=<integer>")
        rows, columns = math.prod(x.shape[:-1]), x.shape[-1] if x.dim() else 1
        bits = random_bits16(rows, columns, Key(seed), 0, WHOLE, x.device).view(x.shape)
    return quantize_matrix(x, quantizer, axis=axis, bits=bits, average=average)


def check_divides(quantizer: Quantizer, rows: int, k: int, axis: int | str) -> None:
    """Raise ConfigError unless blocks tile a [rows, k] matrix whose blocked axis is the last."""
    across, along = quantizer.block
    if along and k % along:
        raise ConfigError(
            f"axis {axis} has {k} elements, not a multiple of the block of {along}: nothing is "
            "padded silently; pad it or choose another block"
        )
    if across and rows % across:
        raise ConfigError(
            f"{rows} rows are not a multiple of the {across} x {along} block across axis {axis}"
        )
    if quantizer.element == "e2m1" and k % 2:
        raise ConfigError(f"axis {axis} has {k} elements; packing two a byte needs an even number")


# --- names --------------------------------------------------------------------------------------

NVFP4 = Quantizer(scale="e4m3", block=(1, 16), rule="nearest", tensor_max=448.0)

_NAMED = {
    "mxfp4": Quantizer(rule="floor"),
    "mxfp4-ceil": Quantizer(rule="ceil"),
    "nvfp4": NVFP4,
    "nvfp4-four-over-six": replace(NVFP4, rule="four-over-six", tensor_max=256.0),
    # Scale rounding pushes some values past 6, which biases plain NVFP4 under stochastic
    # rounding: scales 17/16 larger cover it, and need the room that 256 leaves below 448.
    "nvfp4-17-16": replace(NVFP4, inflate=17 / 16, tensor_max=256.0),
    "vector": Quantizer(scale="fp32", block=(1, WHOLE_AXIS), rule="absmax"),
}


def list_quantizers() -> list[str]:
    """Every name that `quantize` takes; "-sr" is the stochastically rounding twin."""
    twins = [f"{n}-sr" for n, q in _NAMED.items() if q.rule != "four-over-six"]
    return sorted([*_NAMED, *twins])


def get_quantizer(name: str) -> Quantizer:
    """The named Quantizer. Raises ConfigError that lists the known names."""
    if name not in list_quantizers():
        raise ConfigError(f"unknown quantizer {name!r}; known: {', '.join(list_quantizers())}")
    if name in _NAMED:
        return _NAMED[name]
    return replace(_NAMED[name.removesuffix("-sr")], rounding="stochastic")
