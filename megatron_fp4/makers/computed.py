"""Chooses what computes a matrix (a SwiGLU, the gradient of one, an RMSNorm) for makers that do not
compute it themselves: a Triton kernel, or PyTorch as the fallback."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_fp4.makers.base import OperandPlan
from megatron_fp4.operands import Compute, Computed, Normed, Swiglu, SwigluGradient
from megatron_fp4.setting import Setting
from megatron_fp4.target import Target, kernels_problem

_READS_E4M3 = (8, 9)  # the first compute capability with an instruction for it
WIDEST_NORM = 16384  # the most columns of a matrix whose rows a kernel normalizes


def choose(operand: OperandPlan, setting: Setting) -> Compute:
    """The fastest function that computes the matrix of an operand whose source is "swiglu" or
    "normed"."""
    dtype, columns, target = operand.dtype, operand.shape[1], setting.target
    if operand.source == "normed":
        return _by_kernel if has_norm_kernels(dtype, columns, target) else _by_pytorch
    columns //= 2 if operand.letter == "dy" else 1
    if not _has_kernels(dtype, columns, target):
        return _by_pytorch
    return _by_kernel if reads_y(operand, setting) else _from_a_copy


def reads_y(operand: OperandPlan, setting: Setting) -> bool:
    """Whether the GPU's kernels read Y as it is given: in E4M3 for dY where `Setting.kept_y` says
    so."""
    is_e4m3 = operand.letter == "dy" and setting.kept_y is not None
    return not is_e4m3 or setting.target.capability >= _READS_E4M3


def has_norm_kernels(dtype: torch.dtype, columns: int, target: Target) -> bool:
    """Whether Triton kernels compute an RMSNorm, and its gradients, of a matrix like this."""
    return columns <= WIDEST_NORM and _has_kernels(dtype, columns, target)


def _has_kernels(dtype: torch.dtype, columns: int, target: Target) -> bool:
    return kernels_problem(target) is None and dtype == torch.bfloat16 and columns % 2 == 0


def _by_kernel(matrix: Computed) -> Tensor:
    from megatron_fp4.kernels import rms_norm, swiglu  # imports Triton

    if isinstance(matrix, Normed):
        return rms_norm.normed(matrix.x, matrix.norm)
    if isinstance(matrix, Swiglu):
        return swiglu.swiglu(matrix.y)
    return swiglu.swiglu_gradient(matrix.gradient, matrix.y)


def _from_a_copy(matrix: Computed) -> Tensor:
    """By the kernel, from Y in BF16."""
    assert isinstance(matrix, SwigluGradient)
    return _by_kernel(SwigluGradient(matrix.gradient, matrix.y.to(matrix.gradient.dtype)))


def _by_pytorch(matrix: Computed) -> Tensor:
    return matrix.computed()
