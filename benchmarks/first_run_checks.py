"""Checks of makers and multipliers on one device, for benchmarks/first_run.py.

Each returns a row, a dictionary that JSON can hold. `recorded` turns an exception of a check into
such a row, so that the checks after it still run.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_fp4.arithmetic.formats import unpack
from megatron_fp4.arithmetic.philox import Key, Noise, Signs
from megatron_fp4.arithmetic.quantize import quantize_matrix
from megatron_fp4.arithmetic.quantized_tensor import QuantizedTensor
from megatron_fp4.arithmetic.quantizer import Quantizer, get_quantizer, list_quantizers
from megatron_fp4.makers import choose
from megatron_fp4.makers.base import Given, Maker, OperandPlan
from megatron_fp4.makers.pytorch import make_operand
from megatron_fp4.multipliers.base import Multiplier, Product
from megatron_fp4.multipliers.trial import bound
from megatron_fp4.operands import Form, Made
from megatron_fp4.target import target_of
from testing.builders.operand_plans import plan

Row = dict[str, Any]
AFTER_TRANSFORM = 1e-4  # the share of codes that may differ after a transform (docs/numerics.md)


def recorded(check: Callable[[], Row], **about: Any) -> Row:
    """`about` and what `check` returns; if it raises, the exception as text instead."""
    try:
        return about | check()
    except Exception as error:  # whatever untried hardware may raise
        said = str(error).strip().partition("\n")[0]
        told = traceback.format_exc()[-3000:]
        return about | {"raised": f"{type(error).__name__}: {said}", "traceback": told}


# --- codes and scales -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Coding:
    """Operands that one maker makes of one matrix.

    name: of the quantizer. axes: the contracted axis of each operand. group: of the Hadamard
    transform; 0: none.
    """

    name: str
    quantizer: Quantizer
    axes: tuple[int, ...]
    group: int = 0


def codings() -> list[Coding]:
    """All named quantizers and some without a name, along rows, along columns, and along both."""
    quantizers = {name: get_quantizer(name) for name in list_quantizers()}
    quantizers |= {
        "mxfp4 to an average": Quantizer(rule="ceil", rounding="ema"),
        "e8m0, blocks of 16": Quantizer(block=(1, 16), rule="ceil"),
        "e8m0, blocks of 16, stochastic": Quantizer(block=(1, 16), rounding="stochastic"),
        "ue5m3": Quantizer(scale="ue5m3", rule="nearest"),
        "fp8 rows": Quantizer(element="e4m3", scale="fp32", block=(1, 0), rule="absmax"),
        "fp8 tensor": Quantizer(element="e5m2", scale="fp32", block=(0, 0), rule="absmax"),
    }
    found = [Coding(*item, axes) for item in quantizers.items() for axes in ((1,), (0,), (1, 0))]
    for name in ("mxfp4", "mxfp4-sr"):
        found += [Coding(name, get_quantizer(name), axes, 64) for axes in ((1,), (0,), (1, 0))]
    return found


def matrix(rows: int, columns: int) -> Tensor:
    """A random BF16 matrix whose blocks have different scales, on the CPU."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, columns, generator=generator)
    spread = torch.randn(rows, columns // 16, generator=generator).exp()
    return (x * spread.repeat_interleave(16, 1)).bfloat16()


def check_codes(coding: Coding, shape: tuple[int, int], device: torch.device) -> Row:
    """How the codes and scales of the kernel for `coding` differ from the reference's.

    The row has the reason instead where no kernel takes it on this device.
    """
    x = matrix(*shape)
    operands = [plan(x, coding.quantizer, axis, group=coding.group) for axis in coding.axes]
    choice = choose(operands[0], target_of(device))
    if choice.passed_over:
        return {"refused": dict(choice.passed_over)}
    return {"kernel": choice.maker.name} | compared(choice.maker, x, operands, device)


def compared(maker: Maker, x: Tensor, operands: Sequence[OperandPlan], device: torch.device) -> Row:
    """How many codes and scales of `maker` on `device` differ from plain PyTorch's on the CPU."""
    together = len(operands) == 1 or maker.joins(operands[0], operands[1])
    passes = [list(operands)] if together else [[operand] for operand in operands]
    there = x.to(device)
    made = [
        each.operand
        for some in passes
        for each in maker.make(there, some, [_given(operand, there) for operand in some])
    ]
    codes = scales = total = 0
    for operand, found in zip(operands, made, strict=True):
        wanted = make_operand(x, operand, _given(operand, x))
        assert isinstance(found, QuantizedTensor) and isinstance(wanted, QuantizedTensor)
        different = _elements(found) != _elements(wanted)
        codes, total = codes + int(different.sum()), total + different.numel()
        scales += int((_scales(found) != _scales(wanted)).sum())
    transformed = any(operand.group for operand in operands)
    # A code that changes beside a boundary may change the block's scale too.
    allowed = AFTER_TRANSFORM * total if transformed else 0
    row = {"elements": total, "different codes": codes, "different scales": scales}
    return row | {"allowed": allowed, "right": codes + scales <= allowed}


def _given(operand: OperandPlan, x: Tensor) -> Given:
    """The random bits, signs and average of an operand, equal on every device. As in a call of a
    linear, bits and signs have one key."""
    assert operand.quantizer is not None
    key = Key(3, 11)
    given = Given(signs=Signs(key, 9 + operand.axis) if operand.group else None)
    if operand.quantizer.draws:
        given.noise = Noise(key, 5 + operand.axis)
    if operand.quantizer.rounding == "ema":
        given.average = x.float() * 1.125
    return given


def _elements(q: QuantizedTensor) -> Tensor:
    codes = q.codes.cpu()
    return unpack(codes) if q.quantizer.format.packed else codes


def _scales(q: QuantizedTensor) -> Tensor:
    """The scales, and the tensor scale after them, as one vector in float64."""
    scales = [q.scales] if q.tensor_scale is None else [q.scales, q.tensor_scale]
    return torch.cat([scale.cpu().double().flatten() for scale in scales])


# --- products -------------------------------------------------------------------------------------

FORMATS = {
    "mxfp4": get_quantizer("mxfp4-ceil"),
    "nvfp4": get_quantizer("nvfp4"),
    "e8m0, blocks of 16": Quantizer(block=(1, 16), rule="ceil"),
    "fp4 rows": get_quantizer("vector"),
    "fp8 rows": Quantizer(element="e4m3", scale="fp32", block=(1, 0), rule="absmax"),
}


@dataclass(frozen=True)
class Output:
    """Where a product goes: its dtype, whether it is added there, and a factor."""

    dtype: torch.dtype
    adds: bool = False
    correction: float = 1.0


OUTPUTS = {
    "bf16": Output(torch.bfloat16),
    "fp32, times 16/9": Output(torch.float32, correction=16 / 9),
    "added to fp32": Output(torch.float32, adds=True),
}


def asked(form: str, output: Output, shape: tuple[int, int, int]) -> Product:
    """The description of a product by which a multiplier says whether it takes it.

    form: the format of both operands, a key of FORMATS. shape: M, N and K.
    """
    quantizer, model = FORMATS[form], torch.bfloat16
    return Product(quantizer, quantizer, shape, model, output.dtype, output.adds, output.correction)


def operands(
    form: str, shape: tuple[int, int, int], device: torch.device
) -> tuple[QuantizedTensor, QuantizedTensor]:
    """Random operands [M, K] and [N, K] in the format `form`."""
    m, n, k = shape
    a, b = (
        quantize_matrix(matrix(rows, k).to(device), FORMATS[form], axis=1) for rows in (m, n + 1)
    )
    # One row is dropped, so that the operands differ where M = N.
    scales = b.scales if len(b.scales) == 1 else b.scales[:n]
    return a, QuantizedTensor(
        b.codes[:n].contiguous(), scales.contiguous(), b.tensor_scale, b.quantizer,
        torch.Size((n, k)), 1,
    )  # fmt: skip


def decoded(multiplier: Multiplier, a: QuantizedTensor, b: QuantizedTensor) -> list[Form]:
    """a [M, K] and b [N, K] in the form that `multiplier` reads: codes, FP8 elements or decoded
    values, by the multiplier."""
    return multiplier.decode([Made(a), Made(b)], ["x", "w"], torch.bfloat16)


def check_product(
    multiplier: Multiplier,
    form: str,
    output: Output,
    shapes: Sequence[tuple[int, int, int]],
    device: torch.device,
) -> Row:
    """The largest relative error of a multiplier's products over `shapes`, against float64.

    The row has the reason of each shape that the multiplier refuses.
    """
    target, allowed = target_of(device), bound(output.dtype, FORMATS[form])
    refused: dict[str, str] = {}
    errors: dict[str, float | str] = {}
    for shape in shapes:
        size = " x ".join(map(str, shape))
        if (reason := multiplier.refuses(asked(form, output, shape), target)) is not None:
            refused[size] = reason
            continue
        error = error_of(multiplier, form, output, shape, device)
        errors[size] = error if error < torch.inf else "not finite"  # JSON has no NaN
    row: Row = {"refused": refused} if refused else {}
    if errors:
        finite = [error for error in errors.values() if isinstance(error, float)]
        largest = max(finite) if len(finite) == len(errors) else None
        right = largest is not None and largest < allowed
        row |= {"errors": errors, "largest error": largest, "bound": allowed, "right": right}
    return row


def error_of(
    multiplier: Multiplier,
    form: str,
    output: Output,
    shape: tuple[int, int, int],
    device: torch.device,
) -> float:
    """The relative Frobenius error of one product against float64 of the decoded operands."""
    a, b = operands(form, shape, device)
    expected = a.dequantize(torch.float64) @ b.dequantize(torch.float64).t()
    expected *= output.correction
    into = torch.ones(shape[:2], device=device) if output.adds else None
    before = 1.0 if output.adds else 0.0
    first, second = decoded(multiplier, a, b)
    found = multiplier.multiply(first, second, output.correction, output.dtype, into).double()
    return float((found - before - expected).norm() / expected.norm())
