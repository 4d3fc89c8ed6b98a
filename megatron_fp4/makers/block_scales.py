"""The maker for block scales in E4M3 and UE5M3, such as NVFP4's: a Triton kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_fp4.arithmetic.philox import GROUP, Signs
from megatron_fp4.arithmetic.quantizer import QuantizedTensor
from megatron_fp4.makers.base import Given
from megatron_fp4.makers.pytorch import before_quantizer
from megatron_fp4.operands import Made, Matrix, Operand
from megatron_fp4.plan.data import OperandPlan


class BlockScaleKernel:
    """Quantizes a BF16 matrix to E2M1, with E4M3 or UE5M3 scales. PyTorch applies a Hadamard
    transform first.

    It refuses operands times row scales.
    """

    name = "block scale kernel"
    transforms = False

    def refuses(self, operand: OperandPlan) -> str | None:
        quantizer = operand.quantizer
        assert quantizer is not None
        from megatron_fp4.kernels.blocks import LONGEST_GAIN, RULES, TILE  # imports Triton
        from megatron_fp4.kernels.signs import MOST

        across, along = quantizer.block
        if quantizer.element != "e2m1":
            return f"makes no {quantizer.element.upper()} elements"
        if quantizer.rule not in RULES:
            return f"has no rule {quantizer.rule}"
        if quantizer.unit_gain and LONGEST_GAIN % quantizer.unit_gain:
            return f"corrects a gain only in groups that divide {LONGEST_GAIN}"
        if quantizer.row_max:
            return "gives rows no scales of their own"
        if operand.folds:
            return "folds no scales"
        if operand.group > MOST:
            return f"draws at most {MOST} signs"
        # A transform's result is BF16, whatever it reads.
        if operand.codes is not None or (operand.dtype != torch.bfloat16 and not operand.group):
            return "reads BF16 only"
        if not (2 <= along <= TILE) or TILE % along or not across or TILE % across:
            return f"takes blocks that divide {TILE} x {TILE}"
        if not all(operand.shape):
            return "there are no elements"
        k, others = operand.shape[operand.axis], operand.shape[1 - operand.axis]
        if k % max(along, quantizer.unit_gain) or others % across:
            return f"takes multiples of blocks of {across} x {max(along, quantizer.unit_gain)}"
        if quantizer.draws and operand.shape[1] % GROUP:
            return f"draws noise for multiples of {GROUP} columns"
        return None

    def writes_carriers(self, operand: OperandPlan) -> bool:
        return False

    def activates(self, operand: OperandPlan) -> bool:
        return False

    def joins(self, one: OperandPlan, other: OperandPlan) -> bool:
        return False

    def largest(self, matrix: Operand, operand: OperandPlan, given: Given) -> Tensor:
        from megatron_fp4.kernels import blocks  # imports Triton

        assert operand.quantizer is not None
        x = _before_quantizer(matrix, operand, given)
        return blocks.largest(x, operand.quantizer, operand.axis)

    def make(
        self, matrix: Matrix, operands: Sequence[OperandPlan], given: Sequence[Given]
    ) -> list[Made]:
        from megatron_fp4.kernels import blocks  # imports Triton

        [operand], [each] = operands, given
        assert isinstance(matrix, Tensor) and operand.quantizer is not None
        x = _before_quantizer(matrix, operand, each)
        made = blocks.quantize(x, operand.quantizer, operand.axis, each.noise, each.widest)
        return [Made(made)]


def _before_quantizer(matrix: Operand, operand: OperandPlan, given: Given) -> Tensor:
    """As `pytorch.before_quantizer`, with the random signs of a transform drawn by a kernel."""
    if not operand.group or not isinstance(given.signs, Signs):
        return before_quantizer(matrix, operand, given)
    from megatron_fp4.kernels import signs  # imports Triton

    like = matrix.codes if isinstance(matrix, QuantizedTensor) else matrix
    return before_quantizer(matrix, operand, given, signs.vector(given.signs, operand.group, like))
