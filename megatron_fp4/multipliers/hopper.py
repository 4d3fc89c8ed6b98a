"""FP8 tensor cores (compute capability 9.0): MXFP4 operands are converted to FP8 carriers.

An E2M1 element times a power of two is exact in FP8 if the exponent is in the window of the FP8
format: -8 to 6 in E4M3, -15 to 13 in E5M2. An FP8 element contains its block scale, relative to a
power of two for the row (2 to the row exponent), which multiplies the product. X and W are
converted to E4M3 and dY to E5M2. Elements below the window are rounded and counted. Sums are
accurate, in float32. E4M3 and UE5M3 scales that rule mse-fp8 chose are exact in E4M3 too, with
exponents from -6 to 5. docs/numerics.md, Carriers, has the definition.

Operands with float32 scales for whole rows are multiplied in FP8 too: their elements are exact in
FP8, and the scales multiply the rows of the product.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from megatron_fp4.arithmetic.formats import FP8_ELEMENTS
from megatron_fp4.arithmetic.quantizer import Quantizer
from megatron_fp4.multipliers.base import INEXACT, Product, codes_of, dtype_problem, finish
from megatron_fp4.operands import Carriers, Decoded, Form, Made
from megatron_fp4.target import Target, kernels_problem

BLOCKS = (16, 32)  # sizes that the carrier kernel takes
_ELEMENTS = {"x": torch.float8_e4m3fn, "w": torch.float8_e4m3fn, "dy": torch.float8_e5m2}
_FACTORS = 16  # bytes of `Carriers.counts` before the row factors
ALIGNMENT = 16  # of M, N and K in an FP8 GEMM


class Hopper:
    """cuBLASLt's FP8 GEMM with a scale for each row."""

    name = "hopper"

    def refuses(self, product: Product, target: Target) -> str | None:
        if target.kind != "cuda" or target.capability != (9, 0):
            return "FP8 GEMMs with a scale a row need a GPU of compute capability 9.0"
        problem = dtype_problem(product) or kernels_problem(target)
        if problem is None and target.device is not None and not _rows_can_be_scaled():
            problem = (
                "torch comes with a cuBLAS before 12.9: install a build for CUDA 12.9 or newer"
            )
        return problem or _formats_problem(product)

    def carrier(self, letter: str) -> torch.dtype | None:
        return _ELEMENTS[letter]

    def decode(
        self, made: Sequence[Made], letters: Sequence[str], dtype: torch.dtype
    ) -> list[Form]:
        operands: list[Any] = [each.operand for each in made]
        blocked = [  # scales with mantissa bits need those of E4M3, of dY too
            (x, _ELEMENTS[letter if x.quantizer.scale == "e8m0" else "x"], each.carriers)
            for each, x, letter in zip(made, operands, letters, strict=True)
            if not x.quantizer.spans_axis
        ]
        carried: list[Any] = _carrier().carried(blocked) if blocked else []
        for (operand, *_), form in zip(blocked, carried, strict=True):
            outer_scale = operand.tensor_scale
            if outer_scale is not None:  # of an operand whose maker writes no carriers
                form.row_factors.mul_(outer_scale)
        if not [x for x in operands if x.quantizer.spans_axis]:
            return carried
        rest = iter(carried)
        return [
            _with_row_scales(each) if x.quantizer.spans_axis else next(rest)
            for each, x in zip(made, operands, strict=True)
        ]

    def form_bytes(self, dtype: torch.dtype) -> int:
        return 1

    def multiply(
        self,
        a: Any,
        b: Any,
        correction: float,
        out_dtype: torch.dtype,
        into: Tensor | None = None,
    ) -> Tensor:
        (m, k), (n, _) = a.values.shape, b.values.shape
        out, adds = into, into is not None and _takes_sums(into)
        if out is None or not adds:
            wide = into is not None or out_dtype != torch.bfloat16
            out = a.values.new_empty((m, n), dtype=torch.float32 if wide else torch.bfloat16)
        matrices = [  # FP8 elements and their row factors, as `cublaslt.ScaledMatrix`
            (x.addresses[2], x.element, x.addresses[3] + _FACTORS, x.counts)
            if x.__class__ is Carriers
            else _scaled_matrix(x)
            for x in (a, b)
        ]
        _cublaslt().multiply(*matrices, (m, n, k), out, correction, adds)
        if adds or (into is None and out.dtype == out_dtype):
            return out
        return finish(out, out_dtype, into)


