"""Maker: who makes the operands of a GEMM out of a matrix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from megatron_fp4.arithmetic.philox import Noise, Signs
from megatron_fp4.operands import Made, Operand
from megatron_fp4.plan.data import OperandPlan


class Given(NamedTuple):
    """What a maker is given for one operand in one call, beside its plan and the matrix.

    fold: float32 [K], multiplies along the contracted axis: the row scales of the other operand.
    widest: what the ranks that share a scale agreed on; see `quantize_matrix`.
    noise: of a stochastic quantizer. signs: of a Hadamard transform with random signs.
    average: float32, of the matrix's shape: what rounding ema rounds towards.
    """

    fold: Tensor | None = None
    widest: Tensor | None = None
    noise: Noise | None = None
    signs: Signs | None = None
    average: Tensor | None = None


class Maker(Protocol):
    """One way to make operands. Codes and scales are those of `quantize_matrix` bit for bit."""

    name: str

    def refuses(self, operand: OperandPlan) -> str | None:
        """Why it cannot make this operand, in a few words; None where it can."""
        ...

    def writes_carriers(self, operand: OperandPlan) -> bool:
        """Whether it can write FP8 carriers beside the codes; see `Carriers`."""
        ...

    def joins(self, one: OperandPlan, other: OperandPlan) -> bool:
        """Whether it makes both of one matrix in one pass."""
        ...

    def make(
        self, matrix: Operand, operands: Sequence[OperandPlan], given: Sequence[Given]
    ) -> list[Made]:
        """The operands, of a matrix [rows, columns] as the model holds it or of one that is
        quantized: transformed, quantized, with the contracted axis last."""
        ...
