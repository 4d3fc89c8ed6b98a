"""pretrain_recording_operands.py with a stand-in for Hopper's multiplier: FP8 carriers on a CPU.

The carriers are those of docs/numerics.md, but an element counts as rounded if its block's scale is
below the row's largest: a small model's scales do not spread beyond FP8's true windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron_fp4 import multipliers
from megatron_fp4.arithmetic.quantized_tensor import QuantizedTensor
from megatron_fp4.multipliers.base import Product
from megatron_fp4.multipliers.reference import Reference
from megatron_fp4.operands import Carriers, Decoded, Form, Made
from megatron_fp4.target import Target
from testing.scripts import pretrain_recording_operands

TOP = {torch.float8_e4m3fn: 6, torch.float8_e5m2: 13}


class Carrying(Reference):
    """Multiplies FP8 carriers, whose rounded elements it counts, by torch's matmul."""

    name = "carrying"

    def refuses(self, product: Product, target: Target) -> str | None:
        return "an operand is in high precision" if product.quantizers is None else None

    def decode(
        self, made: Sequence[Made], letters: Sequence[str], dtype: torch.dtype
    ) -> list[Form]:
        return [_carriers(each.operand, letter) for each, letter in zip(made, letters, strict=True)]

    def multiply(self, a: Any, b: Any, *others: Any) -> Any:
        first, second = (Decoded(each.elements, each.row_factors) for each in (a, b))
        return super().multiply(first, second, *others)


def _carriers(operand: Any, letter: str) -> Carriers:
    assert isinstance(operand, QuantizedTensor)
    element = torch.float8_e5m2 if letter == "dy" else torch.float8_e4m3fn
    values = operand.dequantize(torch.float64).movedim(operand.axis, -1)
    scales = operand.scales.int()
    exponent = (scales.amax(1, keepdim=True) - TOP[element]).clamp(min=1)
    below = (scales - exponent < TOP[element]).repeat_interleave(
        values.shape[1] // scales.shape[1], 1
    )
    counts = torch.zeros(4 + len(values), dtype=torch.int32)
    counts[0] = (below & (values != 0)).sum()
    counts[4:] = torch.ldexp(torch.ones(len(values)), exponent[:, 0] - 127).view(torch.int32)
    elements = torch.ldexp(values, 127 - exponent).to(element).view(torch.uint8)
    return Carriers(elements, element, counts, (None, None, None, None))


if __name__ == "__main__":
    multipliers.MULTIPLIERS = (Carrying(), *multipliers.MULTIPLIERS)
    pretrain_recording_operands.main()
