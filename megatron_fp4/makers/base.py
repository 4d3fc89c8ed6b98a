"""Maker: the interface of what makes the operands of a GEMM from a matrix; OperandPlan: which
operand it makes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol

import torch
from torch import Tensor

from megatron_fp4.arithmetic.hadamard import FixedSigns, Hadamard
from megatron_fp4.arithmetic.philox import Noise, Signs
from megatron_fp4.arithmetic.quantizer import Quantizer
from megatron_fp4.operands import Made, Matrix, Operand

# What an operand is made from.
#   model     X, W or dY as the model holds it
#   swiglu    X of fc2: the SwiGLU of fc1's Y, which the model holds. dY of fc1: computed from fc1's
#             Y and the gradient of the SwiGLU's result, which the model holds
#   normed    X: the RMSNorm of what the model holds
#   inliers   X without its outliers
#   centered  X without its mean over tokens
#   codes     fprop's operand, as codes and scales. W of fprop itself: as its owners sent it
#   decoded   fprop's operand, decoded to `OperandPlan.dtype`; if fprop transformed it, after the
#             inverse Hadamard transform
#   values    fprop's operand, decoded without the scale of a whole row or tensor, which is
#             multiplied into dY instead
#   elements  fprop's codes without any scale; the scale of a whole row is multiplied into dY
Source = Literal[
    "model", "swiglu", "normed", "inliers", "centered", "codes", "decoded", "values", "elements"
]
# A matrix from which operands are made: "x", "w" or "dy", and its source.
MatrixName = tuple[str, Source]


@dataclass(frozen=True, eq=False)
class OperandPlan:
    """How one operand of a GEMM is made. The steps are in the order of the fields.

    gemm, letter: which operand it is: "fprop", "dgrad" or "wgrad"; "x", "w" or "dy".
    source: what it is made from; see Source.
    dtype: of the matrix that the source gives.
    codes: the quantizer of the source if it is given as codes and scales, else None.
    shape: rows and columns of that matrix as the model holds it, or divisors of them (see
        `Setting.tokens`).
    axis: the contracted axis of that matrix.
    is_part: whether that matrix has only this rank's part of the tokens.
    gathered: when the tokens of all ranks are gathered: "before" the operand is made (the matrix is
        sent) or "after" (codes and scales are sent); "" where nothing is gathered.
    folds: whether it is multiplied, along the contracted axis, by the row scales of the other
        operand of the GEMM.
    hadamard: the Hadamard transform; None is none.
    quantizer: None leaves the operand in high precision.
    agrees: whether ranks share a scale, and all-reduce the maximum of their largest magnitudes.
    carrier: the FP8 dtype of the elements that the maker writes beside the codes (`Made.carriers`,
        or `Made.elements` where scales are of whole rows or of the tensor); None: it writes none.
    """

    gemm: str
    letter: str
    source: Source
    dtype: torch.dtype
    codes: Quantizer | None
    shape: tuple[int, int]
    axis: int
    is_part: bool
    gathered: Literal["", "before", "after"]
    folds: bool
    hadamard: Hadamard | None
    quantizer: Quantizer | None
    agrees: bool
    carrier: torch.dtype | None = None

    @property
    def is_quantized(self) -> bool:
        """Whether the operand is a QuantizedTensor."""
        return self.quantizer is not None or self.codes is not None

    @cached_property
    def is_sent(self) -> bool:
        """Whether this is W of fprop in codes and scales that were sent, so that no maker makes it.

        `codes` is then the recipe's quantizer of it, and `quantizer` is None.
        """
        return self.gemm == "fprop" and self.source == "codes"

    @cached_property
    def group(self) -> int:
        """The group size of the Hadamard transform; 0 if there is none."""
        return 0 if self.hadamard is None else self.hadamard.group


@dataclass(slots=True)
class Given:
    """The tensors and keys that one operand needs in one call, beside its plan and the matrix.

    fold: float32 or wider [K], multiplies the matrix along the contracted axis: the row scales of
        the GEMM's other operand; None: nothing.
    largest: the maximum over the ranks that share a scale; see `quantize_matrix`.
    noise: the source of random bits of a stochastic quantizer.
    signs: the signs of a Hadamard transform, random or fixed; None: no signs.
    average: float32, of the matrix's shape: the average towards which rounding ema rounds.
    """

    fold: Tensor | None = None
    largest: Tensor | None = None
    noise: Noise | None = None
    signs: Signs | FixedSigns | None = None
    average: Tensor | None = None


NOTHING = Given()


class Maker(Protocol):
    """One way to make operands.

    Its codes and scales must be those of makers/pytorch.py bit for bit; docs/numerics.md states the
    one exception, for Hadamard transforms.
    """

    name: str

    def transforms_in_pytorch(self, operand: OperandPlan) -> bool:
        """Whether PyTorch applies this operand's Hadamard transform before a kernel quantizes."""
        ...

    def refuses(self, operand: OperandPlan) -> str | None:
        """Why it cannot make this operand, in a few words that users read; None if it can."""
        ...

    def writes_carriers(self, operand: OperandPlan) -> bool:
        """Whether it can write FP8 elements beside this operand's codes; see
        `OperandPlan.carrier`."""
        ...

    def computes_source(self, operand: OperandPlan) -> bool:
        """Whether its kernel can compute a SwiGLU, its gradient, or an RMSNorm while it quantizes.

        operand: whose source is "swiglu" or "normed". If this is False, another kernel computes the
        matrix first.
        """
        ...

    def joins(self, one: OperandPlan, other: OperandPlan) -> bool:
        """Whether it can make both operands, which share a matrix, in one pass over it."""
        ...

    def largest(self, matrix: Operand, operand: OperandPlan, given: Given) -> Tensor:
        """The largest magnitudes of this rank's part of an operand whose scales ranks share; Inf
        stands for NaN too. Their maximum over the ranks is `Given.largest`."""
        ...

    def make(
        self, matrix: Matrix, operands: Sequence[OperandPlan], given: Sequence[Given]
    ) -> list[Made]:
        """Makes operands from one matrix.

        matrix: [rows, columns] as the model holds it, codes and scales of fprop, or, if
            `computes_source` allows it, a matrix that is to be computed.
        operands: their plans; several only if `joins` allows it. given: one for each of them.
        Returns one Made for each: transformed and quantized, with the contracted axis last.
        """
        ...
