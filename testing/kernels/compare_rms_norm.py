"""Compares the RMSNorm that kernels compute, and its gradients, with PyTorch's, on a GPU or in
Triton's interpreter: as a matrix of its own, and quantized as it is computed.

    TRITON_INTERPRET=1 python -m testing.kernels.compare_rms_norm [gradients quantized]

Prints a line for each case that differs. With words: only the cases whose name contains them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_fp4.arithmetic import rms_norm as reference
from megatron_fp4.arithmetic.philox import Key, Noise
from megatron_fp4.arithmetic.quantized_tensor import QuantizedTensor
from megatron_fp4.arithmetic.quantizer import Quantizer
from megatron_fp4.arithmetic.rms_norm import RmsNorm
from megatron_fp4.kernels import rms_norm
from megatron_fp4.kernels.quantize import Copy, quantize
from megatron_fp4.makers.mxfp4 import Mxfp4Kernel
from megatron_fp4.operands import Normed
from testing.builders.operand_plans import made_in_pytorch, plan

EPS = 1e-5
U32, U16 = 2.0**-24, 2.0**-8  # the largest relative errors of a rounding to float32 and to BF16


@dataclass(frozen=True)
class Case:
    """kind: "norm", "gradients" or "quantized". zero_centered: the gains are 1 + weight. axes,
    quantizer: of "quantized". has_residual: of "gradients". eps: without it no row is all zeros."""

    kind: str
    rows: int = 96
    columns: int = 256
    zero_centered: bool = False
    has_residual: bool = False
    quantizer: Quantizer | None = None
    axes: tuple[int, ...] = ()
    element: torch.dtype | None = None
    eps: float = EPS

    def __str__(self) -> str:
        words = [self.kind, f"{self.rows} x {self.columns}"]
        words += ["zero-centered"] * self.zero_centered + ["residual"] * self.has_residual
        words += ["eps 0"] * (self.eps == 0)
        if self.quantizer is not None:
            words += [self.quantizer.rule, self.quantizer.rounding, f"axes {self.axes}"]
        return " ".join([*words, "" if self.element is None else str(self.element)]).strip()

    def tensors(self) -> list[Tensor]:
        """x, the weight, the gradient of the norm and another of x: BF16, of rows of all sizes."""
        generator = torch.Generator().manual_seed(7)
        shape = self.rows, self.columns
        x = torch.randn(shape, generator=generator)
        x *= torch.exp(4 * torch.randn(self.rows, 1, generator=generator))
        if self.eps:
            x[:1], x[1:2, ::2], x[2:3] = 0, -0.0, x[2:3] * 1e-30
        weight = torch.randn(self.columns, generator=generator)
        dy, other = (torch.randn(shape, generator=generator) for _ in range(2))
        return [each.bfloat16() for each in (x, weight, dy, other)]


def cases() -> Iterator[Case]:
    for zero_centered in (False, True):
        yield Case("norm", zero_centered=zero_centered)
        yield Case("gradients", zero_centered=zero_centered)
    yield Case("norm", rows=3, columns=2050)
    yield Case("gradients", rows=70, columns=130, has_residual=True)
    yield Case("gradients", rows=1, columns=64, has_residual=True)
    yield Case("gradients", rows=33, columns=64, eps=0.0)
    nearest, noisy = (
        Quantizer(rule="ceil", rounding=rounding)  # type: ignore[arg-type]
        for rounding in ("nearest", "stochastic")
    )
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    yield Case("quantized", quantizer=nearest, axes=(1,))
    yield Case("quantized", quantizer=nearest, axes=(1, 0), element=e4m3, zero_centered=True)
    yield Case("quantized", quantizer=noisy, axes=(1, 0), element=e5m2, rows=64, columns=160)
    yield Case("quantized", quantizer=replace(noisy, block=(1, 16)), axes=(0,), rows=64, columns=96)


def differences(device: str, of: Sequence[Case] | None = None) -> list[str]:
    check = {"norm": _norm, "gradients": _gradients, "quantized": _quantized}
    return [f"{case}: {line}" for case in of or cases() for line in check[case.kind](case, device)]


def _norm(case: Case, device: str) -> Iterator[str]:
    """The factors to some units in the last place, the matrix from these factors to the bit."""
    x, weight, *_ = (each.to(device) for each in case.tensors())
    norm = RmsNorm(weight, case.eps, case.zero_centered)
    factors, exact = (
        rms_norm.factors(x, case.eps).cpu(),
        reference.factors(x.double().cpu(), case.eps),
    )
    if not torch.all((factors.double() - exact).abs() <= 8 * U32 * exact):
        yield "factors differ"
    cpu = RmsNorm(weight.cpu(), case.eps, case.zero_centered)
    if not torch.equal(rms_norm.normed(x, norm).cpu(), _matrix(x.cpu(), factors, cpu)):
        yield "the matrix differs"


def _matrix(x: Tensor, factors: Tensor, norm: RmsNorm) -> Tensor:
    return reference.normed(x, factors, norm.gain)


def _gradients(case: Case, device: str) -> Iterator[str]:
    """To the roundings of a result, and of the sums of which it is made."""
    tensors = case.tensors()
    x, weight, dy, other = (each.to(device) for each in tensors)
    norm = RmsNorm(weight, case.eps, case.zero_centered)
    residual = other if case.has_residual else None
    found = [each.cpu().double() for each in rms_norm.gradients(dy, x, norm, residual)]
    x, weight, dy, other = (each.double() for each in tensors)
    wide = RmsNorm(weight, case.eps, case.zero_centered)
    exact = reference.gradients(dy, x, wide, other if case.has_residual else None)
    # The magnitudes of what is summed; a sum of n numbers is off by some n units at most.
    r = reference.factors(x, case.eps)
    terms = r * (dy * wide.gain).abs() + (x * r).abs() * r * ((dy * wide.gain) * x * r).abs().mean(
        -1, keepdim=True
    )
    bounds = (case.columns * U32 * terms, case.rows * U32 * (dy * x * r).abs().sum(0))
    names = ("dx", "the weight's gradient")
    for name, one, value, bound in zip(names, found, exact, bounds, strict=True):
        if not torch.all((one - value).abs() <= bound + U16 * (value.abs() + bound)):
            yield f"{name} differs"


def _quantized(case: Case, device: str) -> Iterator[str]:
    """Codes and scales to the bit, from the kernel's own factors."""
    x, weight, *_ = case.tensors()
    norm, on_device = (
        RmsNorm(each, case.eps, case.zero_centered) for each in (weight, weight.to(device))
    )
    factors = rms_norm.factors(x.to(device), case.eps)
    dense = _matrix(x, factors.cpu(), norm)
    assert case.quantizer is not None
    noise = Noise(Key(2**63 + 11, 5), 77) if case.quantizer.stochastic else None
    copies = [Copy(axis, noise, None, case.element) for axis in case.axes]
    made = quantize(Normed(x.to(device), on_device), case.quantizer, copies)
    for axis, each in zip(case.axes, made, strict=True):
        operand = plan(dense, case.quantizer, axis)
        assert Mxfp4Kernel().computes_source(replace(operand, letter="x", source="normed"))
        expected, found = made_in_pytorch(dense, case.quantizer, axis, noise=noise), each.operand
        assert isinstance(found, QuantizedTensor) and found.shape == expected.shape
        for part in ("codes", "scales"):
            if not torch.equal(getattr(found, part).cpu(), getattr(expected, part)):
                yield f"{part} along axis {axis} differ"


if __name__ == "__main__":
    words = " ".join(sys.argv[1:])
    print("\n".join(differences("cpu", [case for case in cases() if words in f"{case}"])))
