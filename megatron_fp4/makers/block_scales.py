"""The maker for block scales in E4M3 and UE5M3, such as NVFP4's, and in E8M0 for float32 matrices:
a Triton kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_fp4.arithmetic.philox import GROUP, Signs
from megatron_fp4.arithmetic.quantizer import Quantizer
from megatron_fp4.makers.base import Given, OperandPlan
from megatron_fp4.makers.pytorch import before_quantizer
from megatron_fp4.operands import Made, Matrix, Operand

if TYPE_CHECKING:
    from megatron_fp4.kernels.tile_hadamard import Transform


class BlockScaleKernel:
    """Quantizes a matrix to E2M1, after a Hadamard transform if there is one: with E4M3 or UE5M3
    scales a BF16 matrix, with E8M0 scales a float32 one.

    It refuses operands times row scales.
    """

    name = "block scale kernel"

    def transforms_in_pytorch(self, operand: OperandPlan) -> bool:
        if not operand.group:
            return False
        from megatron_fp4.kernels.tile_hadamard import GROUPS  # imports Triton

        return operand.group not in GROUPS or operand.dtype not in (torch.bfloat16, torch.float32)

    def refuses(self, operand: OperandPlan) -> str | None:
        quantizer = operand.quantizer
        assert quantizer is not None
        return _format_problem(quantizer) or _source_problem(operand) or _size_problem(operand)

    def writes_carriers(self, operand: OperandPlan) -> bool:
        return False

    def computes_source(self, operand: OperandPlan) -> bool:
        return False

    def joins(self, one: OperandPlan, other: OperandPlan) -> bool:
        return False

    def largest(self, matrix: Operand, operand: OperandPlan, given: Given) -> Tensor:
        from megatron_fp4.kernels import blocks  # imports Triton

        assert isinstance(matrix, Tensor) and operand.quantizer is not None
        x, transform = self._source(matrix, operand, given)
        return blocks.find_largest(x, operand.quantizer, operand.axis, transform)

    def make(
        self, matrix: Matrix, operands: Sequence[OperandPlan], given: Sequence[Given]
    ) -> list[Made]:
        from megatron_fp4.kernels import blocks  # imports Triton

        [operand], [each] = operands, given
        assert isinstance(matrix, Tensor) and operand.quantizer is not None
        x, transform = self._source(matrix, operand, each)
        made = blocks.quantize(
            x, operand.quantizer, operand.axis, each.noise, each.largest, transform
        )
        return [Made(made)]

    def _source(
        self, matrix: Tensor, operand: OperandPlan, given: Given
    ) -> tuple[Tensor, Transform | None]:
        """What the kernel reads, and the transform that it applies; None: PyTorch has applied it,
        or there is none. Random signs are drawn by a kernel (kernels/signs.py)."""
        if not operand.group:
            return matrix, None
        from megatron_fp4.kernels import signs, tile_hadamard  # imports Triton

        vector = None
        if isinstance(given.signs, Signs):
            vector = signs.vector(given.signs, operand.group, matrix)
        elif given.signs is not None:
            vector = given.signs.vector(operand.group, matrix.device)
        if self.transforms_in_pytorch(operand):
            return before_quantizer(matrix, operand, given, vector), None
        return matrix, tile_hadamard.Transform(operand.group, vector)


def _format_problem(quantizer: Quantizer) -> str | None:
    from megatron_fp4.kernels.blocks import RULES, TILE, WIDE  # imports Triton

    across, along = quantizer.block
    if quantizer.element != "e2m1":
        return f"makes no {quantizer.element.upper()} elements"
    if quantizer.rule not in RULES[quantizer.scale]:
        return f"has no rule {quantizer.rule} for {quantizer.scale} scales"
    if quantizer.rounding == "ema":
        return "rounds nothing to an average"
    if quantizer.unit_gain and WIDE % quantizer.unit_gain:
        return f"corrects a gain only in groups that divide {WIDE}"
    if quantizer.row_max:
        return "gives rows no scales of their own"
    if not (2 <= along <= TILE) or TILE % along or not across or TILE % across:
        return f"takes blocks that divide {TILE} x {TILE}"
    return None


def _source_problem(operand: OperandPlan) -> str | None:
    from megatron_fp4.kernels.signs import MOST_SIGNS  # imports Triton

    if operand.folds:
        return "folds no scales"
    hadamard = operand.hadamard
    if hadamard is not None and hadamard.signs == "random" and hadamard.group > MOST_SIGNS:
        return f"draws at most {MOST_SIGNS} signs"
    # A transform may read another dtype: its result is BF16. Elements are divided by E8M0 scales
    # without a rounding, whatever their dtype.
    assert operand.quantizer is not None
    is_power = operand.quantizer.scale == "e8m0" and operand.dtype == torch.float32
    reads = hadamard is not None or operand.dtype == torch.bfloat16 or is_power
    return None if reads and operand.codes is None else "reads BF16 only"


def _size_problem(operand: OperandPlan) -> str | None:
    quantizer = operand.quantizer
    assert quantizer is not None
    across, along = quantizer.block
    k, others = operand.shape[operand.axis], operand.shape[1 - operand.axis]
    if not all(operand.shape):
        return "there are no elements"
    if k % along or others % across:
        return f"takes multiples of blocks of {across} x {along}"
    if quantizer.unit_gain and k % quantizer.unit_gain:
        return f"takes multiples of {quantizer.unit_gain} elements, which have a gain of 1 together"
    if quantizer.draws and operand.shape[1] % GROUP:
        return f"draws random bits for multiples of {GROUP} columns"
    return None
