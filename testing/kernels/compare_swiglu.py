"""Compares the SwiGLU that kernels compute, and its gradient, with PyTorch's, on a GPU or in
Triton's interpreter: as a matrix of its own, and quantized as it is computed.

    TRITON_INTERPRET=1 python -m testing.kernels.compare_swiglu [gradient stochastic]

Prints a line for each case that differs. With words: only the cases whose name contains them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_fp4.arithmetic.philox import Key, Noise
from megatron_fp4.arithmetic.quantized_tensor import QuantizedTensor
from megatron_fp4.arithmetic.quantizer import Quantizer
from megatron_fp4.kernels import carrier, swiglu
from megatron_fp4.kernels.quantize import Copy, quantize
from megatron_fp4.makers.mxfp4 import Mxfp4Kernel
from megatron_fp4.operands import Swiglu, SwigluGradient
from testing.builders.operand_plans import made_in_pytorch, plan

# The shares of elements of a computed matrix, and of codes, that may differ from PyTorch's. Kernels
# compute with the GPU's approximations of 2^x and 1/x, to some 2^-21, so that a number whose value
# lies that near to the middle of two BF16 numbers may be rounded to the other one. There are 2^9
# halves of BF16 steps to one binade: some 2^-11 of numbers are so near, and in most of them both
# round alike.
MAY_DIFFER = 2e-4
E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Case:
    """is_gradient: of a SwiGLU, and not the SwiGLU. quantizer: None compares the matrix itself.
    kept: the dtype of y that the gradient is computed from."""

    is_gradient: bool
    quantizer: Quantizer | None
    axes: tuple[int, ...] = ()
    rows: int = 96
    columns: int = 256  # of a half
    element: torch.dtype | None = None
    kept: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        words = ["gradient" if self.is_gradient else "result", f"{self.rows} x {self.columns}"]
        if self.quantizer is not None:
            words += [self.quantizer.rule, self.quantizer.rounding, f"axes {self.axes}"]
        words += [str(self.element)] * (self.element is not None)
        return " ".join([*words, *["y in E4M3"] * (self.kept == E4M3)])

    def matrix(self) -> Swiglu | SwigluGradient:
        """BF16 numbers of all sizes, with zeros, NaN, Inf, and gates with a huge exponential. y in
        E4M3 has all codes too."""
        generator = torch.Generator().manual_seed(7)
        y = torch.randn(self.rows, 2 * self.columns, generator=generator)
        y *= torch.exp(torch.randn(y.shape, generator=generator))
        y[0], y[1, :64], y[2, :32], y[3, 64:128] = 0, -0.0, 1e-39, 300
        y[4, :32], y[5, self.columns :], y[6, 40], y[7, 70] = -300, -80, torch.nan, torch.inf
        gradient = torch.randn(self.rows, self.columns, generator=generator)
        gradient[8], gradient[9, 33] = 0, torch.nan
        if not self.is_gradient:
            return Swiglu(y.bfloat16())
        kept = y.bfloat16().to(self.kept)
        if self.kept == E4M3:
            codes = torch.arange(self.columns).to(torch.uint8)
            kept[10] = torch.cat([codes, codes]).view(E4M3)
            kept[11] = torch.cat([codes, codes.flip(0)]).view(E4M3)
        return SwigluGradient(gradient.bfloat16(), kept)


def cases() -> Iterator[Case]:
    for is_gradient, kept in ((False, torch.bfloat16), (True, torch.bfloat16), (True, E4M3)):
        yield from _cases(is_gradient, kept)


def _cases(is_gradient: bool, kept: torch.dtype) -> Iterator[Case]:
    nearest, noisy = (
        Quantizer(rule="ceil", rounding=rounding)  # type: ignore[arg-type]
        for rounding in ("nearest", "stochastic")
    )
    for case in (
        Case(is_gradient, None),
        Case(is_gradient, None, rows=14, columns=2058),
        Case(is_gradient, nearest, (1,)),
        Case(is_gradient, nearest, (1, 0), rows=32, columns=128, element=E4M3),
        Case(is_gradient, noisy, (1, 0), element=torch.float8_e5m2),
        Case(is_gradient, replace(noisy, block=(1, 16)), (0,), rows=32, columns=128),
    ):
        yield replace(case, kept=kept)


def difference(case: Case, device: str) -> str | None:
    """A line that says how many elements or codes differ; None if no more than may."""
    matrix, on_device = case.matrix(), _moved(case.matrix(), device)
    dense = matrix.computed()
    if case.quantizer is None:
        found = (
            swiglu.swiglu(on_device.y)
            if isinstance(on_device, Swiglu)
            else swiglu.swiglu_gradient(on_device.gradient, on_device.y)
        ).cpu()
        distance, allowed = (found.float() - dense.float()).abs(), _flushed(matrix)
        same = (found == dense) | found.isnan() & dense.isnan() | (distance <= allowed)
        near = same | (distance <= 2**-7 * dense.float().abs())
        return _line(case, int((~same).sum()), int((~near).sum()), dense.numel())
    noise = Noise(Key(2**63 + 11, 5), 77) if case.quantizer.stochastic else None
    copies = [Copy(axis, noise, None, case.element) for axis in case.axes]
    wrong = far = 0
    for axis, made in zip(case.axes, quantize(on_device, case.quantizer, copies), strict=True):
        assert Mxfp4Kernel().computes_source(replace(plan(dense, case.quantizer, axis), letter="x"))
        expected = made_in_pytorch(dense, case.quantizer, axis, noise=noise)
        operand = made.operand
        assert isinstance(operand, QuantizedTensor) and operand.shape == expected.shape
        codes, scales = operand.codes.cpu(), operand.scales.cpu()
        wrong += int((codes != expected.codes).sum())
        far += int((scales != expected.scales).sum())
        if made.carriers is not None:
            far += _differing_carriers(made.carriers.element, operand, made.carriers)
    return _line(case, wrong, far, dense.numel())


def _flushed(matrix: Swiglu | SwigluGradient) -> Tensor:
    """By how much an element moves where the gate's sigmoid is below 2^-126: in kernels it is 0.

    The sigmoid is multiplied by one or two of the gate, of `up` and of the gradient, and so are the
    two terms of a gradient.
    """
    gate, up = (half.float().abs().clamp(min=1).nan_to_num() for half in matrix.y.chunk(2, 1))
    if isinstance(matrix, Swiglu):
        return 2**-126 * gate * up
    return (2**-125 * gate * up * matrix.gradient.float().abs().nan_to_num()).repeat(1, 2)


def _differing_carriers(element: torch.dtype, operand: QuantizedTensor, written: object) -> int:
    """The elements of carriers that differ from those that are converted from the codes."""
    [found] = carrier.carried([(operand, element, written)])  # type: ignore[list-item]
    [expected] = carrier.carried([(operand, element, None)])
    one, two = (form.elements.float() * form.row_factors for form in (found, expected))
    return int((~((one == two) | one.isnan() & two.isnan())).sum())


def _line(case: Case, wrong: int, far: int, elements: int) -> str | None:
    if wrong <= MAY_DIFFER * elements and far <= 0.01 * MAY_DIFFER * elements:
        return None
    return f"{case}: {wrong} differ, {far} by much"


def _moved(matrix: Swiglu | SwigluGradient, device: str) -> Swiglu | SwigluGradient:
    if isinstance(matrix, Swiglu):
        return Swiglu(matrix.y.to(device))
    return SwigluGradient(matrix.gradient.to(device), matrix.y.to(device))


def differences(device: str, of: Sequence[Case] | None = None) -> list[str]:
    found: list[Tensor | str | None] = [difference(case, device) for case in of or cases()]
    return [line for line in found if isinstance(line, str)]


if __name__ == "__main__":
    words = " ".join(sys.argv[1:])
    print("\n".join(differences("cpu", [case for case in cases() if words in f"{case}"])))
