"""The reference: plain PyTorch in float32 (float64 for float64 models).

It runs every product on every device, and is the last choice.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_fp4.arithmetic.formats import wide
from megatron_fp4.multipliers.base import Product, decoded_in, finish, scale_product
from megatron_fp4.operands import Decoded, Form, Made
from megatron_fp4.target import Target


class Reference:
    """Operands decoded to float32 or float64, and multiplied by torch's matmul."""

    name = "reference"

    def refuses(self, product: Product, target: Target) -> str | None:
        return None

    def carrier(self, letter: str) -> torch.dtype | None:
        return None

    def decode(
        self, made: Sequence[Made], letters: Sequence[str], dtype: torch.dtype
    ) -> list[Form]:
        return [decoded_in(each, wide(dtype)) for each in made]

    def form_bytes(self, dtype: torch.dtype) -> int:
        return wide(dtype).itemsize

    def multiply(
        self,
        a: Form,
        b: Form,
        correction: float,
        out_dtype: torch.dtype,
        into: Tensor | None = None,
    ) -> Tensor:
        assert isinstance(a, Decoded) and isinstance(b, Decoded)
        plain = a.row_factors is None and b.row_factors is None and correction == 1.0
        if plain and into is None and a.values.dtype == b.values.dtype == out_dtype:
            return a.values @ b.values.t()
        a_values, b_values = (form.values.to(wide(out_dtype)) for form in (a, b))
        product = scale_product(a_values @ b_values.t(), a.row_factors, b.row_factors, correction)
        return finish(product, out_dtype, into)
