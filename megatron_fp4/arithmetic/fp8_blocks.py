"""FP8 codes with an E8M0 scale for each block of a vector, for numbers beside the GEMMs.

Unlike an operand of a GEMM, a vector here may have any length: its last block may be short. No
element is clipped, so that stochastic rounding is unbiased, and what has been decoded is encoded
again without a change of its values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_fp4.arithmetic.formats import (
    E8M0_NAN,
    FP8_ELEMENTS,
    block_exponent,
    decode_e8m0,
    decode_fp8,
    element_max,
    encode_e8m0,
    encode_fp8,
)
from megatron_fp4.arithmetic.philox import GROUP, Key, philox4x32, word
from megatron_fp4.errors import ConfigError

# Mantissa bits and the exponent of the smallest normal number, by element.
_LAYOUT = {"e4m3": (3, -6), "e5m2": (2, -14)}
_LOW_32 = 0xFFFFFFFF


@dataclass(frozen=True)
class Fp8Blocks:
    """How a vector is stored: FP8 codes in blocks.

    element: "e4m3" or "e5m2". block: the elements that share a scale. Raises ConfigError for other
    elements, and for a block that is no positive multiple of 8.
    """

    element: str = "e4m3"
    block: int = 128

    def __post_init__(self) -> None:
        if self.element not in FP8_ELEMENTS:
            raise ConfigError(f"FP8 elements are e4m3 or e5m2, not {self.element!r}")
        if self.block < 1 or self.block % 8:
            raise ConfigError(f"a block has a multiple of 8 elements, not {self.block}")

    @property
    def bits(self) -> float:
        """The bits of an element, its share of a scale included."""
        return 8 + 8 / self.block

    def blocks(self, elements: int) -> int:
        """The number of scales of a vector."""
        return -(-elements // self.block)

    def encode(self, x: Tensor, bits: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Codes (uint8 [n]) and scales (uint8 [ceil(n / block)], E8M0) of a vector.

        x: float32 [n]. bits: None rounds to nearest even. Otherwise int32 [n], uniform integers in
        [0, 65536), for stochastic rounding: a magnitude is rounded up where its fraction of the
        interval between two neighbours exceeds (bits + 1/2) / 65536.

        The scale is the smallest power of two by which no element exceeds the format's largest
        number. A block with Inf or NaN has the scale NaN (255) and codes 0.
        """
        blocks = self._padded(x)
        largest = blocks.abs().amax(1)
        finite = largest.isfinite()
        mantissa, exponent = block_exponent(torch.where(finite, largest, 0.0))
        most = block_exponent(torch.tensor(element_max(self.element)))
        exponent = exponent - most[1] + (mantissa > most[0]).int()
        scales = torch.where(largest > 0, encode_e8m0(exponent), 0)
        # 2^-s from the byte of -s. The byte of s = -127 would be 254, which is 2^127.
        scaled = blocks * decode_e8m0(254 - scales.int())[:, None]
        scaled = torch.where(finite[:, None], scaled, 0.0)
        if bits is None:
            codes = encode_fp8(scaled, self.element)
        else:
            codes = _stochastic(scaled, self._padded(bits), self.element)
        scales = torch.where(finite, scales, E8M0_NAN).to(torch.uint8)
        return codes.flatten()[: len(x)].contiguous(), scales

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        """The values, float32 [n], of what `encode` returned; NaN in a block whose scale is NaN."""
        values = decode_fp8(codes, self.element, torch.float32)
        factors = decode_e8m0(scales)
        return (self._padded(values) * factors[:, None]).flatten()[: len(codes)]

    def _padded(self, x: Tensor) -> Tensor:
        """A vector as [blocks, block], with zeros behind its end."""
        missing = self.blocks(len(x)) * self.block - len(x)
        return torch.nn.functional.pad(x, (0, missing)).view(-1, self.block)


def _stochastic(v: Tensor, bits: Tensor, element: str) -> Tensor:
    """FP8 codes (uint8) of float32 values `v`, stochastically rounded; see `Fp8Blocks.encode`.

    No magnitude may exceed the format's largest number.
    """
    mantissa, lowest = _LAYOUT[element]
    magnitude = v.abs()
    exponent = (torch.frexp(magnitude)[1] - 1).clamp(min=lowest)  # subnormals share the lowest
    exponent = torch.where(magnitude > 0, exponent, lowest)
    steps = torch.ldexp(magnitude, mantissa - exponent)
    integer = steps.floor()
    up = (steps - integer) * 65536 > bits + 0.5
    # Where a mantissa is rounded up to the next binade, the addition carries into the exponent.
    code = ((exponent - lowest) << mantissa) + (integer + up).int()
    return (code | v.signbit().int() << 7).to(torch.uint8)


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
