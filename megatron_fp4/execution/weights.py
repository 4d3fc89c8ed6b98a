"""W's operands, which are made once a step and used by all its microbatches."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from torch import Tensor

from megatron_fp4.operands import Form, Made


@dataclass
class HeldWeight:
    """W's operands of one step, by the GEMM that multiplies them, "fprop" or "dgrad".

    made: the operands.
    folds: the row scales by which dY is multiplied before it is quantized for it; None: none.
    forms: the operands in the form that the multiplier reads, where the plan holds that
        (`GemmPlan.holds_form`).
    """

    made: dict[str, Made] = field(default_factory=dict)
    folds: dict[str, Tensor | None] = field(default_factory=dict)
    forms: dict[str, Form] = field(default_factory=dict)


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
