"""Makes the operands of a forward or backward pass from the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from megatron_fp4.arithmetic.formats import wide
from megatron_fp4.arithmetic.quantized_tensor import QuantizedTensor
from megatron_fp4.decoding import decoded, dequantized, inverse_of
from megatron_fp4.execution.call import Call, Site
from megatron_fp4.makers.base import MatrixName, OperandPlan
from megatron_fp4.operands import Computed, Made, Matrix, Operand, Swiglu
from megatron_fp4.plan.data import Making

Matrices = Mapping[MatrixName, Matrix]
Folds = Mapping[OperandPlan, Tensor]


def matrix_of(making: Making, matrices: Matrices) -> Operand:
    """The matrix of `making` as a tensor or codes; a `Computed` is computed first."""
    matrix = matrices[making.matrix]
    if not isinstance(matrix, Computed):
        return matrix
    assert making.compute is not None
    return matrix.by(making.compute)


def make_operands(
    makings: Sequence[Making],
    matrices: Matrices,
    folds: Folds,
    site: Site,
    call: Call,
) -> dict[OperandPlan, Made]:
    """The operands of `makings`, by their plans.

    matrices: what they are made from, by `Making.matrix`. folds: for operands that are multiplied
    by row scales first (`OperandPlan.folds`), those scales. Where ranks share scales, the maxima of
    all operands are all-reduced by one collective.
    """
    whole = matrices  # for makers that do not compute a matrix as they read it
    for making in makings:
        if making.compute is not None and not making.computes_source:
            whole = {**whole, making.matrix: matrix_of(making, whole)}
    largest = {} if site.parallel is None else _agreed(makings, whole, folds, site, call)
    made: dict[OperandPlan, Made] = {}
    for making in makings:
        operands = making.operands
        given = [
            site.given(
                operand,
                call,
                folds.get(operand) if folds else None,
                largest.get(operand) if largest else None,
            )
            for operand in operands
        ]
        matrix = (matrices if making.computes_source else whole)[making.matrix]
        found = making.maker.make(matrix, operands, given)
        for operand, each in zip(operands, found, strict=True):
            made[operand] = each
        if site.watch is not None:
            for operand, its_given in zip(operands, given, strict=True):
                site.watch.made(site, call, operand, matrix, its_given, made[operand])
    return made


def _agreed(
    makings: Sequence[Making], whole: Matrices, folds: Folds, site: Site, call: Call
) -> dict[OperandPlan, Tensor]:
    """The largest magnitudes over all ranks, for each operand whose scales ranks share. The linear
    is sharded. whole: the matrices; makers that compute one as they read it share no scales."""
    assert site.parallel is not None
    shared, maxima = [], []
    for making in makings:
        for operand in making.operands:
            if operand.agrees:
                given = site.given(operand, call, folds.get(operand), None)
                matrix = whole[making.matrix]
                assert not isinstance(matrix, Computed)
                shared.append(operand)
                maxima.append(making.maker.largest(matrix, operand, given))
    if not shared:
        return {}
    return dict(zip(shared, site.parallel.maximum(maxima), strict=True))


def source_of(
    operand: OperandPlan, kept: Operand, fprop: OperandPlan, site: Site, call: Call
) -> tuple[Matrix, Tensor | None]:
    """(matrix, scales): the matrix from which a backward GEMM's operand of W or X is made, and the
    row scales by which dY must be multiplied, float32 or wider [K], or None.

    operand: the plan of the backward operand. kept: what the forward pass saved of W or X. fprop:
    the plan of fprop's operand of it.
    """
    if operand.source in ("model", "centered"):
        assert isinstance(kept, Tensor)
        return kept.to(operand.dtype), None
    if operand.source == "swiglu":
        assert isinstance(kept, Tensor)
        return Swiglu(kept), None
    if operand.source == "codes":
        return kept, None
    assert isinstance(kept, QuantizedTensor)
    if operand.source == "elements":
        scales = kept.block_scales(wide(operand.dtype)).flatten()
        return kept.unscaled(), scales.expand(kept.shape[0])
    if operand.source == "values":
        values, factors, _ = decoded(kept, operand.dtype)
        return values, None if factors is None else factors.expand(len(values), 1).flatten()
    if fprop.hadamard is None:
        return dequantized(kept, operand.dtype), None
    signs = site.signs("fprop", fprop, call)
    vector = None if signs is None else signs.vector(fprop.group, kept.device)
    return inverse_of(kept, operand.dtype, fprop.group, vector), None
