"""BF16 as a way to store a vector of float32 numbers, with stochastic rounding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_fp4.arithmetic.philox import GROUP

_LARGEST = 0x7F7F  # the bits of the largest finite number


def rounded(x: Tensor, bits: Tensor | None = None) -> Tensor:
    """float32 numbers in BF16.

    bits: None rounds to nearest even. Otherwise int32, of the shape of x, uniform integers in
    [0, 65536), which are added to the low 16 bits before these are cut off: the probability of
    rounding a magnitude up is exactly its fraction of the interval between two neighbours. A finite
    number whose neighbour is Inf is rounded toward zero. Inf and NaN stay.
    """
    integers = x.view(torch.int32)
    if bits is None:
        bits = 0x7FFF + (integers >> 16 & 1)  # half to even
    # Of the sign and the magnitude only the latter grows, so the sum cannot overflow.
    magnitude = (((integers & 0x7FFFFFFF) + bits) >> 16).clamp(max=_LARGEST)
    found = (magnitude | integers >> 16 & 0x8000).to(torch.int16).view(torch.bfloat16)
    return torch.where(x.isfinite(), found, x.bfloat16())


@dataclass(frozen=True)
class Bf16Elements:
    """How a vector is stored: BF16 numbers, without scales; see `fp8_blocks.FloatBlocks`."""

    dtype = torch.bfloat16
    bits = 16.0
    block = GROUP  # the elements that a random draw serves

    def blocks(self, elements: int) -> int:
        """The number of scales of a vector: none."""
        return 0

    def encode(self, x: Tensor, bits: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The numbers (BF16 [n]), and no scales (uint8 [0]). x, bits: see `rounded`."""
        return rounded(x, bits), x.new_empty(0, dtype=torch.uint8)

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        """The values, float32 [n], of what `encode` returned."""
        return codes.float()
