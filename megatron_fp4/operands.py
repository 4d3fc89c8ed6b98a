"""An operand of a GEMM, from the maker that quantizes it to the multiplier that takes it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_fp4.arithmetic.quantizer import QuantizedTensor

# [rows, K] with the contracted axis last: quantized, or in high precision.
Operand = QuantizedTensor | Tensor


class Carriers(NamedTuple):
    """FP8 elements that a kernel wrote beside MXFP4 codes, under one row exponent guessed for all
    rows. `kernels.carrier.carried` corrects the rows for which the guess was wrong.

    values: uint8 [rows, K]. element: the FP8 dtype of the values. counts: int32 [2], see
    `Decoded.tally`; the guessed exponent lies behind it in memory.
    """

    values: Tensor
    element: torch.dtype
    counts: Tensor


class Made(NamedTuple):
    """An operand as its maker left it, with carriers where the maker wrote them too."""

    operand: Operand
    carriers: Carriers | None = None


class Decoded(NamedTuple):
    """An operand as values and the factors of its rows.

    values: [rows, K]. outer: [rows, 1], [1, 1] or None; multiplies the rows of the product. tally:
    int32 [2], how many elements the conversion to `values` rounded and how many blocks are NaN;
    None where nothing was counted.
    """

    values: Tensor
    outer: Tensor | None = None
    tally: Tensor | None = None


# What a multiplier takes: decoded, or codes and scales where the tensor cores decode.
Form = Decoded | QuantizedTensor
