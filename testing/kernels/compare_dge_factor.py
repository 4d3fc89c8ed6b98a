"""Compares the kernel for DGE's factor on dW with the reference, on a GPU or in Triton's
interpreter.

    TRITON_INTERPRET=1 python -m testing.kernels.compare_dge_factor

Prints a line for each estimator that differs.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megatron_fp4 import get_quantizer
from megatron_fp4.arithmetic.estimators import Estimator
from megatron_fp4.arithmetic.quantizer import quantize_matrix
from megatron_fp4.kernels.estimator import scale

ROWS, COLUMNS = 12, 2100


def differences(device: str) -> Iterator[str]:
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn(ROWS, COLUMNS, generator=generator)
    weight[1], weight[2, :8] = 0, torch.tensor([6.0, 5, 4, 3, 2, 1, 0.5, -6])  # on the grid
    weight[2, 8:] = 1.25  # between two of its points: infinitely steep
    weight[3] *= 1e-30
    for k, clip, bad in ((5.0, 3.0, 1.0), (3.0, 7.5, 1.0), (1.0, 3.0, 1.0), (5.0, 3.0, torch.nan)):
        weight[5, 3] = bad
        dw = torch.randn(ROWS, COLUMNS, generator=generator)
        w = quantize_matrix(weight.bfloat16(), get_quantizer("vector"), axis=1)
        estimator = Estimator(k=k, clip=clip)
        wanted = dw.double() * estimator.factor(w.grid_coordinates(weight.double().bfloat16()))
        there = quantize_matrix(weight.bfloat16().to(device), get_quantizer("vector"), axis=1)
        found = scale(
            estimator, dw.to(device, copy=True), there, weight.bfloat16().to(device)
        ).cpu()
        if not torch.allclose(found.double(), wanted, rtol=2e-6, atol=0.0, equal_nan=True):
            off = ((found - wanted) / wanted).abs().nan_to_num().max()
            yield f"k {k} clip {clip} {bad}: {off:.1e}"
        before = torch.randn(ROWS, COLUMNS, generator=generator)
        total = before.to(device, copy=True)
        added = scale(estimator, dw.to(device), there, weight.bfloat16().to(device), total)
        # What was multiplied before, and one rounding of the sum.
        bound = 2e-6 * wanted.abs() + 2.0**-23 * (before + wanted).abs()
        off = (added.cpu().double() - before - wanted).abs()
        if (
            added is not total
            or (off > bound).any()
            or (added.cpu().isnan() != wanted.isnan()).any()
        ):
            yield f"k {k} clip {clip} {bad}: added {off.nan_to_num().max():.1e}"


if __name__ == "__main__":
    print("\n".join(differences("cpu")))
