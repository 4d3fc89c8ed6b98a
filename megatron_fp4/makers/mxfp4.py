"""The maker for MXFP4, and for E8M0 scales of blocks of 16: a Triton kernel.

In one read of a matrix it makes the operands with blocks along its rows and along its columns, and
can write FP8 carriers beside the codes. It also applies Hadamard transforms, and quantizes operands
from the codes of the forward pass (double quantization).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from megatron_fp4.arithmetic.philox import GROUP
from megatron_fp4.arithmetic.quantizer import Quantizer
from megatron_fp4.makers.base import Given, OperandPlan
from megatron_fp4.makers.computed import WIDEST_NORM
from megatron_fp4.operands import Made, Matrix, Operand


class Mxfp4Kernel:
    """E2M1 codes with an E8M0 scale for each block of 16 or 32, from a BF16 matrix or from such
    codes with blocks along the rows."""

    name = "mxfp4 kernel"

    def transforms_in_pytorch(self, operand: OperandPlan) -> bool:
        return False

    def refuses(self, operand: OperandPlan) -> str | None:
        quantizer, codes = operand.quantizer, operand.codes
        if quantizer is not None and quantizer.row_max:
            return "gives rows no scales of their own"
        if quantizer is None or not _has_format(quantizer):
            return f"makes {_FORMAT} only"
        if codes is not None and not _has_format(codes):
            return f"reads {_FORMAT} only"
        if codes is not None and (operand.group or quantizer.rounding == "ema"):
            return "neither transforms codes nor rounds them to an average"
        if codes is None and operand.dtype != torch.bfloat16:
            return "reads BF16 only"
        if operand.folds or operand.agrees:
            return "folds no scales and shares none"
        if quantizer.rounding == "ema" and operand.group:
            return "rounds nothing to an average after a transform"
        # 3/4 of a BF16 number is exact, and at most 6 after division by a floor or ceil scale. With
        # another prescale the kernel would round twice, and would not clip what exceeds 6.
        below = quantizer.rule in ("floor", "ceil")
        if quantizer.prescale not in ((1.0, 0.75) if quantizer.stochastic and below else (1.0,)):
            return f"does not prescale by {quantizer.prescale:g}"
        groups = _kernels().HADAMARD_GROUPS
        if operand.group and operand.group not in groups:
            return f"transforms in groups of {', '.join(map(str, groups))} only"
        return _size_problem(operand, max(quantizer.block[1], operand.group))

    def writes_carriers(self, operand: OperandPlan) -> bool:
        return not operand.group

    def computes_source(self, operand: OperandPlan) -> bool:
        if operand.group:
            return False
        if operand.source == "normed":
            return operand.shape[1] <= WIDEST_NORM
        columns = operand.shape[1] // (2 if operand.letter == "dy" else 1)
        return columns % _kernels().SWIGLU_COLUMNS == 0

    def joins(self, one: OperandPlan, other: OperandPlan) -> bool:
        forms = [(p.letter, p.quantizer, p.group, p.is_part) for p in (one, other)]
        return one.axis != other.axis and forms[0] == forms[1]

    def largest(self, matrix: Operand, operand: OperandPlan, given: Given) -> Tensor:
        raise AssertionError("ranks share none of its scales")

    def make(
        self, matrix: Matrix, operands: Sequence[OperandPlan], given: Sequence[Given]
    ) -> list[Made]:
        kernels, first = _kernels(), operands[0]
        copies = [
            kernels.Copy(operand.axis, each.noise, each.signs, operand.carrier)
            for operand, each in zip(operands, given, strict=True)
        ]
        made: list[Made] = kernels.quantize(
            matrix, first.quantizer, copies, first.group, given[0].average
        )
        return made


_FORMAT = "E2M1 with E8M0 scales in blocks of 1 x 16 and 1 x 32"


def _has_format(quantizer: Quantizer) -> bool:
    height, length = quantizer.block
    e8m0 = (quantizer.element, quantizer.scale, quantizer.row_max) == ("e2m1", "e8m0", 0.0)
    return e8m0 and height == 1 and length in _kernels().BLOCKS


def _size_problem(operand: OperandPlan, multiple: int) -> str | None:
    if not all(operand.shape):
        return "there are no elements"
    if operand.shape[operand.axis] % multiple or operand.shape[1] % GROUP:
        return f"takes multiples of {multiple} along the contracted axis and of {GROUP} columns"
    return None


@cache
def _kernels() -> ModuleType:
    """kernels.quantize. It is cached, since an import statement costs more host time than most
    calls here."""
    from megatron_fp4.kernels import quantize  # imports Triton

    return quantize
