"""What is made of a weight once a step, for all microbatches of it."""

from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor

from megatron_fp4.backends import Operand

# By "<gemm>" the operand and what is to be folded into dY; by "<gemm> decoded" the operand as the
# backend multiplies it.
Kept = dict[str, tuple[Operand, Tensor | None]]


class WeightCache:
    """W's operands, as long as W is what it was when they were made."""

    def __init__(self) -> None:
        self._stamp: Hashable = None
        self._kept: Kept = {}

    def at(self, stamp: Hashable) -> Kept:
        """What was made of W under this stamp, to be added to; what was made under another is
        forgotten."""
        if stamp != self._stamp:
            self._stamp, self._kept = stamp, {}
        return self._kept
