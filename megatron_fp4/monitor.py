"""Health of quantized operands, without waiting for the device: where NaN first stood, and what the
form in which operands are multiplied had to round."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_FOLD = 1024  # operands whose tallies are kept one by one: each may take a block of device memory

Label = tuple[str, str, str]  # module, GEMM, operand


@dataclass(frozen=True)
class Sighting:
    """The first non-finite operand of a step."""

    step: int
    module: str
    gemm: str
    operand: str

    def __str__(self) -> str:
        return (
            f"iteration {self.step}: the first NaN or Inf stood in operand {self.operand} of "
            f"{self.gemm} in {self.module}"
        )


@dataclass(frozen=True)
class Rounding:
    """What a step rounded: elements in all, and in the operand that lost most."""

    step: int
    elements: int
    worst: Label
    most: int

    def __str__(self) -> str:
        module, gemm, operand = self.worst
        return (
            f"iteration {self.step}: {self.elements} elements lay below the window of their FP8 "
            f"carriers and were rounded, most of them ({self.most}) in operand {operand} of {gemm} "
            f"in {module}"
        )


@dataclass(frozen=True)
class _Verdict:
    """On its way to the host: what each operand of a step rounded, and whether it was NaN."""

    step: int
    labels: list[Label]
    tallies: Tensor
    copied: torch.cuda.Event | None


class NonFiniteMonitor:
    """Watches operands in the order in which they are multiplied.

    The host never waits for the device in training: what a step showed is copied while the next one
    runs, and read when that has ended, or when asked.
    """

    def __init__(self) -> None:
        self._step = 0
        self._labels: list[Label] = []
        self._tallies: list[Tensor] = []  # int32 [2] of each operand, not folded yet
        self._folded: list[Tensor] = []
        self._totals: Tensor | None = None  # of operands in CUDA graphs, int64 [operands, 2]
        self._rows: dict[Label, Tensor] = {}  # of the totals
        self._verdict: _Verdict | None = None
        self.rounding: Rounding | None = None  # of the last step that was read, if there was any

    def observe(self, module: str, gemm: str, operand: str, tally: Tensor) -> None:
        """Note one operand: int32 [2], how many elements were rounded and how many blocks are NaN.
        It is looked at when the step is over."""
        self._labels.append((module, gemm, operand))
        self._tallies.append(tally)
        if len(self._tallies) == _FOLD:
            self._fold()

    def expect(self, operands: int, device: torch.device) -> None:
        """So many may be captured in CUDA graphs."""
        self._totals = torch.zeros(operands, 2, dtype=torch.int64, device=device)

    def add(self, module: str, gemm: str, operand: str, tally: Tensor) -> None:
        """Note one operand whenever the CUDA graph runs that is being captured: a graph cannot call
        `observe`. They are captured in the order in which they are multiplied."""
        label = module, gemm, operand
        if label not in self._rows:
            assert self._totals is not None
            self._rows[label] = self._totals[len(self._rows)]
        self._rows[label].add_(tally)

    def start_step(self, step: int) -> Sighting | None:
        """Begin `step`; returns what the last step but one showed, which has come by now."""
        seen = self._read()
        self._close()
        self._step = step
        return seen

    def look(self) -> Sighting | None:
        """The first non-finite operand that no one was told of yet, and forget all of them."""
        seen = self._read()
        rounding = self.rounding
        self._close()
        last = self._read()
        self.rounding = self.rounding or rounding
        return seen or last

    def _fold(self) -> None:
        if self._tallies:
            self._folded.append(torch.stack(self._tallies))
            self._tallies = []

    def _close(self) -> None:
        """Send for what the step showed."""
        self._fold()
        if self._totals is not None and self._rows:
            self._folded.append(self._totals[: len(self._rows)].clone())
            self._labels += self._rows
            self._totals.zero_()
        if self._folded:
            tallies = torch.cat(self._folded)
            copied = None
            if tallies.is_cuda:
                on_host = torch.empty_like(tallies, device="cpu", pin_memory=True)
                tallies = on_host.copy_(tallies, non_blocking=True)
                copied = torch.cuda.Event()
                copied.record()
            self._verdict = _Verdict(self._step, self._labels, tallies, copied)
        self._labels, self._folded = [], []

    def _read(self) -> Sighting | None:
        verdict, self._verdict, self.rounding = self._verdict, None, None
        if verdict is None:
            return None
        if verdict.copied is not None:
            verdict.copied.synchronize()
        if not verdict.tallies.any():
            return None
        tallies = verdict.tallies.tolist()
        lost = [rounded for rounded, _ in tallies]
        if any(lost):
            most = max(lost)
            worst = verdict.labels[lost.index(most)]
            self.rounding = Rounding(verdict.step, sum(lost), worst, most)
        for label, (_, nan) in zip(verdict.labels, tallies, strict=True):
            if nan:
                return Sighting(verdict.step, *label)
        return None
