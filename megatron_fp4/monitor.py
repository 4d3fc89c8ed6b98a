"""Where numbers first went non-finite, without waiting for the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sighting:
    """The first non-finite operand of a step."""

    step: int
    module: str
    gemm: str
    operand: str

    def __str__(self) -> str:
        return (
            f"step {self.step}: the first NaN or Inf stood in operand {self.operand} of "
            f"{self.gemm} in {self.module}"
        )


class NonFiniteMonitor:
    """Watches operands in the order in which they are used.

    One reduction an operand on the device; the host looks at a step's results when the next step
    starts, or when asked.
    """

    def __init__(self) -> None:
        self._step = 0
        self._labels: list[tuple[str, str, str]] = []
        self._sums: list[Tensor] = []

    def observe(self, module: str, gemm: str, operand: str, tensor: Tensor) -> None:
        """Note one operand. Its sum is finite unless an element is not (or the sum overflows
        float32, which no healthy operand does)."""
        self._labels.append((module, gemm, operand))
        self._sums.append(tensor.detach().sum(dtype=torch.float32))

    def start_step(self, step: int) -> Sighting | None:
        """Begin `step`; returns what the step before showed."""
        seen = self.look()
        self._step = step
        return seen

    def look(self) -> Sighting | None:
        """The first non-finite operand since the step began, and forget all of them."""
        labels, sums = self._labels, self._sums
        self._labels, self._sums = [], []
        if not sums:
            return None
        bad = (~torch.stack(sums).isfinite()).nonzero()
        return Sighting(self._step, *labels[int(bad[0])]) if len(bad) else None
