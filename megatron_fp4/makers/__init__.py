"""Makers, which make operands: a Triton kernel, or plain PyTorch as the fallback.

`choose` finds the maker of an operand, and the reason if the kernel for it cannot be used.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from megatron_fp4.makers.base import Maker, OperandPlan
from megatron_fp4.makers.block_scales import BlockScaleKernel
from megatron_fp4.makers.mxfp4 import Mxfp4Kernel
from megatron_fp4.makers.pytorch import PyTorch
from megatron_fp4.makers.row_scales import RowScaleKernel
from megatron_fp4.makers.transpose import TransposeKernel
from megatron_fp4.target import Target, kernels_problem

PYTORCH, TRANSPOSE = PyTorch(), TransposeKernel()
_BLOCK_SCALES = BlockScaleKernel()
# The kernel for each format of block scales, of BF16 matrices.
KERNELS: dict[str, Maker] = {
    "e8m0": Mxfp4Kernel(),
    "fp32": RowScaleKernel(),
    "e4m3": _BLOCK_SCALES,
    "ue5m3": _BLOCK_SCALES,
}


class MakerChoice(NamedTuple):
    """maker: what makes the operand. passed_over: (name, reason) of the kernel that would be
    faster, if it cannot be used."""

    maker: Maker
    passed_over: tuple[tuple[str, str], ...] = ()


def choose(operand: OperandPlan, target: Target) -> MakerChoice:
    """The fastest maker of an operand on `target`, and why a faster one is not used.

    Plain PyTorch makes what no kernel can make.
    """
    if operand.quantizer is None:  # nothing to quantize: a view, or a transpose of codes
        on_gpu = kernels_problem(target) is None and operand.codes is not None
        transposes = on_gpu and TRANSPOSE.refuses(operand) is None
        return MakerChoice(TRANSPOSE if transposes else PYTORCH)
    if (problem := kernels_problem(target)) is not None:
        return MakerChoice(PYTORCH, (("kernels", problem),))
    kernel = _kernel_of(operand)
    if (problem := kernel.refuses(operand)) is not None:
        return MakerChoice(PYTORCH, ((kernel.name, problem),))
    return MakerChoice(kernel)


def _kernel_of(operand: OperandPlan) -> Maker:
    """The kernel for an operand that is quantized.

    The MXFP4 kernel does not read a float32 matrix, such as backward has where fprop's transform is
    undone: it holds two BF16 numbers in a word.
    """
    assert operand.quantizer is not None
    is_float32 = operand.codes is None and operand.dtype == torch.float32
    if operand.quantizer.scale == "e8m0" and is_float32:
        return _BLOCK_SCALES
    return KERNELS[operand.quantizer.scale]
