"""The maker that transposes E2M1 codes with one scale for the tensor: a Triton kernel."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megatron_fp4.arithmetic.quantized_tensor import QuantizedTensor
from megatron_fp4.makers.base import Given, OperandPlan
from megatron_fp4.operands import Made, Matrix, Operand


class TransposeKernel:
    """Makes a backward operand from fprop's E2M1 codes by transposing them; nothing is rounded.

    The codes [rows, K / 2] become [K, rows / 2]. The scale of the tensor stays.
    """

    name = "transpose kernel"

    def transforms_in_pytorch(self, operand: OperandPlan) -> bool:
        return False

    def refuses(self, operand: OperandPlan) -> str | None:
        if operand.codes is None or operand.codes.element != "e2m1" or operand.axis == 1:
            return "transposes E2M1 codes only"
        return None if all(operand.shape) else "there are no elements"

    def writes_carriers(self, operand: OperandPlan) -> bool:
        return True

    def computes_source(self, operand: OperandPlan) -> bool:
        return False

    def joins(self, one: OperandPlan, other: OperandPlan) -> bool:
        return False

    def largest(self, matrix: Operand, operand: OperandPlan, given: Given) -> Tensor:
        raise AssertionError("it makes no scales")

    def make(
        self, matrix: Matrix, operands: Sequence[OperandPlan], given: Sequence[Given]
    ) -> list[Made]:
        from megatron_fp4.kernels.transpose import transposed  # imports Triton

        assert isinstance(matrix, QuantizedTensor)
        return [transposed(matrix, operand.carrier) for operand in operands]
