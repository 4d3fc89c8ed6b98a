"""Compares the kernel for DGE's factor on dW with the reference, on a GPU or in Triton's
interpreter.

    TRITON_INTERPRET=1 python -m testing.kernels.compare_dge_factor

Prints a line for each estimator that differs.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_fp4.arithmetic.estimators import Estimator
from megatron_fp4.arithmetic.quantize import quantize_matrix
from megatron_fp4.arithmetic.quantizer import Quantizer, get_quantizer
from megatron_fp4.kernels.estimator import scale

ROWS, COLUMNS = 12, 2112
QUANTIZERS = {
    "rows": get_quantizer("vector"),
    "blocks of 32": get_quantizer("mxfp4"),
    "blocks of 16": Quantizer(block=(1, 16), rule="ceil"),
}


def weights(generator: torch.Generator, bad: float) -> Tensor:
    """BF16 weights: on and between points of the grid, zero, small, subnormal, large, `bad`."""
    weight = torch.randn(ROWS, COLUMNS, generator=generator)
    weight[1], weight[2, :8] = 0, torch.tensor([6.0, 5, 4, 3, 2, 1, 0.5, -6])  # on the grid
    weight[2, 8:] = 1.25  # between two of its points: infinitely steep
    weight[3] *= 1e-30
    weight[4] *= 1e-39
    weight[5, 3] = bad
    weight[6] *= 5e37
    return weight.bfloat16()


def differences(device: str) -> Iterator[str]:
    generator = torch.Generator().manual_seed(4)
    for name, quantizer in QUANTIZERS.items():
        for k, clip, bad in (
            (5.0, 3.0, 1.0), (3.0, 7.5, 1.0), (1.0, 3.0, 1.0), (5.0, 3.0, torch.nan),
        ):  # fmt: skip
            weight = weights(generator, bad)
            dw, before = torch.randn(2, ROWS, COLUMNS, generator=generator)
            estimator = Estimator(k=k, clip=clip)
            w = quantize_matrix(weight, quantizer, axis=1)
            wanted = dw.double() * estimator.factor(w.grid_coordinates(weight))
            there, weight = quantize_matrix(weight.to(device), quantizer, axis=1), weight.to(device)
            found = scale(estimator, dw.to(device, copy=True), there, weight).cpu()
            what = f"{name}, k {k} clip {clip} {bad}"
            if not torch.allclose(found.double(), wanted, rtol=2e-6, atol=0.0, equal_nan=True):
                off = ((found - wanted) / wanted).abs().nan_to_num().max()
                yield f"{what}: {off:.1e}"
            total = before.to(device, copy=True)
            added = scale(estimator, dw.to(device), there, weight, total)
            # What was multiplied before, and one rounding of the sum.
            bound = 2e-6 * wanted.abs() + 2.0**-23 * (before + wanted).abs()
            off = (added.cpu().double() - before - wanted).abs()
            same_nan = (added.cpu().isnan() == wanted.isnan()).all()
            if added is not total or (off > bound).any() or not same_nan:
                yield f"{what}: added {off.nan_to_num().max():.1e}"


if __name__ == "__main__":
    print("\n".join(differences("cpu")))
