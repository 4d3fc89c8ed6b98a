"""What a linear computes, for comparisons with another way to compute it."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_fp4 import Quantizer, Recipe, linear
from megatron_fp4.arithmetic.quantize import quantize_matrix
from testing.oracles import relative_error

Results = dict[str, Tensor]  # "y" [tokens, out], "dx" [tokens, in], "dw" [out, in]


def quantized(x: Tensor, quantizer: Quantizer, axis: int) -> Tensor:
    """x as the quantizer leaves it in blocks along `axis`, in float64."""
    return quantize_matrix(x, quantizer, axis=axis).dequantize(torch.float64)


def results(x: Tensor, w: Tensor, dy: Tensor, recipe: Recipe) -> Results:
    """Y, dX and dW of `linear` under a recipe."""
    leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = linear(*leaves, recipe=recipe)
    y.backward(dy)
    assert leaves[0].grad is not None and leaves[1].grad is not None
    return {"y": y.detach(), "dx": leaves[0].grad, "dw": leaves[1].grad}


def errors(found: Results, expected: Results) -> dict[str, float]:
    """The relative error of each result."""
    return {name: relative_error(found[name], expected[name]) for name in expected}


def gradients(y: Tensor, dy: Tensor, *leaves: Tensor) -> list[Tensor]:
    """Y, and the gradients of the leaves."""
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]
