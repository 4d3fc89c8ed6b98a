"""The maker in plain PyTorch: every quantizer, on every device.

It is the fallback where no kernel runs, and the reference with which the kernels are compared.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_fp4.arithmetic.formats import widen
from megatron_fp4.arithmetic.hadamard import transform
from megatron_fp4.arithmetic.quantize import largest_magnitudes, quantize_matrix
from megatron_fp4.arithmetic.quantized_tensor import QuantizedTensor
from megatron_fp4.makers.base import Given, OperandPlan
from megatron_fp4.operands import Made, Matrix, Operand


class PyTorch:
    """Makes any operand, one at a time."""

    name = "pytorch"

    def transforms_in_pytorch(self, operand: OperandPlan) -> bool:
        return False

    def refuses(self, operand: OperandPlan) -> str | None:
        return None

    def writes_carriers(self, operand: OperandPlan) -> bool:
        return False

    def computes_source(self, operand: OperandPlan) -> bool:
        return False

    def joins(self, one: OperandPlan, other: OperandPlan) -> bool:
        return False

    def largest(self, matrix: Operand, operand: OperandPlan, given: Given) -> Tensor:
        assert operand.quantizer is not None  # high precision has no scale to share
        x = before_quantizer(matrix, operand, given)
        return largest_magnitudes(x, operand.quantizer, operand.axis)

    def make(
        self, matrix: Matrix, operands: Sequence[OperandPlan], given: Sequence[Given]
    ) -> list[Made]:
        assert isinstance(matrix, Tensor | QuantizedTensor)
        return [Made(make_operand(matrix, *each)) for each in zip(operands, given, strict=True)]


def make_operand(matrix: Operand, operand: OperandPlan, given: Given) -> Operand:
    """The operand that plain PyTorch makes of `matrix`, with the contracted axis last.

    matrix: [rows, columns] as the model holds it, or codes and scales of fprop. The matrix is
    multiplied by row scales, transformed and quantized, as far as the plan `operand` says so.
    """
    quantizer, axis = operand.quantizer, operand.axis
    if quantizer is None and isinstance(matrix, QuantizedTensor):
        return matrix.along(axis)
    # An average would need the same row scales and transform as its matrix; recipes have none such.
    assert given.average is None or not (operand.folds or operand.group)
    x = before_quantizer(matrix, operand, given)
    if quantizer is None:
        return x.movedim(axis, -1)
    return quantize_matrix(
        x,
        quantizer,
        axis=axis,
        bits=None if given.noise is None else given.noise.bits16(x),
        average=given.average,
        largest=given.largest,
    )


def before_quantizer(
    matrix: Operand, operand: OperandPlan, given: Given, signs: Tensor | None = None
) -> Tensor:
    """What the quantizer reads: the matrix times row scales, transformed, if the plan says so.

    Returns [rows, columns] as the model holds them. Codes of fprop are decoded first.
    signs: those of the transform; None takes `given.signs`.
    """
    axis = operand.axis
    x = matrix.dequantize(torch.bfloat16) if isinstance(matrix, QuantizedTensor) else matrix
    if given.fold is not None:
        x = widen(x) * (given.fold if axis == 1 else given.fold[:, None])
    if operand.group:
        if signs is None and given.signs is not None:
            signs = given.signs.vector(operand.group, x.device)
        x = transform(x.movedim(axis, -1), operand.group, signs)
        if operand.quantizer is not None:
            # docs/numerics.md rounds here, so that tensor cores can give the same codes.
            x = x.bfloat16()
        x = x.movedim(-1, axis)
    return x
