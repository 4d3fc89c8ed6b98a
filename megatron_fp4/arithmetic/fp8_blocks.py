"""FP8 or FP16 codes with an E8M0 scale for each block of a vector, for numbers beside the GEMMs.

Unlike an operand of a GEMM, a vector here may have any length: its last block may be short. No
element is clipped, so that stochastic rounding is unbiased, and what has been decoded is encoded
again without a change of its values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from megatron_fp4.arithmetic.formats import (
    E8M0_BIAS,
    E8M0_NAN,
    FP8_ELEMENTS,
    block_exponent,
    decode_e8m0,
    encode_e8m0,
)
from megatron_fp4.arithmetic.philox import GROUP, Key, philox4x32, word
from megatron_fp4.errors import ConfigError

_LOW_32 = 0xFFFFFFFF


class _Element(NamedTuple):
    """A small float.

    mantissa: its bits. lowest: the exponent of the smallest normal number. values: its dtype.
    codes: the dtype in which its codes are kept. integers: that of their bits.
    """

    mantissa: int
    lowest: int
    values: torch.dtype
    codes: torch.dtype
    integers: torch.dtype


_ELEMENTS = {
    "e4m3": _Element(3, -6, torch.float8_e4m3fn, torch.uint8, torch.uint8),
    "e5m2": _Element(2, -14, torch.float8_e5m2, torch.uint8, torch.uint8),
    "fp16": _Element(10, -14, torch.float16, torch.float16, torch.int16),
}


@dataclass(frozen=True)
class FloatBlocks:
    """How a vector is stored: codes of a small float in blocks.

    element: "e4m3", "e5m2" or "fp16". block: the elements that share a scale. Raises ConfigError
    for other elements, and for a block that is no positive multiple of 8.

    A magnitude above 15/16 of 2^128 may be rounded up to 2^128, which decodes to Inf.
    """

    element: str
    block: int = 128

    _least: ClassVar[int] = -E8M0_BIAS  # the exponent of the smallest scale

    def __post_init__(self) -> None:
        if self.element not in _ELEMENTS:
            known = ", ".join(_ELEMENTS)
            raise ConfigError(f"elements in blocks are {known}, not {self.element!r}")
        if self.block < 1 or self.block % 8:
            raise ConfigError(f"a block has a multiple of 8 elements, not {self.block}")

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the codes: uint8 of FP8, float16 of FP16."""
        return _ELEMENTS[self.element].codes

    @property
    def bits(self) -> float:
        """The bits of an element, its share of a scale included."""
        return 8 * self.dtype.itemsize + 8 / self.block

    def blocks(self, elements: int) -> int:
        """The number of scales of a vector."""
        return -(-elements // self.block)

    def encode(self, x: Tensor, bits: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Codes (`dtype` [n]) and scales (uint8 [ceil(n / block)], E8M0) of a vector.

        x: float32 [n]. bits: None rounds to nearest even. Otherwise int32 [n], uniform integers in
        [0, 65536), for stochastic rounding: a magnitude is rounded up where its fraction of the
        interval between two neighbours exceeds (bits + 1/2) / 65536.

        The scale is the smallest power of two by which no element exceeds the format's largest
        number. A block with Inf or NaN has the scale NaN (255) and codes 0.
        """
        blocks = self._padded(x)
        maxima = blocks.abs().amax(1)
        finite = maxima.isfinite()
        mantissa, exponent = block_exponent(torch.where(finite, maxima, 0.0))
        form = _ELEMENTS[self.element]
        most = block_exponent(torch.tensor(torch.finfo(form.values).max, device=x.device))
        exponent = exponent - most[1] + (mantissa > most[0]).int()
        scales = torch.where(maxima > 0, encode_e8m0(exponent.clamp(min=self._least)), 0)
        # 2^-s from the byte of -s. The byte of s = -127 would be 254, which is 2^127.
        scaled = blocks * decode_e8m0(254 - scales.int())[:, None]
        scaled = torch.where(finite[:, None], scaled, 0.0)
        if bits is None:
            codes = scaled.to(form.values).view(form.codes)
        else:
            codes = self._stochastic(scaled, self._padded(bits))
        scales = torch.where(finite, scales, E8M0_NAN).to(torch.uint8)
        return codes.flatten()[: len(x)].contiguous(), scales

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        """The values, float32 [n], of what `encode` returned; NaN in a block whose scale is NaN."""
        values = codes.view(_ELEMENTS[self.element].values).float()
        factors = decode_e8m0(scales)
        return (self._padded(values) * factors[:, None]).flatten()[: len(codes)]

    def _padded(self, x: Tensor) -> Tensor:
        """A vector as [blocks, block], with zeros after its end."""
        missing = self.blocks(len(x)) * self.block - len(x)
        return torch.nn.functional.pad(x, (0, missing)).view(-1, self.block)

    def _stochastic(self, v: Tensor, bits: Tensor) -> Tensor:
        """Codes of float32 values `v`, stochastically rounded; see `encode`.

        No magnitude may exceed the format's largest number.
        """
        mantissa, lowest, _, codes, integers = _ELEMENTS[self.element]
        magnitude = v.abs()
        exponent = (torch.frexp(magnitude)[1] - 1).clamp(min=lowest)  # subnormals share the lowest
        exponent = torch.where(magnitude > 0, exponent, lowest)
        steps = magnitude * decode_e8m0(mantissa - exponent + E8M0_BIAS)
        integer = steps.floor()
        up = self._fraction(steps, integer) * 65536 > bits.float() + 0.5
        # Where a mantissa is rounded up to the next binade, the addition carries into the exponent.
        code = ((exponent - lowest) << mantissa) + (integer + up).int()
        sign = v.signbit().int() << 8 * codes.itemsize - 1
        return (code | sign).to(integers).view(codes)

    def _fraction(self, steps: Tensor, integer: Tensor) -> Tensor:
        """How far a magnitude is from its lower neighbour to its upper one, in [0, 1).

        steps: the magnitude in units of their distance. integer: the lower neighbour.
        """
        return steps - integer


@dataclass(frozen=True)
class Fp8Blocks(FloatBlocks):
    """How a vector is stored: FP8 codes in blocks.

    element: "e4m3" or "e5m2". block: the elements that share a scale. Raises ConfigError for other
    elements, and for a block that is no positive multiple of 8.
    """

    element: str = "e4m3"

    def __post_init__(self) -> None:
        if self.element not in FP8_ELEMENTS:
            raise ConfigError(f"FP8 elements are e4m3 or e5m2, not {self.element!r}")
        super().__post_init__()


@dataclass(frozen=True)
class RootBlocks(Fp8Blocks):
    """How a vector without negative numbers is stored: FP8 codes of the roots, in blocks.

    Stochastic rounding is unbiased in the numbers, not in their roots: of two neighbours a < b, the
    root of x becomes b with the probability (x - a^2) / (b^2 - a^2). A block with a negative number
    is stored as NaN.
    """

    # The square of the smallest positive code, 2^-9 times this scale, is 2^-148: no square is
    # rounded, and none becomes 0.
    _least: ClassVar[int] = -65

    def __post_init__(self) -> None:
        if self.element != "e4m3":
            raise ConfigError(f"roots are stored as e4m3, not {self.element!r}")
        super().__post_init__()

    def encode(self, x: Tensor, bits: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return super().encode(x.sqrt(), bits)

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        return super().decode(codes, scales).square()

    def _fraction(self, steps: Tensor, integer: Tensor) -> Tensor:
        return (steps - integer) * ((steps + integer) / (2 * integer + 1))


def bits_at(index: Tensor, key: Key, stream: int) -> Tensor:
    """Uniform integers in [0, 65536), int32 [n], for the elements of a vector by their indices.

    index: int64 [n], of each element in the unsharded vector, or in all vectors of the stream laid
    end to end. Eight elements with consecutive indices, from a multiple of 8 on, share a draw, as
    the columns of a matrix do in `philox.random_bits16`.
    """
    groups, at = torch.unique_consecutive(index >> 3, return_inverse=True)
    device = index.device
    counter = groups & _LOW_32, groups >> 32, word(key.step, device), word(stream, device)
    halves = torch.stack(philox4x32(counter, key.words), -1).to(torch.int32).view(torch.int16)
    return halves.view(-1, GROUP)[at, index & 7].to(torch.int32) & 0xFFFF
