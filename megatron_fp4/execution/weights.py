"""What is made of a weight once a step, for all microbatches of it."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from torch import Tensor

from megatron_fp4.operands import Form, Made


@dataclass
class HeldWeight:
    """W's operands of one step, by the GEMM ("fprop", "dgrad") that multiplies them.

    made: the operands. folds: the row scales that dY is multiplied by with them. forms: the
    operands in the form in which they are multiplied, where the plan keeps that.
    """

    made: dict[str, Made] = field(default_factory=dict)
    folds: dict[str, Tensor | None] = field(default_factory=dict)
    forms: dict[str, Form] = field(default_factory=dict)


class WeightCache:
    """Holds W's operands as long as W is what it was when they were made."""

    def __init__(self) -> None:
        self._stamp: Hashable = None
        self._held = HeldWeight()

    def at(self, stamp: Hashable) -> HeldWeight:
        """What was made of W under this stamp, to be added to; what was made under another is
        forgotten."""
        if stamp != self._stamp:
            self._stamp, self._held = stamp, HeldWeight()
        return self._held
