"""The types of a GEMM's operand on its way from its maker to its multiplier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_fp4.arithmetic.quantizer import QuantizedTensor

# [rows, K] with the contracted axis last: quantized, or in high precision.
Operand = QuantizedTensor | Tensor


@dataclass(slots=True)  # a named tuple costs twice the host time
class Carriers:
    """An operand in FP8: elements, and a factor for each row. docs/numerics.md, Carriers, defines
    them.

    A kernel can write the elements beside the codes, with one guessed row exponent for all rows.
    They are multiplied after `kernels.carrier.carried` has corrected the rows for which the guess
    was wrong, and has written the factors.

    values: uint8 [rows, K], the bits of the FP8 elements. element: their FP8 dtype. counts: int32
    [4 + rows]: the tally, the guessed row exponent, 0, and the bits of the float32 row factors.
    addresses: of the codes, their scales, `values` and `counts`; see `kernels.launch.address`.
    """

    values: Tensor
    element: torch.dtype
    counts: Tensor
    addresses: tuple[Any, Any, Any, Any]

    @property
    def elements(self) -> Tensor:
        """The FP8 elements [rows, K]."""
        return self.values.view(self.element)

    @property
    def outer(self) -> Tensor:
        """The row factors, float32 [rows, 1], which multiply the product."""
        return self.counts[4:].view(torch.float32).view(-1, 1)

    @property
    def tally(self) -> Tensor:
        """As `Decoded.tally`."""
        return self.counts[:2]


@dataclass(slots=True)
class Made:
    """An operand as its maker returns it.

    operand: codes and scales, or a matrix in high precision. carriers: the same operand in FP8, if
    the maker wrote it beside the codes; else None. elements: the same, where scales are of whole
    rows or of the tensor, so that the elements are right without a correction.
    """

    operand: Operand
    carriers: Carriers | None = None
    elements: Decoded | None = None


class Decoded(NamedTuple):
    """An operand as plain values, with a factor for each row: it stands for values * outer.

    values: [rows, K], the contracted axis last. outer: float32 or float64 [rows, 1], [1, 1] or
    None; the multiplier applies it to the product. tally: int32 [2], how many elements the
    conversion to `values` rounded and how many blocks are NaN; None where nothing was counted.
    """

    values: Tensor
    outer: Tensor | None = None
    tally: Tensor | None = None


# What a multiplier reads: decoded values, FP8 carriers, or codes and scales where the tensor cores
# decode them.
Form = Decoded | Carriers | QuantizedTensor
