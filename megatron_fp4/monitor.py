"""Where numbers first went non-finite, without waiting for the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_FOLD = 1024  # operands whose extremes are kept one by one: each takes a block of device memory


@dataclass(frozen=True)
class Sighting:
    """The first non-finite operand of a step."""

    step: int
    module: str
    gemm: str
    operand: str

    def __str__(self) -> str:
        kind = "product" if self.operand in ("y", "dx", "dw") else "operand"
        return (
            f"iteration {self.step}: the first NaN or Inf stood in {kind} {self.operand} of "
            f"{self.gemm} in {self.module}"
        )


@dataclass(frozen=True)
class _Verdict:
    """On its way to the host: which of a step's operands was non-finite first, -1 for none."""

    step: int
    labels: list[tuple[str, str, str]]
    first: Tensor
    copied: torch.cuda.Event | None


class NonFiniteMonitor:
    """Watches operands in the order in which they are used.

    One reduction an operand on the device. The host never waits for the device in training: what
    a step showed is copied while the next one runs, and read when that has ended, or when asked.
    """

    def __init__(self) -> None:
        self._step = 0
        self._labels: list[tuple[str, str, str]] = []
        self._extremes: list[Tensor] = []  # minimum and maximum of each operand, not folded yet
        self._finite: list[Tensor] = []
        self._verdict: _Verdict | None = None

    def observe(self, module: str, gemm: str, operand: str, tensor: Tensor) -> None:
        """Note one operand. Its extremes are finite unless an element is not."""
        if tensor.numel() == 0:
            return
        self._labels.append((module, gemm, operand))
        self._extremes += torch.aminmax(tensor.detach())
        if len(self._extremes) == 2 * _FOLD:
            self._fold()

    def start_step(self, step: int) -> Sighting | None:
        """Begin `step`; returns what the last step but one showed, which has come by now."""
        seen = self._read()
        self._close()
        self._step = step
        return seen

    def look(self) -> Sighting | None:
        """The first non-finite operand that no one was told of yet, and forget all of them."""
        seen = self._read()
        self._close()
        return seen or self._read()

    def _fold(self) -> None:
        if self._extremes:
            pairs = torch.stack(self._extremes).view(-1, 2)
            self._finite.append(pairs.isfinite().all(dim=1))
            self._extremes = []

    def _close(self) -> None:
        """Send for what the step showed."""
        self._fold()
        if self._finite:
            bad = ~torch.cat(self._finite)
            first = torch.where(bad.any(), bad.int().argmax(), -1)
            copied = torch.cuda.Event() if first.is_cuda else None
            on_host = first.to("cpu", non_blocking=True)
            if copied is not None:
                copied.record()
            self._verdict = _Verdict(self._step, self._labels, on_host, copied)
        self._labels, self._finite = [], []

    def _read(self) -> Sighting | None:
        verdict, self._verdict = self._verdict, None
        if verdict is None:
            return None
        if verdict.copied is not None:
            verdict.copied.synchronize()
        first = int(verdict.first)
        return Sighting(verdict.step, *verdict.labels[first]) if first >= 0 else None
