"""Splits operands and outliers into plain tensors, and builds them again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_fp4.arithmetic.hot_channels import Columns, Outliers
from megatron_fp4.arithmetic.outliers import Residual
from megatron_fp4.arithmetic.quantizer import QuantizedTensor, Quantizer
from megatron_fp4.operands import Operand

Parts = list[Tensor | None]
Build = Callable[..., Any]


def take_apart(part: Operand | Outliers | None) -> tuple[Parts, Build]:
    """Splits an operand or outliers into tensors that save_for_backward can take.

    Returns (tensors, build): build(*tensors) gives the part back. build itself references no
    tensor, so it keeps none of them alive.
    """
    if type(part) is QuantizedTensor:
        if part.counts is not None:
            build = partial(_counted, part.quantizer, part.shape, part.axis)
            return [part.codes, part.scales, part.tensor_scale, part.counts], build
        build = partial(QuantizedTensor, quantizer=part.quantizer, shape=part.shape, axis=part.axis)
        return [part.codes, part.scales, part.tensor_scale], build
    if isinstance(part, Residual):
        return [part.values, part.places], partial(Residual, scope=part.scope, shape=part.shape)
    if isinstance(part, Columns):
        return [part.values, part.channels], Columns
    assert part is None or isinstance(part, Tensor)
    return [part], _itself


def _counted(
    quantizer: Quantizer,
    shape: torch.Size,
    axis: int,
    codes: Tensor,
    scales: Tensor,
    tensor_scale: Tensor | None,
    counts: Tensor,
) -> QuantizedTensor:
    return QuantizedTensor(codes, scales, tensor_scale, quantizer, shape, axis, counts)


def _itself(tensor: Tensor | None) -> Tensor | None:
    return tensor
