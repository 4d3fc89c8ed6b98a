"""The types of a GEMM's operand on its way from its maker to its multiplier."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_fp4.arithmetic.quantizer import QuantizedTensor

# [rows, K] with the contracted axis last: quantized, or in high precision.
Operand = QuantizedTensor | Tensor


class Carriers(NamedTuple):
    """FP8 elements that a kernel wrote beside MXFP4 codes, with one guessed exponent for all rows.

    `kernels.carrier.carried` corrects the rows for which the guessed row exponent was wrong.
    docs/numerics.md, Carriers, defines the elements and row exponents.

    values: uint8 [rows, K], the bits of the FP8 elements. element: their FP8 dtype. counts: int32
    [2], see `Decoded.tally`; the guessed exponent follows it in memory.
    """

    values: Tensor
    element: torch.dtype
    counts: Tensor


class Made(NamedTuple):
    """An operand as its maker returns it. carriers: None where the maker wrote none."""

    operand: Operand
    carriers: Carriers | None = None


class Decoded(NamedTuple):
    """An operand as plain values, with a factor for each row: it stands for values * outer.

    values: [rows, K], the contracted axis last. outer: float32 or float64 [rows, 1], [1, 1] or
    None; the multiplier applies it to the product. tally: int32 [2], how many elements the
    conversion to `values` rounded and how many blocks are NaN; None where nothing was counted.
    """

    values: Tensor
    outer: Tensor | None = None
    tally: Tensor | None = None


# What a multiplier reads: decoded values, or codes and scales where the tensor cores decode them.
Form = Decoded | QuantizedTensor
