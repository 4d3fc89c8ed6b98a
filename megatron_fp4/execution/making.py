"""Makes the operands of a pass of a linear, as its plan says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from megatron_fp4.arithmetic.formats import wide
from megatron_fp4.arithmetic.hadamard import inverse
from megatron_fp4.arithmetic.quantizer import QuantizedTensor
from megatron_fp4.execution.call import Call, Site
from megatron_fp4.makers.pytorch import largest_of
from megatron_fp4.operands import Made, Operand
from megatron_fp4.plan.data import Making, OperandPlan, Source

Matrices = Mapping[tuple[str, Source], Operand]
Folds = Mapping[OperandPlan, Tensor | None]


def make_operands(
    makings: Iterable[Making], matrices: Matrices, folds: Folds, site: Site, call: Call
) -> dict[OperandPlan, Made]:
    """The operands of `makings`. matrices: what they are made of, by `Making.matrix`. folds: the
    scales that are folded into some of them. Ranks that share scales agree on all of them by one
    collective."""
    widest = _agreed(makings, matrices, folds, site, call)
    made: dict[OperandPlan, Made] = {}
    for making in makings:
        operands = making.operands
        given = [
            site.given(operand, call, folds.get(operand), widest.get(operand))
            for operand in operands
        ]
        found = making.maker.make(matrices[making.matrix], operands, given)
        made.update(zip(operands, found, strict=True))
    return made


def _agreed(
    makings: Iterable[Making], matrices: Matrices, folds: Folds, site: Site, call: Call
) -> dict[OperandPlan, Tensor]:
    """The absolute maxima over all ranks of the operands whose scales ranks share."""
    if site.parallel is None:
        return {}
    shared, maxima = [], []
    for making in makings:
        for operand in making.operands:
            if operand.agrees:
                given = site.given(operand, call, folds.get(operand), None)
                shared.append(operand)
                maxima.append(largest_of(matrices[making.matrix], operand, given))
    if not shared:
        return {}
    return dict(zip(shared, site.parallel.maximum(maxima), strict=True))


def source_of(
    operand: OperandPlan, kept: Operand, fprop: OperandPlan, site: Site, call: Call
) -> tuple[Operand, Tensor | None]:
    """(what an operand of a backward GEMM is made of, the scales that are to be folded into dY), of
    what the forward pass kept of W or X. fprop: the plan of what it kept."""
    if operand.source == "model":
        assert isinstance(kept, Tensor)
        return kept.to(operand.dtype), None
    assert isinstance(kept, QuantizedTensor)
    if operand.source == "codes":
        return kept, None
    if operand.source == "elements":
        scales = kept.block_scales(wide(operand.dtype)).flatten()
        return kept.unscaled(), scales.expand(kept.shape[0])
    if operand.source == "values":
        values, outer = kept.factors(operand.dtype)
        return values, None if outer is None else outer.expand(len(values), 1).flatten()
    value = kept.dequantize(operand.dtype)
    if fprop.hadamard is None:
        return value, None
    signs = site.signs("fprop", fprop, call)
    vector = None if signs is None else signs.vector(fprop.group, value.device)
    return inverse(value, fprop.group, vector), None