def _formats_problem(product: Product) -> str | None:
    """Why FP8 tensor cores cannot multiply these operands, in a few words; None if they can."""
    if product.quantizers is None:
        return "an operand is in high precision"
    if product.quantizers[1].element == "e5m2":  # the first operand may be dY, in E5M2
        return "two E5M2 operands have no product on FP8 tensor cores"
    for quantizer in product.quantizers:
        if (problem := _carrier_problem(quantizer)) is not None:
            return problem
    if any(size == 0 or size % ALIGNMENT for size in product.shape):
        return f"a side of the product is no multiple of {ALIGNMENT}"
    return None


def _carrier_problem(quantizer: Quantizer) -> str | None:
    """Why the quantizer's operand cannot be converted to FP8; None if it can."""
    if not quantizer.exact_in_bf16:
        return INEXACT
    if quantizer.element == "e1m2":
        return "no kernel converts E1M2 elements to FP8"
    if quantizer.scale == "fp32":
        return None
    if quantizer.scale != "e8m0" and quantizer.rule != "mse-fp8":
        return f"{quantizer.scale} scales of {quantizer.element} are not powers of two"
    height, length = quantizer.block
    if height == 1 and length in BLOCKS:
        return None
    return f"the carrier kernel takes blocks of 1 x 16 and 1 x 32, not of {height} x {length}"


@cache
def _rows_can_be_scaled() -> bool:
    return _cublaslt().version() >= (12, 9)


# The modules of kernels are imported where they run: they import Triton or load cuBLASLt. They are
# cached, since an import statement costs more host time than most calls here.


@cache
def _carrier() -> ModuleType:
    """The module `kernels.carrier`."""
    from megatron_fp4.kernels import carrier  # imports Triton

    return carrier


@cache
def _elements() -> ModuleType:
    """The module `kernels.elements`."""
    from megatron_fp4.kernels import elements  # imports Triton

    return elements


@cache
def _cublaslt() -> ModuleType:
    """The module `kernels.cublaslt`."""
    from megatron_fp4.kernels import cublaslt  # imports Triton

    return cublaslt


def _with_row_scales(made: Made) -> Decoded:
    """FP8 elements and row factors of an operand whose scales span whole rows or the tensor."""
    if made.elements is not None:
        return made.elements
    operand, tally = codes_of(made), None
    if operand.counts is None:
        factors = operand.block_scales().view(-1, 1)
    else:
        factors, tally = operand.reciprocals, operand.counts[:2]
    if operand.quantizer.element == "e2m1":
        return Decoded(_elements().elements(operand.codes.contiguous()), factors, tally)
    return Decoded(operand.codes.view(FP8_ELEMENTS[operand.quantizer.element]), factors, tally)


def _takes_sums(out: Tensor) -> bool:
    """Whether cuBLASLt can add the product to `out` in the GEMM."""
    return out.dtype == torch.float32 and out.is_contiguous() and out.data_ptr() % ALIGNMENT == 0


def _scaled_matrix(form: Decoded) -> tuple[int, torch.dtype, int, Tensor]:
    """Decoded FP8 elements [rows, K] as a `cublaslt.ScaledMatrix`, with a factor for each row.

    A factor that belongs to the whole tensor is repeated for each row.
    """
    values, factors = form.values, form.row_factors
    assert factors is not None
    if len(factors) != len(values):
        factors = factors.expand(len(values), 1).contiguous()
    return values.data_ptr(), values.dtype, factors.data_ptr(), factors
