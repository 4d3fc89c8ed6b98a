"""Multiplier: the interface of what runs a GEMM, and what multipliers share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron_fp4.arithmetic.quantized_tensor import QuantizedTensor
from megatron_fp4.arithmetic.quantizer import Quantizer
from megatron_fp4.decoding import decoded
from megatron_fp4.operands import Decoded, Form, Made, Operand
from megatron_fp4.target import Target, kernels_problem, triton_problem


@dataclass(frozen=True)
class Product:
    """What a multiplier must know of a GEMM, A B^T times `correction`, to say if it can run it.

    a, b: the quantizer of each operand, or its dtype if it is in high precision.
    shape: M, N and K, or divisors of them; 0 where there are no elements.
    dtype: the dtype in which the model computes.
    out_dtype: the dtype of the result, or of the tensor to which the result is added.
    adds: whether the result is added to a tensor, such as main_grad.
    correction: a factor of the float32 product; see GemmRecipe.
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
        """The quantizers of A and B; None if A or B is in high precision."""
        if isinstance(self.a, Quantizer) and isinstance(self.b, Quantizer):
            return self.a, self.b
        return None


class Multiplier(Protocol):
    """One way to run a GEMM."""

    name: str

    def refuses(self, product: Product, target: Target) -> str | None:
        """Why it cannot run this product on `target`, in a few words that users read; None if it
        can."""
        ...

    def carrier(self, letter: str) -> torch.dtype | None:
        """The FP8 dtype in which it reads a 4-bit operand "x", "w" or "dy"; None if it reads none.

        A maker may then write FP8 elements beside the codes (`OperandPlan.carrier`).
        """
        ...

    def decode(
        self, made: Sequence[Made], letters: Sequence[str], dtype: torch.dtype
    ) -> list[Form]:
        """The forms in which `multiply` reads these operands.

        made: both operands of a product, or one of them. letters: "x", "w" or "dy" for each. dtype:
        the dtype in which the model computes.
        """
        ...

    def form_bytes(self, dtype: torch.dtype) -> int:
        """The bytes of an element in the form that `decode` returns; 0 if that is the codes."""
        ...

    def multiply(
        self,
        a: Form,
        b: Form,
        correction: float,
        out_dtype: torch.dtype,
        into: Tensor | None = None,
    ) -> Tensor:
        """A B^T times `correction`, accumulated in float32 (float64 for float64 models).

        a, b: from `decode`, [M, K] and [N, K]. The product [M, N] is rounded once to `out_dtype`,
        or added to `into`, which is then returned.
        """
        ...


class ReadsCodes:
    """What multipliers share that read codes and scales as they are."""

    def carrier(self, letter: str) -> torch.dtype | None:
        return None

    def decode(
        self, made: Sequence[Made], letters: Sequence[str], dtype: torch.dtype
    ) -> list[Form]:
        return [*map(codes_of, made)]

    def form_bytes(self, dtype: torch.dtype) -> int:
        return 0


def finish(product: Tensor, out_dtype: torch.dtype, into: Tensor | None) -> Tensor:
    """A float32 or float64 product as `multiply` returns it: rounded to `out_dtype`, or added to
    `into`, which is returned."""
    return product.to(out_dtype) if into is None else into.add_(product)


def finish_scaled(
    product: Tensor,
    a_factors: Tensor | None,
    b_factors: Tensor | None,
    correction: float,
    out_dtype: torch.dtype,
    into: Tensor | None,
) -> Tensor:
    """Scales a product as `scale_product` does, and rounds or adds it as `finish` does.

    On a GPU one kernel does both, if the product is in float32 and the result in BF16 or float32.
    product: [M, N]. For the other arguments see these functions.
    """
    dtype = out_dtype if into is None else into.dtype
    if _has_scale_kernel(product, dtype) and (into is None or into.is_contiguous()):
        from megatron_fp4.kernels import scaled_product  # imports Triton

        return scaled_product.scaled(product, a_factors, b_factors, correction, dtype, into)
    return finish(scale_product(product, a_factors, b_factors, correction), out_dtype, into)


