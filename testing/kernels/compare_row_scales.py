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
from megatron_fp4.arithmetic.quantize import quantize_matrix
from megatron_fp4.arithmetic.quantized_tensor import QuantizedTensor
from megatron_fp4.kernels.row_operands import CARRIERS, RowOperand, find_largest, quantize
from megatron_fp4.kernels.transpose import transposed
from megatron_fp4.makers.base import Given
from megatron_fp4.makers.pytorch import PyTorch
from megatron_fp4.makers.row_scales import RowScaleKernel
from megatron_fp4.operands import Made
from testing.builders.operand_plans import made_in_pytorch, plan

BLOCKS = ((0, 0), (1, 0))  # the tensor, a row
ROWS, COLUMNS = 40, 330
E4M3, E5M2 = CARRIERS
# Axes of operands that are made together, whether they are folded, and the carriers of E2M1.
CASES: tuple[tuple[tuple[int, ...], bool, torch.dtype | None], ...] = (
    ((1,), False, E4M3),
    ((1,), True, None),
    ((0,), False, None),
    ((0,), True, E5M2),
    ((1, 0), False, None),
    ((1, 0), True, E4M3),
)


def matrix(generator: torch.Generator) -> Tensor:
    x = torch.randn(ROWS, COLUMNS, generator=generator)
    x *= torch.exp(3 * torch.randn(ROWS, COLUMNS, generator=generator))
    x[1], x[2, :50], x[3], x[4:9] = 0, -0.0, x[3] * 1e-38, (x[4:9] * 4).round() / 4
    x[10, :8] = torch.tensor([6, 5, 3.5, 2.5, 1.75, 1.25, 0.75, 0.25])  # ties, in E2M1
    x[10, 8:] = 0
    return x


def differences(device: str) -> Iterator[str]:
    generator = torch.Generator().manual_seed(3)
    x = matrix(generator)
    for element, block, bad in itertools.product(
        ("e2m1", "e4m3", "e5m2"), BLOCKS, (1.0, torch.nan)
    ):
        x[5, 7] = bad
        quantizer = Quantizer(element=element, scale="fp32", block=block, rule="absmax")  # type: ignore
        # By axis.
        folds = {axis: torch.randn(x.shape[axis], generator=generator).exp() for axis in (1, 0)}
        shared = {
            axis: torch.full((x.shape[1 - axis] if block[0] else 1, 1), 1e9) for axis in (1, 0)
        }
        for axes, folded, wanted in CASES:
            carrier = wanted if element == "e2m1" else None
            copies = [
                RowOperand(axis, folds[axis] if folded else None, None, carrier) for axis in axes
            ]
            for told in _differences(x.bfloat16(), quantizer, copies, device):
                yield f"{element} {block} {bad} {told}"
        for axis, fold in itertools.product((1, 0), (False, True)):
            copy = RowOperand(axis, folds[axis] if fold else None)
            if not _finds(x.bfloat16(), quantizer, copy, device):
                yield f"{element} {block} {bad} largest {axis} {fold}"
        if bad == 1.0:
            for axis, largest in shared.items():
                for told in _differences(
                    x.bfloat16(), quantizer, [RowOperand(axis, None, largest)], device
                ):
                    yield f"{element} {block} agreed {told}"

    packed = quantize_matrix(x[:, :320], get_quantizer("vector"), axis=1).unscaled()
    on_device = replace(packed, codes=packed.codes.to(device), scales=packed.scales.to(device))
    for carrier in (None, *CARRIERS):
        found = transposed(on_device, carrier)
        assert isinstance(found.operand, QuantizedTensor)
        values = found.operand.dequantize().cpu()
        if _differ(found, packed.along(0), carrier) or not torch.equal(values, packed.dequantize()):
            yield f"transposed {carrier}"


def _differences(
    x: Tensor, quantizer: Quantizer, copies: list[RowOperand], device: str
) -> Iterator[str]:
    there = [
        RowOperand(each.axis, _moved(each.fold, device), _moved(each.largest, device), each.carrier)
        for each in copies
    ]
    found = quantize(x.to(device), quantizer, there)
    for copy, made in zip(copies, found, strict=True):
        assert RowScaleKernel().refuses(plan(x, quantizer, copy.axis)) is None
        wanted = made_in_pytorch(x, quantizer, copy.axis, fold=copy.fold, largest=copy.largest)
        if _differ(made, wanted, copy.carrier):
            folded, agreed = copy.fold is not None, copy.largest is not None
            yield f"axis {copy.axis} of {len(copies)} {folded} {agreed} {copy.carrier}"


def _finds(x: Tensor, quantizer: Quantizer, copy: RowOperand, device: str) -> bool:
    """Whether the largest magnitudes of an operand are those of the reference."""
    wanted_plan = plan(x, quantizer, copy.axis, folds=copy.fold is not None)
    wanted = PyTorch().largest(x, wanted_plan, Given(fold=copy.fold))
    there = RowOperand(copy.axis, _moved(copy.fold, device))
    found = find_largest(x.to(device), quantizer, there).cpu()
    return found.shape == wanted.shape and torch.equal(found, wanted)


def _moved(x: Tensor | None, device: str) -> Tensor | None:
    return None if x is None else x.to(device)


def _differ(made: Made, wanted: QuantizedTensor, carrier: torch.dtype | None) -> bool:
    def same(a: Tensor, b: Tensor) -> bool:
        return torch.equal(a.cpu().flatten(), b.cpu().flatten())

    found = made.operand
    assert isinstance(found, QuantizedTensor) and found.counts is not None
    scales = same(found.scales.nan_to_num(-1), wanted.scales.nan_to_num(-1))
    right = scales and same(found.codes, wanted.codes) and found.shape == wanted.shape
    # What the kernel has computed of it for the product and for the monitor.
    right &= same(found.block_scales().nan_to_num(-1), wanted.block_scales().nan_to_num(-1))
    factors = wanted.block_scales().expand(len(wanted.codes), 1)
    right &= same(found.reciprocals.nan_to_num(-1), factors.nan_to_num(-1))
    lost, nans = found.tally().tolist()
    right &= lost == 0 and nans == int(wanted.scales.isnan().sum())
    if carrier is not None:
        assert made.elements is not None and made.elements.row_factors is not None
        right &= made.elements.values.dtype == carrier
        right &= same(made.elements.values.float(), wanted.elements())
        right &= same(made.elements.values.float().signbit(), wanted.elements().signbit())
        right &= same(made.elements.row_factors.nan_to_num(-1), factors.nan_to_num(-1))
    return not right


if __name__ == "__main__":
    print("\n".join(differences("cpu")))
