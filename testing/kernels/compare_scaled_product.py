"""Compares the kernel that scales products with PyTorch, on a GPU or in Triton's interpreter.

    TRITON_INTERPRET=1 python -m testing.kernels.compare_scaled_product

Prints a line for each case that differs in a bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_fp4.kernels.scaled_product import scaled
from megatron_fp4.multipliers.base import finish, scale_product

ROWS, COLUMNS = 40, 200  # no multiples of a program's tile
KINDS = ("none", "tensor", "rows")
# Corrections, dtypes of the result, and whether it is added.
RESULTS = (
    (1.0, torch.bfloat16, False),
    (1.0, torch.float32, True),
    (16 / 9, torch.float32, False),
    (16 / 9, torch.bfloat16, True),
)


def factors(kind: str, lines: int, generator: torch.Generator) -> Tensor | None:
    """float32 [lines, 1], [1, 1] or None; a NaN and an Inf among those of rows."""
    if kind == "none":
        return None
    found = torch.rand(lines if kind == "rows" else 1, 1, generator=generator) / 3
    if kind == "rows":
        found[3], found[5] = torch.nan, torch.inf
    return found


def differences(device: str) -> Iterator[str]:
    generator = torch.Generator().manual_seed(6)
    product = torch.randn(ROWS, COLUMNS, generator=generator) * 1e3
    product[0, :4] = torch.tensor([0.0, -0.0, 3e38, 1e-40])
    before = torch.randn(ROWS, COLUMNS, generator=generator)
    for a_kind, b_kind, (correction, dtype, adds) in itertools.product(KINDS, KINDS, RESULTS):
        a, b = factors(a_kind, ROWS, generator), factors(b_kind, COLUMNS, generator)
        into = before.to(dtype) if adds else None
        first, second = (None if each is None else each.to(device) for each in (a, b))
        there = None if into is None else into.to(device, copy=True)
        found = scaled(product.to(device), first, second, correction, dtype, there)
        wanted = finish(scale_product(product, a, b, correction), dtype, into)
        same = torch.equal(found.cpu().nan_to_num(7.0), wanted.nan_to_num(7.0))
        if not same or (there is not None and found is not there):
            yield f"{a_kind} {b_kind} {correction} {dtype} {adds}"


if __name__ == "__main__":
    print("\n".join(differences("cpu")))
