"""W's operands, which are made once a step and used by all its microbatches."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from megatron_fp4.arithmetic.quantized_tensor import QuantizedTensor
from megatron_fp4.execution.tensor_lists import TensorList, take_apart
from megatron_fp4.operands import Carriers, Decoded, Form, Made

GEMMS_OF_W = "fprop", "dgrad"  # those that multiply W


@dataclass
class HeldWeight:
    """W's operands of one step, by the GEMM that multiplies them, "fprop" or "dgrad".

    made: the operands.
    folds: the row scales by which dY is multiplied before it is quantized for it; None: none.
    forms: the operands in the form that the multiplier reads, where the plan holds that
        (`GemmPlan.holds_form`).
    in_cpp: the same operands as tensors, for the passes that run in C++ (cpp/executor.py): those
        that they read, and those that they made; None before the first. rebuilds: what adds the
        latter here (see `rebuild`), by GEMM, for each kind of call that may have made them.
    """

    made: dict[str, Made] = field(default_factory=dict)
    folds: dict[str, Tensor | None] = field(default_factory=dict)
    forms: dict[str, Form] = field(default_factory=dict)
    in_cpp: Any = None
    rebuilds: list[dict[str, Callable[[HeldWeight, Sequence[Tensor]], None]]] = field(
        default_factory=list
    )

    def has(self, gemm: str) -> bool:
        """Whether the operand of a GEMM has been made, in Python or in C++."""
        made = gemm in self.made
        return made or (self.in_cpp is not None and getattr(self.in_cpp, gemm) is not None)

    def to_cpp(self) -> None:
        """Adds to `in_cpp` what Python has made."""
        for gemm in self.made:
            if getattr(self.in_cpp, gemm) is None:
                setattr(self.in_cpp, gemm, self.tensors(gemm))

    def to_python(self) -> None:
        """Adds to `made`, `folds` and `forms` what programs have made."""
        for gemm in GEMMS_OF_W:
            tensors = None if self.in_cpp is None else getattr(self.in_cpp, gemm)
            if tensors is not None and gemm not in self.made:
                next(kind[gemm] for kind in self.rebuilds if gemm in kind)(self, tensors)

    def tensors(self, gemm: str) -> list[Tensor]:
        """All tensors of the operand of a GEMM, which has been made."""
        found, _ = take_apart(self.made[gemm].operand)
        found = [*found, self.folds.get(gemm), *_tensors_of(self.forms.get(gemm))]
        return [each for each in found if each is not None]

    def rebuild(self, gemm: str) -> Callable[[HeldWeight, Sequence[Tensor]], None]:
        """A function that adds the operand of a GEMM to another HeldWeight, from its `tensors`.

        It references no tensor of this one.
        """
        operand, build = take_apart(self.made[gemm].operand)
        form = self.forms.get(gemm)
        there = [each is not None for each in [*operand, self.folds.get(gemm), *_tensors_of(form)]]
        built = None if form is None else _form(form)
        return partial(_rebuilt, gemm, len(operand), there, build, built, gemm in self.folds)


def _rebuilt(
    gemm: str,
    size: int,
    there: list[bool],
    build: Callable[..., Any],
    form: Callable[..., Form] | None,
    folds: bool,
    held: HeldWeight,
    tensors: Sequence[Tensor],
) -> None:
    """Adds an operand to `held`; see `HeldWeight.rebuild`."""
    rest = iter(tensors)
    found = [next(rest) if each else None for each in there]
    held.made[gemm] = Made(build(*found[:size]))
    if folds:
        held.folds[gemm] = found[size]
    if form is not None:
        held.forms[gemm] = form(*found[size + 1 :])


def _tensors_of(form: Form | None) -> TensorList:
    match form:
        case None:
            return []
        case Carriers():
            return [form.values, form.counts]
        case Decoded():
            return [form.values, form.row_factors, form.tally]
        case QuantizedTensor():
            return take_apart(form)[0]


def _form(form: Form) -> Callable[..., Form]:
    """A function that builds an operand in the form of `form` from the tensors of one, in the order
    of `_tensors_of`. It keeps no tensor of `form` alive."""
    if isinstance(form, Carriers):
        return partial(_carriers, form.element)
    return Decoded if isinstance(form, Decoded) else take_apart(form)[1]


def _carriers(element: Any, values: Tensor, counts: Tensor) -> Carriers:
    """Carriers that are multiplied, and not made or corrected: these need no codes."""
    return Carriers(values, element, counts, (0, 0, values.data_ptr(), counts.data_ptr()))


class WeightCache:
    """Holds W's operands until W changes."""

    def __init__(self) -> None:
        self._stamp: Hashable = None
        self._held = HeldWeight()

    def at(self, stamp: Hashable) -> HeldWeight:
        """The operands that were made from W under `stamp`; the caller may add to them.

        stamp: identifies the value of W; a changed W needs another stamp. Operands of the previous
        stamp are dropped.
        """
        if stamp != self._stamp:
            self._stamp, self._held = stamp, HeldWeight()
        return self._held
