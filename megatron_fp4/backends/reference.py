"""The reference backend: plain PyTorch, float32 products (float64 for float64 models)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_fp4.backends.base import Decoded, Operand, Preparation, finish
from megatron_fp4.estimators import DGE
from megatron_fp4.formats import wide, widen
from megatron_fp4.hadamard import transform
from megatron_fp4.outliers import OutlierClamp, Residual
from megatron_fp4.quantizer import QuantizedTensor, absolute_max, quantize_matrix
from megatron_fp4.recipe import GemmRecipe


class Reference:
    """Runs everything everywhere."""

    name = "reference"

    def unavailable(self, gemm: GemmRecipe, device: torch.device, dtype: torch.dtype) -> str | None:
        return None

    def absolute_max(self, x: Tensor | QuantizedTensor, preparation: Preparation) -> Tensor:
        assert preparation.quantizer is not None  # high precision has no scale to share
        return absolute_max(_turned(x, preparation), preparation.quantizer, preparation.axis)

    def split(self, x: Tensor, outliers: OutlierClamp) -> tuple[Tensor, Residual]:
        return outliers.split(x)

    def carrier(self, gradient: bool) -> torch.dtype | None:
        return None

    def prepare(self, x: Tensor | QuantizedTensor, *preparations: Preparation) -> list[Operand]:
        return [self._prepare(x, preparation) for preparation in preparations]

    def _prepare(self, x: Tensor | QuantizedTensor, preparation: Preparation) -> Operand:
        quantizer, axis = preparation.quantizer, preparation.axis
        if quantizer is None and isinstance(x, QuantizedTensor):
            return x.along(axis)
        turns = preparation.fold is not None or preparation.group
        assert not turns or preparation.average is None  # it would have to be turned too
        x = _turned(x, preparation)
        if quantizer is None:
            return x.movedim(axis, -1)
        return quantize_matrix(
            x,
            quantizer,
            axis=axis,
            bits=preparation.noise.bits16(x) if preparation.noise is not None else None,
            average=preparation.average,
            widest=preparation.widest,
        )

    def decode(
        self, operands: Sequence[Operand], dtype: torch.dtype, gradient: bool = False
    ) -> list[Operand]:
        return [self._decoded(operand, dtype) for operand in operands]

    def _decoded(self, operand: Operand, dtype: torch.dtype) -> Operand:
        if isinstance(operand, QuantizedTensor):
            return Decoded(*factors(operand, wide(dtype)))
        return operand

    def decoded_bytes(self, dtype: torch.dtype) -> int:
        return wide(dtype).itemsize

    def multiply(
        self,
        a: Operand,
        b: Operand,
        correction: float,
        out_dtype: torch.dtype,
        into: Tensor | None = None,
    ) -> Tensor:
        if into is None and isinstance(a, Tensor) and isinstance(b, Tensor):
            if a.dtype == b.dtype == out_dtype:
                return a @ b.t()
        (a_values, a_outer), (b_values, b_outer) = (factors(x, wide(out_dtype)) for x in (a, b))
        product = scale_product(a_values @ b_values.t(), a_outer, b_outer, correction)
        return finish(product, out_dtype, into)

    def estimate(self, dw: Tensor, estimator: DGE, w: QuantizedTensor, weight: Tensor) -> Tensor:
        return dw.mul_(estimator.factor(w.grid_coordinates(weight)))


def _turned(x: Tensor | QuantizedTensor, preparation: Preparation) -> Tensor:
    """The matrix that the quantizer sees, in the layout in which the model holds it."""
    axis = preparation.axis
    if isinstance(x, QuantizedTensor):
        x = x.dequantize(torch.bfloat16)
    if preparation.fold is not None:
        x = widen(x) * (preparation.fold if axis == 1 else preparation.fold[:, None])
    if preparation.group:
        signs = preparation.sign_vector(x.device)
        x = transform(x.movedim(axis, -1), preparation.group, signs)
        if preparation.quantizer is not None:
            # The contract rounds here, so that tensor cores may produce the same codes.
            x = x.bfloat16()
        x = x.movedim(-1, axis)
    return x


def factors(operand: Operand, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """(values [rows, K] in `dtype`, what still multiplies the product's rows or None)."""
    if isinstance(operand, QuantizedTensor):
        return operand.factors(dtype)
    if isinstance(operand, Decoded):
        return operand.values.to(dtype), operand.outer
    return operand.to(dtype), None


def scale_product(
    product: Tensor, a_outer: Tensor | None, b_outer: Tensor | None, correction: float
) -> Tensor:
    """The float32 product [M, N] times the operands' outer scales and the output correction."""
    if b_outer is not None and a_outer is not None and b_outer.numel() == 1:
        a_outer, b_outer = a_outer * b_outer, None
    if a_outer is not None:
        product = product * a_outer
    if b_outer is not None:
        product = product * b_outer.t()
    return product if correction == 1.0 else product * correction
