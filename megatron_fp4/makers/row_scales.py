"""The maker for float32 scales of a whole row or tensor, in E2M1 and FP8: a Triton kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_fp4.makers.base import Given, OperandPlan
from megatron_fp4.operands import Made, Matrix, Operand


class RowScaleKernel:
    """Quantizes a BF16 matrix to E2M1 or FP8, rounded to nearest.

    A float32 scale belongs to each row, or to the tensor.
    """

    name = "row scale kernel"

    def transforms_in_pytorch(self, operand: OperandPlan) -> bool:
        return False

    def refuses(self, operand: OperandPlan) -> str | None:
        quantizer = operand.quantizer
        assert quantizer is not None
        if quantizer.element not in ("e2m1", "e4m3", "e5m2"):
            return f"makes no {quantizer.element.upper()} elements"
        if not quantizer.spans_axis:
            return "gives blocks within a row no scales"
        if quantizer.stochastic or quantizer.prescale != 1.0:
            return "rounds to nearest, without a prescale"
        if operand.group or operand.codes is not None or operand.dtype != torch.bfloat16:
            return "reads BF16 only, and transforms nothing"
        if not all(operand.shape):
            return "there are no elements"
        if quantizer.element == "e2m1" and operand.shape[operand.axis] % 2:
            return "packs an even number of codes"
        return None

    def writes_carriers(self, operand: OperandPlan) -> bool:
        quantizer = operand.quantizer
        return quantizer is not None and quantizer.element == "e2m1"

    def computes_source(self, operand: OperandPlan) -> bool:
        return False

    def joins(self, one: OperandPlan, other: OperandPlan) -> bool:
        # Where ranks share a scale, the kernel that finds the maxima is not launched.
        forms = [(p.letter, p.quantizer, p.is_part, p.agrees) for p in (one, other)]
        return one.axis != other.axis and forms[0] == forms[1] and not one.agrees

    def largest(self, matrix: Operand, operand: OperandPlan, given: Given) -> Tensor:
        from megatron_fp4.kernels import row_operands  # imports Triton

        assert isinstance(matrix, Tensor) and operand.quantizer is not None
        copy = row_operands.RowOperand(operand.axis, given.fold)
        return row_operands.find_largest(matrix, operand.quantizer, copy)

    def make(
        self, matrix: Matrix, operands: Sequence[OperandPlan], given: Sequence[Given]
    ) -> list[Made]:
        from megatron_fp4.kernels import row_operands  # imports Triton

        quantizer = operands[0].quantizer
        assert isinstance(matrix, Tensor) and quantizer is not None
        copies = [
            row_operands.RowOperand(operand.axis, each.fold, each.largest, operand.carrier)
            for operand, each in zip(operands, given, strict=True)
        ]
        return row_operands.quantize(matrix, quantizer, copies)
