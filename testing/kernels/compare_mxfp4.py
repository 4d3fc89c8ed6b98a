"""Compares the MXFP4 quantize kernels and their carriers with the reference, on a GPU or in
Triton's interpreter.

    TRITON_INTERPRET=1 python -m testing.kernels.compare_mxfp4 [floor nearest]

Prints a line for each case that differs. With words: only the cases whose name contains them; a dot
is added to the name, so that "nearest." matches at its end. The cases combine scale rules,
roundings, prescales and axes, with matrices that contain difficult values. Most matrices do not
fill a program's tile, and random bits are those of a shard.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron_fp4.arithmetic.hadamard import FIXED_SIGNS, FixedSigns
from megatron_fp4.arithmetic.philox import Key, Noise, Placement, Signs
from megatron_fp4.arithmetic.quantize import quantize_matrix
from megatron_fp4.arithmetic.quantized_tensor import QuantizedTensor
from megatron_fp4.arithmetic.quantizer import Quantizer
from megatron_fp4.kernels import carrier
from megatron_fp4.kernels.fp8 import FORMATS
from megatron_fp4.kernels.quantize import Copy, quantize
from megatron_fp4.makers.mxfp4 import Mxfp4Kernel
from megatron_fp4.operands import Made
from testing.builders.operand_plans import made_in_pytorch, plan

SEED, STEP, DRAW = 2**63 + 11, 2**32 + 5, 2**33 + 3


@dataclass(frozen=True)
class Case:
    quantizer: Quantizer
    axes: tuple[int, ...]
    group: int = 0
    signed: bool = False
    fixed: bool = False  # whether the signs are fixed
    packed: bool = False
    is_shard: bool = False
    carrier: torch.dtype | None = None
    filled: str = ""  # with what, if not with `matrix`
    in_memory: bool = False  # where step and draw lie; its rows are those of some replica
    unsigned: int | None = None  # the axis of a copy without signs beside one with signs
    one_draw: bool = False  # whether both copies have one stream

    def __str__(self) -> str:
        q = self.quantizer
        words = [q.rule, q.rounding, str(q.prescale), f"axes {self.axes}"]
        words += ["block 16"] * (q.block[1] == 16)
        words += [f"group {self.group}"] if self.group else []
        words += ["shard"] * self.is_shard + ["signs"] * self.signed + ["packed"] * self.packed
        words += [] if self.carrier is None else [str(self.carrier)]
        words += [self.filled] if self.carrier is not None or self.filled else []
        words += ["fixed signs"] * self.fixed
        words += ["in memory"] * self.in_memory + ["one draw"] * self.one_draw
        words += [] if self.unsigned is None else [f"no signs along {self.unsigned}"]
        return " ".join(words)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the matrix: multiples of blocks and groups along the contracted axes.

        Where it is possible they are no multiples of a program's tile.
        """
        if self.group <= 32:
            return (160, 96) if self.quantizer.block[1] == 32 else (144, 112)
        sides = [self.group * 2 if axis in self.axes else 72 for axis in (0, 1)]
        return sides[0], sides[1]

    def placement(self, device: str) -> Placement:
        if not self.is_shard:
            return Placement(first_row=2**33 + 5 if self.in_memory else 0)
        rows, columns = self.shape
        return Placement(
            rows=torch.arange(rows, device=device) * 3 + 2**31 - 200,  # groups' index passes 2^32
            groups=torch.arange(columns // 8, device=device) + 40,
            groups_per_row=80,
        )

    def copy(self, axis: int, device: str) -> Copy:
        """The Copy that the kernel is to write along `axis`, with its random bits on `device`."""
        stream = 0xFFFFFFF0 + (0 if self.one_draw else axis)
        step: int | Tensor = STEP
        draw: int | Tensor = DRAW
        if self.in_memory:
            step, draw = torch.tensor(STEP, device=device), torch.tensor(DRAW, device=device)
        key = Key(SEED, step)
        noise = Noise(key, stream, self.placement(device)) if self.quantizer.stochastic else None
        signs: Signs | FixedSigns | None = FIXED_SIGNS if self.fixed else None
        if self.signed and axis != self.unsigned:
            signs = Signs(key, stream, draw)
        return Copy(axis, noise, signs, self.carrier)


def cases() -> Iterator[Case]:
    kinds = [("nearest", 1.0), ("stochastic", 1.0), ("stochastic", 0.75)]
    for rule, (rounding, prescale) in itertools.product(("floor", "ceil"), kinds):
        quantizer = Quantizer(rule=rule, rounding=rounding, prescale=prescale)  # type: ignore
        for axes in ((0,), (1,), (1, 0)):
            for is_shard in (True, False):
                if is_shard or rounding == "stochastic" or len(axes) == 2:
                    yield Case(quantizer, axes, is_shard=is_shard)
    for rounding in ("nearest", "stochastic"):
        for axes in ((0,), (1, 0)):
            yield Case(Quantizer(rule="ceil", rounding=rounding), axes, packed=True)  # type: ignore
    noisy = Quantizer(rounding="stochastic", prescale=0.75)
    for group, signed in itertools.product((32, 64, 128), (False, True)):
        yield Case(Quantizer(), (1, 0), group, signed)
        for axes in ((0,), (1,), (1, 0)):
            yield Case(noisy, axes, group, signed, is_shard=signed)
        yield Case(noisy if signed else Quantizer(), (1, 0), group, fixed=True, is_shard=signed)
    for axis in (0, 1):
        yield Case(Quantizer(), (1, 0), 64, signed=True, unsigned=axis)
    for rule in ("floor", "ceil"):
        for axes in ((0,), (1,), (1, 0)):
            yield Case(Quantizer(rule=rule, rounding="ema"), axes)  # type: ignore[arg-type]
    for axes in ((0,), (1,), (1, 0)):
        yield Case(Quantizer(rule="mse"), axes)
        yield Case(Quantizer(rule="mse", block=(1, 16)), axes)
        yield Case(Quantizer(rule="mse", block=(1, 16)), axes, filled=BESIDE_HUGE)
    yield Case(Quantizer(rule="mse"), (1, 0), packed=True)
    yield Case(Quantizer(rule="mse"), (1, 0), 64, fixed=True)
    for rounding in ("nearest", "stochastic", "ema"):
        for axes in ((0,), (1,), (1, 0)):
            yield Case(Quantizer(rule="nearest", rounding=rounding), axes)  # type: ignore[arg-type]
        yield Case(Quantizer(rule="nearest", rounding=rounding, block=(1, 16)), (1, 0))  # type: ignore[arg-type]
    yield Case(Quantizer(rule="nearest", rounding="stochastic"), (1, 0), packed=True)
    yield Case(Quantizer(rule="nearest"), (1, 0), 64, fixed=True)
    short: dict[str, Any] = {"rule": "ceil", "block": (1, 16)}
    for rounding in ("nearest", "stochastic", "ema"):
        for axes in ((0,), (1,), (1, 0)):
            yield Case(Quantizer(rounding=rounding, **short), axes)  # type: ignore[arg-type]
    yield Case(Quantizer(rounding="stochastic", **short), (1, 0), packed=True)
    for axes in ((0,), (1,)):
        yield Case(Quantizer(rounding="stochastic", **short), axes, 64, signed=True)
    one: dict[str, Any] = {"axes": (1, 0), "one_draw": True}
    yield Case(Quantizer(rule="ceil", rounding="stochastic"), **one)
    yield Case(Quantizer(rounding="stochastic", **short), **one)
    yield Case(Quantizer(rule="ceil", rounding="stochastic"), **one, packed=True)
    yield Case(noisy, **one, is_shard=True)
    yield Case(noisy, **one, in_memory=True)
    yield Case(noisy, **one, group=64, signed=True)
    yield Case(noisy, (1, 0), in_memory=True)
    yield Case(noisy, (1, 0), 64, signed=True, in_memory=True)


def carried() -> Iterator[Case]:
    """Cases in which carriers are asked for too."""
    for case in cases():
        plain = (
            not (case.group or case.filled)
            and case.quantizer.prescale == 1.0
            and case.quantizer.rule != "floor"
        )
        if plain and not case.is_shard:
            yield from (replace(case, carrier=element) for element in FORMATS)
            if len(case.axes) == 2 and not case.packed and case.quantizer.rounding == "nearest":
                for filled in FILLED:
                    yield replace(case, carrier=torch.float8_e4m3fn, filled=filled)
        if case.group == 64 and not case.signed:  # the kernel with a transform writes none
            yield replace(case, carrier=torch.float8_e5m2)


# Values that the guess of the row exponent, made from a sample, cannot know or must ignore.
BESIDE_HUGE = "Inf in every other column, beside huge"
FILLED = ("NaN", "NaN in rows", "Inf in columns", "zeros in rows", "subnormal rows", "huge")


def filled(shape: tuple[int, int], what: str) -> Tensor:
    """A matrix of normal numbers that has the values `what` of FILLED, in some places or in all."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(6))
    if what == "NaN in rows":
        x[8:16] = torch.nan
    elif what == "Inf in columns":
        x[:, 32:64] = torch.inf
    elif what == BESIDE_HUGE:  # a block's exponent shares a word with that of the next column
        x *= 2.0**126
        x[3::16, ::2] = torch.inf
    elif what == "zeros in rows":
        x[32:64] = -0.0
    elif what == "subnormal rows":
        x[32:64] *= 2e-39
    else:
        x *= {"NaN": torch.nan, "huge": 1e38}[what]
    return x.bfloat16()


def matrix(shape: tuple[int, int], group: int) -> Tensor:
    """BF16 values of all sizes, with ties, zeros of both signs, subnormal numbers, NaN and Inf.

    Without a transform (group 0) it has BF16's largest numbers too. With one their sums would
    depend on the order.
    """
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(shape, generator=generator)
    x *= torch.exp(2 * torch.randn(shape, generator=generator))
    x[0, :32], x[1], x[2] = 0, -0.0, 0.0
    x[3] *= 1e-39
    x[4:8] = torch.randint(-24, 25, (4, shape[1]), generator=generator) / 4
    x[20, 5], x[33, 70], x[34, 71] = torch.nan, torch.inf, -torch.inf
    if not group:
        x[40, :8] = torch.finfo(torch.bfloat16).max
        x[41, 8:16] = torch.finfo(torch.bfloat16).tiny
    return x.bfloat16()


def average(x: Tensor) -> Tensor:
    """An average for rounding `ema` of x: float32, of the shape of x, with difficult values.

    Elements are near to x or not, have the other sign, are midway between codes, are above or below
    all numbers of the grid, or are NaN or Inf.
    """
    generator = torch.Generator().manual_seed(7)
    found = x.float() * (1 + 0.3 * torch.randn(x.shape, generator=generator))
    found = torch.where(torch.rand(x.shape, generator=generator) < 0.1, -found, found)
    found[1, ::2], found[2, ::2], found[3, ::2] = 1.0, -1.0, 30.0  # where x is zero or subnormal
    found[4:8] = torch.randint(-24, 25, (4, x.shape[1]), generator=generator) / 4
    found[60, ::3], found[61, ::3] = 3e38, 1e-45
    found[50, 3], found[70, 40], found[90, 80] = torch.nan, torch.inf, -torch.inf
    return found


def difference(case: Case, device: str) -> str | None:
    """A line with the numbers of codes, scales and carriers that differ; None if none does.

    The kernel runs on `device`, and the reference, with which it is compared, on the CPU.
    """
    dense = filled(case.shape, case.filled) if case.filled else matrix(case.shape, case.group)
    x: Tensor | QuantizedTensor = dense
    on_device: Tensor | QuantizedTensor = dense.to(device)
    if case.packed:
        x = quantize_matrix(dense, Quantizer(rule="ceil", block=case.quantizer.block), axis=1)
        on_device = replace(x, codes=x.codes.to(device), scales=x.scales.to(device))
    for axis in case.axes:
        assert Mxfp4Kernel().refuses(plan(x, case.quantizer, axis, group=case.group)) is None
    wanted = [case.copy(axis, device) for axis in case.axes]
    beside = average(dense) if case.quantizer.rounding == "ema" else None
    given = None if beside is None else beside.to(device)
    found = quantize(on_device, case.quantizer, wanted, case.group, given)
    codes = scales = carriers = 0
    for axis, kernels in zip(case.axes, found, strict=True):
        copy = case.copy(axis, "cpu")
        made = made_in_pytorch(
            x, case.quantizer, axis, case.group, signs=copy.signs, noise=copy.noise, average=beside
        )
        operand = kernels.operand
        assert isinstance(operand, QuantizedTensor)
        assert (operand.shape, operand.axis) == (made.shape, made.axis)
        codes += _differing(operand.codes.cpu(), made.codes)
        scales += int((operand.scales.cpu() != made.scales).sum())
        if kernels.carriers is not None:
            carriers += _wrong_carriers(kernels)
            if case.filled in (
                "zeros in rows",
                "Inf in columns",
            ):  # the guessed row exponent fits these rows
                [form] = carrier.carried([(operand, kernels.carriers.element, kernels.carriers)])
                carriers += len(form.row_factors[~(operand.scales == 255).any(1)].unique()) > 1
    # Codes after a transform may differ in 1e-4 of the elements: the order of its sums.
    allowed = len(case.axes) * x.shape.numel() * 1e-4 if case.group else 0
    if codes + scales <= allowed and not carriers:
        return None
    return f"{case}: {codes} codes, {scales} scales, {carriers} carriers"


def _wrong_carriers(made: Made) -> int:
    """The number of carriers' elements that are wrong, plus 1 if the counts are.

    Where a row has the row exponent of docs/numerics.md, Carriers, its elements are rounded to FP8.
    Where it has another one, its elements must be exact.
    """
    q, carriers = made.operand, made.carriers
    assert isinstance(q, QuantizedTensor) and carriers is not None
    [form] = carrier.carried([(q, carriers.element, carriers)])
    elements, factor, counts = (t.cpu() for t in (form.elements, form.row_factors, form.tally))
    plain = replace(
        q, codes=q.codes.cpu(), scales=q.scales.cpu(), axis=1,
        shape=torch.Size((len(q.codes), q.shape[q.axis])),
    )  # fmt: skip
    value, scale, factor = plain.dequantize(torch.float64), plain.scales.int(), factor.double()
    *_, bottom, top = FORMATS[carriers.element]
    largest = torch.where(scale == 255, 0, scale).amax(1, keepdim=True)
    rule = (largest - top).clamp(min=1) - 127
    below = (scale - 127 - rule < bottom).repeat_interleave(q.quantizer.block[1], 1)
    count = int((below & (value != 0) & ~value.isnan()).sum())
    wanted = torch.where(
        factor == torch.exp2(rule.double()),
        (value / factor).to(carriers.element).double(),
        value / factor,
    )
    found = elements.double()
    same = (found == wanted) & (found.signbit() == wanted.signbit()) | found.isnan() & value.isnan()
    return int((~same).sum()) + (counts.tolist() != [count, int((scale == 255).sum())])


def _differing(a: Tensor, b: Tensor) -> int:
    return int(((a ^ b) & 15 != 0).sum() + ((a ^ b) >> 4 != 0).sum())


def differences(device: str, of: Sequence[Case] | None = None) -> list[str]:
    found = (difference(case, device) for case in of or [*cases(), *carried()])
    return [line for line in found if line is not None]


if __name__ == "__main__":
    words = " ".join(sys.argv[1:])
    print(
        "\n".join(
            differences("cpu", [case for case in (*cases(), *carried()) if words in f"{case}."])
        )
    )
