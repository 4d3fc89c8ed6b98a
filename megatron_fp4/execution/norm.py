"""An RMSNorm before a linear that computes it, as an autograd function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_fp4.arithmetic import rms_norm
from megatron_fp4.arithmetic.rms_norm import RmsNorm
from megatron_fp4.makers.computed import has_norm_kernels
from megatron_fp4.target import target_of


def before_linear(x: Tensor, norm: RmsNorm) -> tuple[Tensor, Tensor]:
    """(what stands for the norm of x, x), for a linear that computes the norm (`Site.norm`) and for
    a residual connection.

    x: [..., n]. Both results have the values of x. The gradient of the first is that of the norm.
    The gradients of x through the norm and through the residual connection are summed in one
    kernel, before they are rounded.
    """
    normed, residual = _BeforeLinear.apply(x, norm.weight, norm.eps, norm.zero_centered)
    return normed, residual


class _BeforeLinear(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, weight: Tensor, eps: float, zero_centered: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        ctx.eps, ctx.zero_centered = eps, zero_centered
        ctx.set_materialize_grads(False)
        return x.view_as(x), x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        dy, residual = gradients
        if dy is None:
            return residual, None, None, None
        x, weight = ctx.saved_tensors
        norm = RmsNorm(weight, ctx.eps, ctx.zero_centered)
        other = None if residual is None else _rows(residual)
        dx, dweight = _gradients(_rows(dy), _rows(x), other, norm)
        return dx.view(x.shape), dweight, None, None


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _gradients(
    dy: Tensor, x: Tensor, residual: Tensor | None, norm: RmsNorm
) -> tuple[Tensor, Tensor]:
    dtypes = {each.dtype for each in (dy, x, residual, norm.weight) if each is not None}
    if len(dtypes) == 1 and has_norm_kernels(x.dtype, x.shape[1], target_of(x.device)):
        from megatron_fp4.kernels import rms_norm as kernels  # imports Triton

        return kernels.gradients(dy, x, norm, residual)
    return rms_norm.gradients(dy, x, norm, residual)
