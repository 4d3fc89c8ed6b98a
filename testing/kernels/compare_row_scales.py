"""Compares the kernels for float32 scales of rows or of the tensor, and the transpose of codes,
with the reference, on a GPU or in Triton's interpreter.

    TRITON_INTERPRET=1 python -m testing.kernels.compare_row_scales

Prints a line for each case that differs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from megatron_fp4 import Quantizer, get_quantizer
from megatron_fp4.arithmetic.quantizer import QuantizedTensor, quantize_matrix
from megatron_fp4.kernels.rows import quantize, transposed
from megatron_fp4.makers.row_scales import RowScaleKernel
from testing.builders.operand_plans import made_in_pytorch, plan

BLOCKS = ((0, 0), (1, 0))  # the tensor, a row
ROWS, COLUMNS = 40, 330


def differences(device: str) -> Iterator[str]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(ROWS, COLUMNS, generator=generator)
    x *= torch.exp(3 * torch.randn(ROWS, COLUMNS, generator=generator))
    x[1], x[2, :50], x[3], x[4:9] = 0, -0.0, x[3] * 1e-38, (x[4:9] * 4).round() / 4
    x[10, :8] = torch.tensor([6, 5, 3.5, 2.5, 1.75, 1.25, 0.75, 0.25])  # ties, in E2M1
    x[10, 8:] = 0
    for element, block, axis, bad in itertools.product(
        ("e2m1", "e4m3", "e5m2"), BLOCKS, (1, 0), (1.0, torch.nan)
    ):
        x[5, 7] = bad
        quantizer = Quantizer(element=element, scale="fp32", block=block, rule="absmax")  # type: ignore
        assert RowScaleKernel().refuses(plan(x.bfloat16(), quantizer, axis)) is None
        fold = torch.randn(x.shape[axis], generator=generator).exp()
        shared = torch.full((x.shape[1 - axis] if block[0] else 1, 1), 1e9)
        for widest, folded in ((None, None), (None, fold), (shared, None)):
            if bad != 1.0 and widest is not None:
                continue
            made = made_in_pytorch(x.bfloat16(), quantizer, axis, fold=folded, widest=widest)
            there = [None if t is None else t.to(device) for t in (folded, widest)]
            found = quantize(x.bfloat16().to(device), quantizer, axis, *there)
            if _differ(found, made):
                yield f"{element} {block} {axis} {bad} {folded is None} {widest is None}"

    packed = quantize_matrix(x[:, :320], get_quantizer("vector"), axis=1).unscaled()
    on_device = replace(packed, codes=packed.codes.to(device), scales=packed.scales.to(device))
    found, made = transposed(on_device), packed.along(0)
    values = found.dequantize().cpu()
    if _differ(found, made) or not torch.equal(values, packed.dequantize()):
        yield "transposed"


def _differ(found: QuantizedTensor, made: QuantizedTensor) -> bool:
    def same(a: Tensor, b: Tensor) -> bool:
        return torch.equal(a.cpu().flatten(), b.flatten())

    scales = same(found.scales.nan_to_num(-1), made.scales.nan_to_num(-1))
    return not (scales and same(found.codes, made.codes) and found.shape == made.shape)


if __name__ == "__main__":
    print("\n".join(differences("cpu")))
