"""Compares the kernel that writes FP8 carriers of MXFP4 operands with ml_dtypes, on a GPU or in
Triton's interpreter.

    TRITON_INTERPRET=1 python -m testing.kernels.compare_carriers [48 x]

Prints a line for each matrix and FP8 format that differs. With words: only the matrices whose size
("48 x 2080") contains them.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from dataclasses import replace

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from megatron_fp4 import get_quantizer
from megatron_fp4.arithmetic.quantize import quantize_matrix
from megatron_fp4.arithmetic.quantized_tensor import QuantizedTensor
from megatron_fp4.arithmetic.quantizer import Quantizer
from megatron_fp4.kernels.carrier import carried
from megatron_fp4.kernels.elements import elements
from megatron_fp4.kernels.quantize import Copy, quantize
from megatron_fp4.multipliers.hopper import Hopper
from megatron_fp4.operands import Carriers, Made

# What docs/numerics.md says: the window of exponents in which E2M1 is exact, and ml_dtypes' own.
ELEMENTS = {
    torch.float8_e4m3fn: (-8, 6, ml_dtypes.float8_e4m3fn),
    torch.float8_e5m2: (-15, 13, ml_dtypes.float8_e5m2),
}
# Rows, columns, and how far the scales of blocks are spread.
MATRICES = ((16, 96, 1.5), (48, 2080, 6.0), (32, 32, 3.0), (16, 4160, 0.0), (16, 9632, 2.0))


def matrix(rows: int, columns: int, spread: float) -> Tensor:
    """float32 [rows, columns] with zeros, NaN, and rows of subnormal and of the largest numbers.

    spread: the standard deviation of the logarithms of the blocks' scales.
    """
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, columns, generator=generator)
    block = 32 if columns % 32 == 0 else 16
    scales = torch.exp(spread * torch.randn(rows, columns // block, generator=generator))
    x *= scales.repeat_interleave(block, 1)
    x[0, :32], x[1, 5], x[2] = -0.0, torch.nan, 0
    x[3] *= 1e-38 / scales.max()
    x[4] *= 1e37 / x[4].abs().max()
    return x


def differences(device: str, of: str = "") -> Iterator[str]:
    """A line for each matrix and FP8 format whose bytes, row factors or counts are wrong."""
    codes = torch.arange(256).repeat(5, 9).to(torch.uint8)  # every byte of two codes
    zeros = quantize_matrix(torch.zeros(32, 32), get_quantizer("mxfp4"), axis=1)
    values = replace(zeros, codes=codes).elements(torch.float64)
    all_bytes = values.numpy().astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    if (elements(codes.to(device)).cpu().view(torch.uint8).numpy() != all_bytes).any():
        yield "elements without scales"
    mxfp4, short = get_quantizer("mxfp4"), Quantizer(block=(1, 16))
    cases = [(*sizes, mxfp4) for sizes in MATRICES] + [(48, 2096, 6.0, short), (16, 80, 1.5, short)]
    for rows, columns, spread, quantizer in cases:
        if of not in f"{rows} x {columns}":
            continue
        q = quantize_matrix(matrix(rows, columns, spread), quantizer, axis=1)
        value, scale = q.dequantize(torch.float64), q.scales.int()
        mine = replace(q, codes=q.codes.to(device), scales=q.scales.to(device))
        kinds = list(ELEMENTS)[:: 1 if rows > 16 else -1]  # either one comes first
        if columns == 32:  # and alone
            forms = [carried([(mine, kind, None)])[0] for kind in kinds]
        else:
            forms = carried([(mine, kind, None) for kind in kinds])
        for element, form in zip(kinds, forms, strict=True):
            values, factor, tally = form.elements, form.row_factors, form.tally
            bottom, top, dtype = ELEMENTS[element]
            largest = torch.where(scale == 255, 0, scale).amax(1, keepdim=True)
            exponent = (largest - top).clamp(min=1) - 127
            wanted = torch.ldexp(value, -exponent).numpy().astype(dtype)
            there = ~np.isnan(wanted.astype(np.float64))
            found = values.cpu().view(torch.uint8).numpy()
            wrong = int((found[there] != wanted.view(np.uint8)[there]).sum())
            wrong += int((values.cpu().float().isnan().numpy() == there).sum())
            factors = int((factor.cpu().double() != torch.exp2(exponent.double())).sum())
            below = (scale - 127 - exponent < bottom).repeat_interleave(quantizer.block[1], 1)
            count = int((below & (value != 0) & ~value.isnan()).sum())
            nans = int((scale == 255).sum())
            if wrong or factors or tally.tolist() != [count, nans]:
                told = f"{tally.tolist()} of [{count}, {nans}] rounded and NaN"
                yield f"{rows} x {columns} {element}: {wrong} bytes, {factors} factors, {told}"


def beside(device: str, of: str = "") -> Iterator[str]:
    """A line for each pair of operands that one launch converts otherwise than two launches do.

    One operand has carriers from the quantize kernel and the other has none. Their blocks have 16
    or 32 elements.
    """
    if of not in "beside":
        return
    x = matrix(16, 96, 1.5).bfloat16().to(device)
    kinds = itertools.product(ELEMENTS, (16, 32), (16, 32), (1, -1))
    for element, block, other, order in kinds:
        pair = []
        for size, keeps in ((block, True), (other, False)):
            quantizer = Quantizer(rule="ceil", block=(1, size))
            [made] = quantize(x, quantizer, [Copy(1, carrier=element)])
            assert isinstance(made.operand, QuantizedTensor)
            pair.append((made.operand, element, made.carriers if keeps else None))
        alone = [carried([(operand, element, None)])[0] for operand, *_ in pair]
        for found, wanted in zip(carried(pair[::order])[::order], alone, strict=True):
            one, two = _values(found), _values(wanted)
            same = torch.equal(one.nan_to_num(7e30), two.nan_to_num(7e30))
            if not same or found.tally.tolist() != wanted.tally.tolist():
                yield f"{element}, blocks of {block} beside {other}, {order}: differ"


def in_fp8(device: str, of: str = "") -> Iterator[str]:
    """Compares the FP8 elements, row factors and counts of operands with scales of rule mse-fp8
    with those that ml_dtypes gives. Yields a line for each operand that differs."""
    if of not in "mse-fp8":
        return
    kinds = itertools.product(("e4m3", "ue5m3"), (16, 32), ((16, 96, 1.0), (48, 2080, 4.0)))
    for scale, block, (rows, columns, spread) in kinds:
        quantizer = Quantizer(scale=scale, block=(1, block), rule="mse-fp8")  # type: ignore[arg-type]
        q = quantize_matrix(matrix(rows, columns, spread), quantizer, axis=1)
        mine = replace(q, codes=q.codes.to(device), scales=q.scales.to(device))
        [form] = Hopper().decode([Made(mine)], ["dy"], torch.bfloat16)
        assert isinstance(form, Carriers) and form.element == torch.float8_e4m3fn
        scales, value = q.block_scales(torch.float64), q.dequantize(torch.float64)
        nan = scales.isnan()
        exponent = torch.where(nan | (scales == 0), 2.0**-127, scales).log2().floor()
        row = (exponent.amax(1, keepdim=True) - 5).clamp(min=-126)
        wanted = torch.ldexp(value, -row).numpy().astype(ml_dtypes.float8_e4m3fn)
        there = ~np.isnan(wanted.astype(np.float64))
        found = form.elements.cpu().view(torch.uint8).numpy()
        wrong = int((found[there] != wanted.view(np.uint8)[there]).sum())
        wrong += int((form.elements.cpu().float().isnan().numpy() == there).sum())
        factors = int((form.row_factors.cpu().double() != torch.exp2(row)).sum())
        below = (exponent - row < -6).repeat_interleave(block, 1)
        count = int((below & (value != 0) & ~value.isnan()).sum())
        if wrong or factors or form.tally.tolist() != [count, int(nan.sum())]:
            told = f"{form.tally.tolist()} of [{count}, {int(nan.sum())}] rounded and NaN"
            yield f"{scale}, blocks of {block}: {wrong} bytes, {factors} factors, {told}"


def with_row_scales(device: str, of: str = "") -> Iterator[str]:
    """A line for each block size for which the Hopper multiplier's form of an operand with scales
    of rows beside block scales does not stand for its decoded values."""
    if of not in "row scales":
        return
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(48, 96, generator=generator) * torch.randn(48, 1, generator=generator).exp()
    for block in (16, 32):
        made = quantize_matrix(x, Quantizer(rule="mse", block=(1, block), row_max=1.0), axis=1)
        assert made.tensor_scale is not None
        codes, scales, rows = (t.to(device) for t in (made.codes, made.scales, made.tensor_scale))
        mine = replace(made, codes=codes, scales=scales, tensor_scale=rows)
        [form] = Hopper().decode([Made(mine)], ["x"], torch.bfloat16)
        assert isinstance(form, Carriers)
        found = _values(form)
        if not torch.equal(found, made.dequantize(torch.float64)):
            yield f"row scales, blocks of {block}: differ"


def _values(form: Carriers) -> Tensor:
    """The matrix that carriers represent, elements times row factors, in float64 on the CPU."""
    return form.elements.cpu().double() * form.row_factors.cpu()


if __name__ == "__main__":
    comparisons = differences, beside, in_fp8, with_row_scales
    print("\n".join(line for each in comparisons for line in each("cpu", *sys.argv[1:])))
