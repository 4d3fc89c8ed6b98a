"""Splits operands and outliers into lists of tensors, and builds them again.

Autograd keeps tensors alone from the forward pass for the backward pass (save_for_backward).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_fp4.arithmetic.hot_channels import Columns, Outliers
from megatron_fp4.arithmetic.outliers import Residual
from megatron_fp4.arithmetic.quantized_tensor import QuantizedTensor
from megatron_fp4.arithmetic.quantizer import Quantizer
from megatron_fp4.operands import Operand

TensorList = list[Tensor | None]
Build = Callable[..., Any]


def take_apart(given: Operand | Outliers | None) -> tuple[TensorList, Build]:
    """Splits an operand or outliers into tensors that save_for_backward can take.

    Returns (tensors, build): build(*tensors) gives `given` back. build itself references no
    tensor, so it keeps none of them alive.
    """
    if type(given) is QuantizedTensor:
        if given.counts is not None:
            build = partial(_counted, given.quantizer, given.shape, given.axis)
            return [given.codes, given.scales, given.tensor_scale, given.counts], build
        build = partial(
            QuantizedTensor, quantizer=given.quantizer, shape=given.shape, axis=given.axis
        )
        return [given.codes, given.scales, given.tensor_scale], build
    if isinstance(given, Residual):
        return [given.values, given.places], partial(Residual, scope=given.scope, shape=given.shape)
    if isinstance(given, Columns):
        return [given.values, given.channels], Columns
    assert given is None or isinstance(given, Tensor)
    return [given], _itself


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
