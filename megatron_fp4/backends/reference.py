"""The reference backend: plain PyTorch, float32 products (float64 for float64 models)."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_fp4.backends.base import Operand, Preparation
from megatron_fp4.formats import widen
from megatron_fp4.hadamard import transform
from megatron_fp4.quantizer import QuantizedTensor, quantize_matrix
from megatron_fp4.recipe import GemmRecipe


class Reference:
    """Runs everything everywhere."""

    name = "reference"

    def unavailable(self, gemm: GemmRecipe, device: torch.device, dtype: torch.dtype) -> str | None:
        return None

    def prepare(self, x: Tensor, preparation: Preparation) -> Operand:
        quantizer, axis = preparation.quantizer, preparation.axis
        if preparation.fold is not None:
            x = widen(x) * (preparation.fold if axis == 1 else preparation.fold[:, None])
        if preparation.group:
            x = transform(x.movedim(axis, -1), preparation.group, preparation.signs)
            if quantizer is not None:
                # The contract rounds here, so that tensor cores may produce the same codes.
                x = x.bfloat16()
            x = x.movedim(-1, axis)
        if quantizer is None:
            return x.movedim(axis, -1)
        return quantize_matrix(
            x,
            quantizer,
            axis=axis,
            bits=preparation.noise.bits16(x) if preparation.noise is not None else None,
            reduce_row=preparation.reduce_row,
            reduce_tensor=preparation.reduce_tensor,
        )

    def multiply(self, a: Operand, b: Operand, correction: float, out_dtype: torch.dtype) -> Tensor:
        if isinstance(a, Tensor) and isinstance(b, Tensor) and a.dtype == b.dtype == out_dtype:
            return a @ b.t()
        wide = torch.float64 if out_dtype == torch.float64 else torch.float32
        (a_values, a_outer), (b_values, b_outer) = factors(a, wide), factors(b, wide)
        return scale_product(a_values @ b_values.t(), a_outer, b_outer, correction).to(out_dtype)


def factors(operand: Operand, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """(values [rows, K] in `dtype`, what still multiplies the product's rows or None)."""
    if isinstance(operand, QuantizedTensor):
        return operand.factors(dtype)
    return operand.to(dtype), None


def scale_product(
    product: Tensor, a_outer: Tensor | None, b_outer: Tensor | None, correction: float
) -> Tensor:
    """The float32 product [M, N] times the operands' outer scales and the output correction."""
    if a_outer is not None:
        product = product * a_outer
    if b_outer is not None:
        product = product * b_outer.t()
    return product if correction == 1.0 else product * correction
