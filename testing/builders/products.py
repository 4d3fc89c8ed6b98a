"""Products, as the plan's compiler gives them to `Multiplier.refuses`, for tests."""

from __future__ import annotations

from typing import Any

import torch

from megatron_fp4.arithmetic.quantizer import Quantizer
from megatron_fp4.multipliers.base import Product

MX = Quantizer()


def asked(a: Any = MX, b: Any = MX, shape: Any = (256, 256, 256), **fields: Any) -> Product:
    """A Product of a model that computes in BF16, with an output in BF16.

    a, b: quantizers, or dtypes of operands in high precision. shape: M, N, K. fields: other fields
    of Product.
    """
    given: dict[str, Any] = {"dtype": torch.bfloat16, "out_dtype": torch.bfloat16}
    return Product(a, b, shape, **given | fields)
