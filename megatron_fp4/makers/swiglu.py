"""Chooses what computes a SwiGLU, or the gradient of one, for makers that do not compute it
themselves: a Triton kernel, or PyTorch as the fallback."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_fp4.operands import Compute, Swiglu, SwigluGradient
from megatron_fp4.plan.data import OperandPlan
from megatron_fp4.plan.setting import Setting
from megatron_fp4.target import kernels_problem

_READS_E4M3 = (8, 9)  # the first compute capability with an instruction for it


def choose(operand: OperandPlan, setting: Setting) -> Compute:
    """The fastest function that computes the matrix of an operand whose source is "swiglu"."""
    kernels = kernels_problem(setting.target) is None and operand.dtype == torch.bfloat16
    columns = operand.shape[1] // (2 if operand.letter == "dy" else 1)
    if not kernels or columns % 2:
        return _by_pytorch
    return _by_kernel if reads_y(operand, setting) else _from_a_copy


def reads_y(operand: OperandPlan, setting: Setting) -> bool:
    """Whether the GPU's kernels read Y as it is given: in E4M3 for dY where `Setting.kept_y` says
    so."""
    is_e4m3 = operand.letter == "dy" and setting.kept_y is not None
    return not is_e4m3 or setting.target.capability >= _READS_E4M3


def _by_kernel(matrix: Swiglu | SwigluGradient) -> Tensor:
    from megatron_fp4.kernels import swiglu  # imports Triton

    if isinstance(matrix, Swiglu):
        return swiglu.swiglu(matrix.y)
    return swiglu.swiglu_gradient(matrix.gradient, matrix.y)


def _from_a_copy(matrix: Swiglu | SwigluGradient) -> Tensor:
    """By the kernel, from Y in BF16."""
    assert isinstance(matrix, SwigluGradient)
    return _by_kernel(SwigluGradient(matrix.gradient, matrix.y.to(matrix.gradient.dtype)))


def _by_pytorch(matrix: Swiglu | SwigluGradient) -> Tensor:
    return matrix.computed()
