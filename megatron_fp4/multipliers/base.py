"""Multiplier: who runs a GEMM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron_fp4.arithmetic.quantizer import QuantizedTensor, Quantizer
from megatron_fp4.operands import Decoded, Form, Made, Operand
from megatron_fp4.target import Target


@dataclass(frozen=True)
class Product:
    """One GEMM, A B^T times `correction`.

    a, b: the quantizers of the operands, or the dtype of one in high precision.
    shape: M, N and K, or divisors of them; 0 where there are no elements.
    dtype: what the model computes in. out_dtype: of the result, or of what the result is added to
        (`adds`), to which it is rounded once.
    """

    a: Quantizer | torch.dtype
    b: Quantizer | torch.dtype
    shape: tuple[int, int, int]
    dtype: torch.dtype
    out_dtype: torch.dtype
    adds: bool = False
    correction: float = 1.0

    @property
    def quantizers(self) -> tuple[Quantizer, Quantizer] | None:
        """Both quantizers; None where an operand is in high precision."""
        if isinstance(self.a, Quantizer) and isinstance(self.b, Quantizer):
            return self.a, self.b
        return None


class Multiplier(Protocol):
    """One way to run a GEMM."""

    name: str

    def refuses(self, product: Product, target: Target) -> str | None:
        """Why it cannot run this product there, in a few words; None where it can."""
        ...

    def carrier(self, letter: str) -> torch.dtype | None:
        """The FP8 dtype in which it takes the elements of an MXFP4 operand ("x", "w" or "dy"), so
        that a maker may write them at once; None where it takes none."""
        ...

    def decode(
        self, made: Sequence[Made], letters: Sequence[str], dtype: torch.dtype
    ) -> list[Form]:
        """The forms in which `multiply` takes these operands ("x", "w" or "dy") of a model that
        computes in `dtype`: both of a product, or one by itself."""
        ...

    def form_bytes(self, dtype: torch.dtype) -> int:
        """The bytes of an element in that form; 0 where it is the codes themselves."""
        ...

    def multiply(
        self,
        a: Form,
        b: Form,
        correction: float,
        out_dtype: torch.dtype,
        into: Tensor | None = None,
    ) -> Tensor:
        """A B^T times `correction`, accumulated in float32 (float64 for float64 models): rounded
        once to `out_dtype`, or added to `into`, which is returned."""
        ...


def finish(product: Tensor, out_dtype: torch.dtype, into: Tensor | None) -> Tensor:
    """A float32 (float64) product as `multiply` returns it: rounded once, or added to `into`."""
    return product.to(out_dtype) if into is None else into.add_(product)


def scale_product(
    product: Tensor, a_outer: Tensor | None, b_outer: Tensor | None, correction: float
) -> Tensor:
    """The float32 product [M, N] times the row factors of its operands and the correction."""
    if b_outer is not None and a_outer is not None and b_outer.numel() == 1:
        a_outer, b_outer = a_outer * b_outer, None
    if a_outer is not None:
        product = product * a_outer
    if b_outer is not None:
        product = product * b_outer.t()
    return product if correction == 1.0 else product * correction


def dtype_problem(product: Product) -> str | None:
    """Why a multiplier for models in BF16 cannot run the product."""
    if product.dtype == torch.bfloat16:
        return None
    return f"the model computes in {str(product.dtype).removeprefix('torch.')}; use --bf16"


def format_of(operand: Operand) -> Quantizer | torch.dtype:
    """An operand's entry in a Product."""
    return operand.quantizer if isinstance(operand, QuantizedTensor) else operand.dtype


def codes_of(made: Made) -> QuantizedTensor:
    """An operand that is multiplied as codes and scales."""
    assert isinstance(made.operand, QuantizedTensor)
    return made.operand


def decoded_in(made: Made, dtype: torch.dtype) -> Decoded:
    """An operand as values in `dtype` and row factors; one in high precision as it is."""
    if isinstance(made.operand, QuantizedTensor):
        return Decoded(*made.operand.factors(dtype))
    return Decoded(made.operand)
