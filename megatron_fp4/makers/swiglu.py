"""Chooses what computes a SwiGLU, or the gradient of one, for makers that do not compute it
themselves: a Triton kernel, or PyTorch as the fallback."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_fp4.operands import Compute, Swiglu, SwigluGradient
from megatron_fp4.plan.data import OperandPlan
from megatron_fp4.target import Target, kernels_problem


def choose(operand: OperandPlan, target: Target) -> Compute:
    """The fastest function that computes the matrix of an operand whose source is "swiglu"."""
    kernels = kernels_problem(target) is None and operand.dtype == torch.bfloat16
    columns = operand.shape[1] // (2 if operand.letter == "dy" else 1)
    return _by_kernel if kernels and columns % 2 == 0 else _by_pytorch


def _by_kernel(matrix: Swiglu | SwigluGradient) -> Tensor:
    from megatron_fp4.kernels import swiglu  # imports Triton

    if isinstance(matrix, Swiglu):
        return swiglu.swiglu(matrix.y)
    return swiglu.swiglu_gradient(matrix.gradient, matrix.y)


def _by_pytorch(matrix: Swiglu | SwigluGradient) -> Tensor:
    return matrix.computed()
