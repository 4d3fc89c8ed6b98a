"""What the quantize kernels are compared with the reference on, on a GPU and in the interpreter.

    TRITON_INTERPRET=1 python -m tests.kernels.cases [floor nearest]    # prints what differs

Every combination of scale rule, rounding, prescale and direction, over matrices that hold
what goes wrong; tiles are not filled, and noise has the places of a shard.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_fp4.backends.base import Preparation
from megatron_fp4.backends.reference import Reference
from megatron_fp4.kernels.quantize import Copy, quantize, takes
from megatron_fp4.philox import Key, Noise, Placement
from megatron_fp4.quantizer import QuantizedTensor, Quantizer, quantize_matrix

ROWS, COLUMNS = 160, 96  # blocks tile both; tiles do not
KEY = Key(2**63 + 11, 2**32 + 5)
SHARD = Placement(
    rows=torch.arange(ROWS) * 3 + 2**31 - 200,  # the groups' index passes 2^32
    groups=torch.arange(COLUMNS // 8) + 40,
    groups_per_row=64,
)


@dataclass(frozen=True)
class Case:
    quantizer: Quantizer
    axes: tuple[int, ...]
    group: int = 0
    signed: bool = False
    packed: bool = False
    placement: Placement = Placement()

    def __str__(self) -> str:
        q = self.quantizer
        words = [q.rule, q.rounding, str(q.prescale), f"axes {self.axes}"]
        words += [f"group {self.group}"] if self.group else []
        return " ".join(
            words
            + ["shard"] * (self.placement is SHARD)
            + ["signs"] * self.signed
            + ["packed"] * self.packed
        )


def cases() -> Iterator[Case]:
    kinds = [("nearest", 1.0), ("stochastic", 1.0), ("stochastic", 0.75)]
    for rule, (rounding, prescale) in itertools.product(("floor", "ceil"), kinds):
        quantizer = Quantizer(rule=rule, rounding=rounding, prescale=prescale)  # type: ignore
        for axes in ((0,), (1,), (1, 0)):
            for placement in (SHARD, Placement()):
                if placement is SHARD or rounding == "stochastic" or len(axes) == 2:
                    yield Case(quantizer, axes, placement=placement)
    for rounding in ("nearest", "stochastic"):
        for axes in ((0,), (1, 0)):
            yield Case(Quantizer(rule="ceil", rounding=rounding), axes, packed=True)  # type: ignore
    for group, signed in itertools.product((32,), (False, True)):
        yield Case(Quantizer(), (1, 0), group, signed)
        noisy = Quantizer(rounding="stochastic", prescale=0.75)
        yield Case(noisy, (0,), group, signed)


def matrix(group: int) -> Tensor:
    """Normal and wide, with ties, zeros of both signs, subnormal numbers, NaN, Inf and the largest
    numbers. A transform's sums of the largest would depend on their order."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(ROWS, COLUMNS, generator=generator)
    x *= torch.exp(2 * torch.randn(ROWS, COLUMNS, generator=generator))
    x[0, :32], x[1], x[2] = 0, -0.0, 0.0
    x[3] *= 1e-39
    x[4:8] = torch.randint(-24, 25, (4, COLUMNS), generator=generator) / 4
    x[20, 5], x[33, 70], x[34, 71] = torch.nan, torch.inf, -torch.inf
    if not group:
        x[40, :8] = torch.finfo(torch.bfloat16).max
        x[41, 8:16] = torch.finfo(torch.bfloat16).tiny
    return x.bfloat16()


def difference(case: Case, device: str) -> str | None:
    """How the kernel's codes and scales differ from the reference's on a CPU; None if not."""
    x: Tensor | QuantizedTensor = matrix(case.group)
    on_device: Tensor | QuantizedTensor = matrix(case.group).to(device)
    if case.packed:
        x = quantize_matrix(matrix(0), Quantizer(rule="ceil"), axis=1)
        on_device = replace(x, codes=x.codes.to(device), scales=x.scales.to(device))
    signs = 1.0 - 2.0 * (torch.arange(case.group) % 3 == 1).float() if case.signed else None
    copies = [_copy(case, axis, signs, "cpu") for axis in case.axes]
    there = [_copy(case, axis, signs, device) for axis in case.axes]
    assert all(takes(x, case.quantizer, axis, case.group) for axis in case.axes)
    found = quantize(on_device, case.quantizer, there, case.group)
    codes = scales = 0
    for copy, kernels in zip(copies, found, strict=True):
        wanted = Preparation(
            "", case.quantizer, copy.axis, group=case.group, signs=copy.signs, noise=copy.noise
        )
        [made] = Reference().prepare(x, wanted)
        assert isinstance(made, QuantizedTensor)
        assert (kernels.shape, kernels.axis) == (made.shape, made.axis)
        codes += _differing(kernels.codes.cpu(), made.codes)
        scales += int((kernels.scales.cpu() != made.scales).sum())
    # Codes after a transform may differ in 1e-4 of the elements: the order of its sums.
    allowed = len(case.axes) * x.shape.numel() * 1e-4 if case.group else 0
    return None if codes + scales <= allowed else f"{case}: {codes} codes, {scales} scales"


def _copy(case: Case, axis: int, signs: Tensor | None, device: str) -> Copy:
    place = case.placement
    if place.rows is not None and place.groups is not None:
        place = replace(place, rows=place.rows.to(device), groups=place.groups.to(device))
    noise = Noise(KEY, 0xFFFFFFF0 + axis, place) if case.quantizer.stochastic else None
    return Copy(axis, noise, None if signs is None else signs.to(device))


def _differing(a: Tensor, b: Tensor) -> int:
    return int(((a ^ b) & 15 != 0).sum() + ((a ^ b) >> 4 != 0).sum())


def differences(device: str, of: Sequence[Case] | None = None) -> list[str]:
    found = (difference(case, device) for case in of or list(cases()))
    return [line for line in found if line is not None]


if __name__ == "__main__":
    words = " ".join(sys.argv[1:])
    print("\n".join(differences("cpu", [case for case in cases() if words in str(case)])))
