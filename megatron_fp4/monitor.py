"""Monitors quantized operands for NaN and Inf, and counts elements that FP8 carriers rounded.

The host does not wait for the GPU: counts of a step are read while the next step runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Tallies that are kept as separate tensors before they are stacked into one: each separate tensor
# may take a whole block of the caching allocator.
_FOLD = 128

Label = tuple[str, str, str]  # module, GEMM, operand


@dataclass(frozen=True)
class NonFinite:
    """The first operand of a step that had a NaN or an Inf. str() gives the line for the log."""

    step: int
    module: str
    gemm: str
    operand: str

    def __str__(self) -> str:
        return (
            f"iteration {self.step}: the first NaN or Inf was in operand {self.operand} of "
            f"{self.gemm} in {self.module}"
        )


@dataclass(frozen=True)
class CarrierRounding:
    """How many elements FP8 carriers rounded in a step. str() gives the line for the log.

    elements: in all operands. worst: the operand with the most of them. most: their number there.
    """

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
class _StepTallies:
    """The tallies of one step, which are being copied to the host.

    tallies: int32 or int64 [operands, 2], in the order of `labels`; see `Decoded.tally`. copied:
    the event that ends the copy; None where the tallies are on the host already.
    """

    step: int
    labels: list[Label]
    tallies: Tensor
    copied: torch.cuda.Event | None


class NonFiniteMonitor:
    """Collects the tallies of all operands of a step, in the order in which they are multiplied.

    The tallies of a step are copied to the host while the next step runs, and read when that step
    has ended (`start_step`), so that the host never waits for the GPU. `look` reads them at once.
    """

    def __init__(self) -> None:
        self._step = 0
        self._labels: list[Label] = []
        self._tallies: list[Tensor] = []  # int32 [2] of each operand, not stacked yet
        self._folded: list[Tensor] = []  # stacked tallies, each int [operands, 2]
        self._totals: Tensor | None = None  # of operands in CUDA graphs, int64 [operands, 2]
        self._rows: dict[Label, Tensor] = {}  # each operand's row of the totals
        self._last_step: _StepTallies | None = None
        self.from_cpp: Any = None  # collects the tallies of passes in C++
        self._known: list[Label] = []  # by the numbers that `from_cpp` knows
        # Of the last step that was read; None: no rounding.
        self.rounding: CarrierRounding | None = None

    def observe(self, module: str, gemm: str, operand: str, tally: Tensor) -> None:
        """Record one operand of the current step.

        tally: int32 [2], how many elements were rounded and how many blocks are NaN. It is read
        only after the step has ended.
        """
        self._take_from_cpp()
        self._labels.append((module, gemm, operand))
        self._tallies.append(tally)
        if len(self._tallies) == _FOLD:
            self._fold()

    def label(self, module: str, gemm: str, operand: str) -> int:
        """A number for an operand, by which `from_cpp` knows it."""
        self._known.append((module, gemm, operand))
        return len(self._known) - 1

    def expect(self, operands: int, device: torch.device) -> None:
        """Allocate, on `device`, the totals to which `add` adds when CUDA graphs are replayed.

        operands: the largest number of operands that will be captured.
        """
        self._totals = torch.zeros(operands, 2, dtype=torch.int64, device=device)

    def add(self, module: str, gemm: str, operand: str, tally: Tensor) -> None:
        """Record one operand at each replay of the CUDA graph that is being captured.

        It replaces `observe` in a graph, which cannot run Python. Captures must call it in the
        order in which the operands are multiplied, after `expect`. tally: as for `observe`.
        """
        label = module, gemm, operand
        if label not in self._rows:
            assert self._totals is not None
            self._rows[label] = self._totals[len(self._rows)]
        self._rows[label].add_(tally)

    def forget_graphs(self) -> None:
        """Forget what CUDA graphs add: all of them are freed, and others will be captured.

        Call it right after `start_step`, before anything runs in the new step.
        """
        self._rows = {}

    def start_step(self, step: int) -> NonFinite | None:
        """Begin `step`, and start to copy the tallies of the step before it to the host.

        Returns the first non-finite operand of the last step but one, whose tallies have reached
        the host by now; None if there was none. `rounding` is that step's too.
        """
        seen = self._read()
        self._close()
        self._step = step
        return seen

    def drop(self) -> None:
        """Forgets the tallies of the current step."""
        self._take_from_cpp()
        self._labels, self._tallies, self._folded = [], [], []
        if self._totals is not None:
            self._totals.zero_()

    def look(self) -> NonFinite | None:
        """The first non-finite operand that was not returned yet, with the current step included.

        Waits for the GPU, and clears all tallies. Returns None if there was none.
        """
        seen = self._read()
        rounding = self.rounding
        self._close()
        last = self._read()
        self.rounding = self.rounding or rounding
        return seen or last

    def _take_from_cpp(self) -> None:
        """Adds the tallies that passes in C++ have collected, after those that came before them."""
        if self.from_cpp is None:
            return
        labels, tallies = self.from_cpp.take()
        if labels:
            self._fold()
            self._labels += [self._known[label] for label in labels]
            self._folded += tallies

    def _fold(self) -> None:
        if self._tallies:
            self._folded.append(torch.stack(self._tallies))
            self._tallies = []

    def _close(self) -> None:
        """Start the copy of the step's tallies to the host."""
        self._take_from_cpp()
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
            self._last_step = _StepTallies(self._step, self._labels, tallies, copied)
        self._labels, self._folded = [], []

    def _read(self) -> NonFinite | None:
        read, self._last_step, self.rounding = self._last_step, None, None
        if read is None:
            return None
        if read.copied is not None:
            read.copied.synchronize()
        if not read.tallies.any():
            return None
        tallies = read.tallies.tolist()
        lost = [rounded for rounded, _ in tallies]
        if any(lost):
            most = max(lost)
            worst = read.labels[lost.index(most)]
            self.rounding = CarrierRounding(read.step, sum(lost), worst, most)
        for label, (_, nan) in zip(read.labels, tallies, strict=True):
            if nan:
                return NonFinite(read.step, *label)
        return None
