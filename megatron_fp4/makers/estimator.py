"""Chooses what applies a gradient estimator to dW or dX: a Triton kernel, or PyTorch as the
fallback."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_fp4.arithmetic.estimators import (
    ONE_RANK,
    Estimator,
    Ranks,
    Scales,
    with_outer_scale,
)
from megatron_fp4.arithmetic.formats import SCALE_FLOATS, Fp4, scale_grid, widen
from megatron_fp4.arithmetic.hadamard import inverse, transform
from megatron_fp4.arithmetic.quantized_tensor import QuantizedTensor
from megatron_fp4.arithmetic.quantizer import Quantizer
from megatron_fp4.arithmetic.scaling import per_block
from megatron_fp4.makers import PYTORCH
from megatron_fp4.makers.base import NOTHING, Given, OperandPlan
from megatron_fp4.makers.pytorch import before_quantizer
from megatron_fp4.setting import Setting
from megatron_fp4.target import kernels_problem

KERNEL = "dge kernel"


class Estimating(NamedTuple):
    """How an estimator is applied to the gradient of W or X.

    name: of what applies it. apply: (gradient, quantized, matrix, into) -> gradient; see
    `estimated`. takes_ranks: whether it also takes `ranks`, because it sums over blocks that are
    spread over ranks. takes_outer_ranks: whether it also takes `outer_ranks`, because it sums over
    what shares an outer scale, on several ranks. transforms: whether it also takes `given`, because
    fprop transforms the operand.
    passed_over: (name, reason) of the kernel, if it does not apply it.
    """

    name: str
    apply: Callable[..., Tensor]
    takes_ranks: bool = False
    takes_outer_ranks: bool = False
    transforms: bool = False
    passed_over: tuple[tuple[str, str], ...] = ()


def choose(
    estimator: Estimator | None, operand: OperandPlan, setting: Setting
) -> Estimating | None:
    """What applies the estimator to the gradient of W or X; None where there is no estimator.

    operand: fprop's operand of it, which is quantized.
    """
    if estimator is None:
        return None
    why = _kernel_refuses(estimator, operand, setting)
    if why is None:
        from megatron_fp4.kernels import estimator as kernels  # imports Triton

        return Estimating(KERNEL, partial(kernels.scale, estimator))
    through = estimator.maximum != "straight-through"
    takes_ranks = through and operand.agrees and _is_spread(operand, setting)
    takes_outer_ranks = estimator.outer_scale != "straight-through" and operand.agrees
    apply = partial(estimated, estimator, operand)
    return Estimating(
        PYTORCH.name, apply, takes_ranks, takes_outer_ranks, operand.group > 0, ((KERNEL, why),)
    )


def _kernel_refuses(estimator: Estimator, operand: OperandPlan, setting: Setting) -> str | None:
    """Why the kernel does not apply the estimator, in a few words; None if it does."""
    quantizer = operand.quantizer
    assert quantizer is not None
    if estimator.form != "dge":
        return f"has no {estimator.form}"
    if estimator.beyond != "continued" or estimator.maximum != "straight-through":
        return "multiplies by the factor of dge alone"
    if operand.letter != "w":
        return "is for W alone"
    if quantizer.element != "e2m1":
        return "has the grid of E2M1 alone"
    if not _has_scales_of(quantizer):
        return "takes a float32 scale for each row, or E8M0 scales for blocks of a row"
    if setting.dtype != torch.bfloat16 or operand.group:
        return "takes BF16, and transforms nothing"
    if not setting.outputs * setting.inputs:
        return "takes no empty matrix"
    return kernels_problem(setting.target)


def _has_scales_of(quantizer: Quantizer) -> bool:
    """Whether the kernel reads scales as this quantizer makes them."""
    if quantizer.prescale != 1.0 or quantizer.row_max or quantizer.block[0] != 1:
        return False
    return quantizer.scale == ("e8m0" if quantizer.block[1] else "fp32")


def _is_spread(operand: OperandPlan, setting: Setting) -> bool:
    """Whether ranks share blocks of the operand, and not an outer scale alone."""
    assert operand.quantizer is not None
    sharded = 0 if operand.is_part else setting.sharding.axis(operand.letter)
    without = replace(operand.quantizer, tensor_max=0.0, row_max=0.0)
    return without.scale_spans(sharded, operand.axis)


def estimated(
    estimator: Estimator,
    operand: OperandPlan,
    gradient: Tensor,
    quantized: QuantizedTensor,
    matrix: Tensor,
    into: Tensor | None = None,
    ranks: Ranks = ONE_RANK,
    outer_ranks: Ranks = ONE_RANK,
    given: Given = NOTHING,
) -> Tensor:
    """The gradient of `matrix`, [rows, columns] in the dtype of `gradient`; or `into`, to which it
    is added.

    operand: the plan of fprop's operand. gradient: of what was multiplied in place of the matrix.
    quantized: fprop's operand, made of `matrix` and `given`, blocked along its last axis. into: a
    matrix of the gradient's dtype, or None. ranks: see `Estimator.gradient`. outer_ranks: see
    `with_outer_scale`. Computed in float32 (float64 for a matrix in float64), and rounded once.
    """
    wanted, rounded, scales, quantizer = widen(gradient), None, None, quantized.quantizer
    form = quantizer.format
    assert isinstance(form, Fp4)
    x = before_quantizer(matrix, operand, given)
    scaled = scaled_values(quantized, x).to(wanted.dtype)
    if estimator.maximum != "straight-through":
        rounded = quantized.elements(scaled.dtype).view(scaled.shape)
    if estimator.scale_form != "straight-through":
        share = quantizer.inflate / (form.max * quantizer.prescale)
        grid = scale_grid(quantizer.scale)
        scales = Scales(quantized.block_scales(scaled.dtype), grid, share)
    group = operand.group
    signs = None if given.signs is None else given.signs.vector(group, matrix.device)
    if group:  # the product is of transformed operands, and so is its gradient
        wanted = transform(wanted, group, signs)
    found = estimator.gradient(wanted, scaled, rounded, quantizer.block, ranks, form, scales)
    if estimator.outer_scale != "straight-through":
        # The GEMM's correction undoes the prescale, and the gradient is that of what is left.
        decoded = quantized.dequantize(wanted.dtype).view(scaled.shape) / quantizer.prescale
        x, of_rows = x.to(wanted.dtype).view(scaled.shape), quantizer.row_max > 0
        found = with_outer_scale(found, wanted, x, decoded, of_rows=of_rows, ranks=outer_ranks)
    if group:
        found = inverse(found, group, signs)
    found = found.to(gradient.dtype)
    return found if into is None else into.add_(found)


def scaled_values(quantized: QuantizedTensor, matrix: Tensor) -> Tensor:
    """What was rounded to the elements of `quantized`, float32 or float64 [rows, columns].

    As `QuantizedTensor.grid_coordinates`, but 0 in blocks whose scale was rounded to zero, whose
    elements are zeros.
    """
    scaled = quantized.grid_coordinates(matrix)
    if quantized.quantizer.scale not in SCALE_FLOATS:
        return scaled
    block, codes = quantized.quantizer.block, quantized.scales
    return per_block(scaled, block, codes, lambda v, code: torch.where(code == 0, 0, v))