def _has_scale_kernel(product: Tensor, dtype: torch.dtype) -> bool:
    kinds = (torch.bfloat16, torch.float32)  # of the result
    return (
        product.is_cuda
        and product.dtype == torch.float32
        and product.numel() > 0
        and dtype in kinds
        and triton_problem() is None
    )


def scale_product(
    product: Tensor, a_factors: Tensor | None, b_factors: Tensor | None, correction: float
) -> Tensor:
    """The product [M, N], in float32 or wider, times the row factors of its operands and the
    correction.

    a_factors: [M, 1], [1, 1] or None. b_factors: [N, 1], [1, 1] or None; see `Decoded.row_factors`.
    """
    if b_factors is not None and a_factors is not None and b_factors.numel() == 1:
        a_factors, b_factors = a_factors * b_factors, None
    if a_factors is not None:
        product = product * a_factors
    if b_factors is not None:
        product = product * b_factors.t()
    return product if correction == 1.0 else product * correction


def dtype_problem(product: Product) -> str | None:
    """Why a multiplier for models in BF16 cannot run the product; None if the model is in BF16."""
    if product.dtype == torch.bfloat16:
        return None
    return f"the model computes in {str(product.dtype).removeprefix('torch.')}; use --bf16"


def format_problem(product: Product) -> str | None:
    """Why FP4 tensor cores cannot multiply these operands, if their 4-bit elements or their block
    scales are the reason.

    None if some instruction takes those of both operands, or if they are in high precision.
    """
    for operand in (product.a, product.b):
        if not isinstance(operand, Quantizer):
            continue
        if operand.element == "e1m2":
            return "FP4 tensor cores have no instruction for E1M2 elements"
        if operand.scale == "ue5m3":
            return "FP4 tensor cores have no instruction for UE5M3 scales"
        if not operand.exact_in_bf16:
            return "FP4 tensor cores have no instruction for float32 scales within a row"
        if operand.row_max:
            return "an operand has a scale for each row beside its block scales"
    return None


def codes_problem(product: Product) -> str | None:
    """Why FP4 tensor cores cannot multiply the codes of these operands; None if an instruction may.

    Shapes are not looked at, nor which of the instructions it is.
    """
    if (problem := dtype_problem(product)) is not None:
        return problem
    if product.quantizers is None:
        return "an operand is in high precision"
    return format_problem(product)


def mxfp4_problem(product: Product, target: Target) -> str | None:
    """Why an MXFP4 GEMM on FP4 tensor cores cannot multiply the codes of these operands, or no
    kernel runs on `target`; None if it may. Shapes are not looked at."""
    if (problem := codes_problem(product) or kernels_problem(target)) is not None:
        return problem
    assert product.quantizers is not None  # codes_problem refuses high precision
    if not all(quantizer.mxfp4 for quantizer in product.quantizers):
        return "an operand is not MXFP4 in blocks of 32"
    return None


def is_inexact(product: Product) -> bool:
    """Whether an operand has float32 scales within its blocked axis, so that no format narrower
    than float32 holds its decoded values."""
    return any(isinstance(x, Quantizer) and not x.exact_in_bf16 for x in (product.a, product.b))


INEXACT = "float32 scales within a row are simulated: their values are exact in float32 alone"


def format_of(operand: Operand) -> Quantizer | torch.dtype:
    """An operand's `Product.a` or `Product.b`: its quantizer, or its dtype in high precision."""
    return operand.quantizer if isinstance(operand, QuantizedTensor) else operand.dtype


def codes_of(made: Made) -> QuantizedTensor:
    """The codes and scales of an operand that is multiplied in that form."""
    assert isinstance(made.operand, QuantizedTensor)
    return made.operand


def decoded_in(made: Made, dtype: torch.dtype) -> Decoded:
    """An operand as values in `dtype` and row factors; one in high precision is not changed."""
    if isinstance(made.operand, QuantizedTensor):
        return decoded(made.operand, dtype)
    return Decoded(made.operand)
