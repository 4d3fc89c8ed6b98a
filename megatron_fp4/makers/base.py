"""Maker: the interface of what makes the operands of a GEMM from a matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megatron_fp4.arithmetic.hadamard import FixedSigns
from megatron_fp4.arithmetic.philox import Noise, Signs
from megatron_fp4.operands import Made, Matrix, Operand
from megatron_fp4.plan.data import OperandPlan


@dataclass(slots=True)
class Given:
    """The tensors and keys that one operand needs in one call, beside its plan and the matrix.

    fold: float32 or wider [K], multiplies the matrix along the contracted axis: the row scales of
        the GEMM's other operand; None: nothing.
    widest: the maximum over the ranks that share a scale; see `quantize_matrix`.
    noise: the key of the random bits, for a stochastic quantizer.
    signs: the signs of a Hadamard transform, random or fixed; None: no signs.
    average: float32, of the matrix's shape: the average towards which rounding ema rounds.
    """

    fold: Tensor | None = None
    widest: Tensor | None = None
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
        """Whether it can write FP8 carriers beside this operand's codes; see `Carriers`."""
        ...

    def activates(self, operand: OperandPlan) -> bool:
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
        stands for NaN too. Their maximum over the ranks is `Given.widest`."""
        ...

    def make(
        self, matrix: Matrix, operands: Sequence[OperandPlan], given: Sequence[Given]
    ) -> list[Made]:
        """Makes operands from one matrix.

        matrix: [rows, columns] as the model holds it, codes and scales of fprop, or, if `activates`
            allows it, a matrix that is to be computed.
        operands: their plans; several only if `joins` allows it. given: one for each of them.
        Returns one Made for each: transformed and quantized, with the contracted axis last.
        """
        ...
