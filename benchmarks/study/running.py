"""Runs what is left of a matrix, side by side on the GPUs of this machine."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.study import results
from benchmarks.study.configuration import configuration, hash_of, point_of
from benchmarks.study.errors import StudyError
from benchmarks.study.launching import MARGIN, Launch
from benchmarks.study.matrix import Matrix, ranks_of_model
from benchmarks.study.sizes import SIZES
from tools import rows
from tools.rows import Row

Runner = Callable[[Launch, float | None], Row | None]


@dataclass(frozen=True)
class Machine:
    """What runs are placed on.

    gpus: of `gpus.visible_gpus`; empty: the CPU. at_once: runs at a time on each place: the CPU, a
    GPU, or the GPUs of one run.
    """

    gpus: Sequence[str]
    at_once: int = 1

    def processes(self, size: str, ranks: int = 0, model_ranks: int = 1) -> int:
        """The processes of a run: `ranks`, or as many as its size may have, if there are GPUs for
        them. model_ranks: the processes of each copy of its model; with more than one and without
        `ranks` there is one copy. Raises StudyError if there are GPUs, but too few."""
        if ranks or model_ranks > 1:
            needed = max(ranks, 1) * model_ranks
            if 0 < len(self.gpus) < needed:
                raise StudyError(f"a run needs {needed} GPUs, and {len(self.gpus)} are visible")
            return needed
        most = SIZES[size].gpus
        return max(n for n in range(1, most + 1) if most % n == 0 and n <= max(len(self.gpus), 1))

    def places(self, processes: int) -> list[str]:
        """The devices of each run that goes on at a time, as CUDA_VISIBLE_DEVICES has them."""
        starts = range(0, len(self.gpus) - processes + 1, processes)
        places = [",".join(self.gpus[start : start + processes]) for start in starts]
        return (places or [""]) * self.at_once


@dataclass
class Session:
    """One call of the command: where its results go, and when it ends.

    stamp, text: recorded with each row. deadline: of time.monotonic(), or None. run: trains.
    """

    path: Path
    work: Path
    data: Path
    stamp: dict[str, Any]
    text: dict[str, Any]
    deadline: float | None = None
    run: Runner = Launch.run
    say: Callable[[str], None] = partial(print, flush=True)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _stopped: threading.Event = field(default_factory=threading.Event)

    def left(self, matrix: Matrix) -> list[dict[str, Any]]:
        """The configurations that have neither finished nor failed for good."""
        found = results.read(self.path)
        done = results.finished(found) | results.failed(found)
        return [each for each in self.configurations(matrix) if hash_of(each) not in done]

    def failures(self, matrix: Matrix) -> list[Row]:
        """The rows of the matrix's runs that failed for good."""
        failed = results.failed(results.read(self.path))
        hashes = map(hash_of, self.configurations(matrix))
        return [failed[key] for key in hashes if key in failed]

    def configurations(self, matrix: Matrix) -> list[dict[str, Any]]:
        """The configuration of each run of the matrix."""
        return [configuration(matrix, point, self.text) for point in matrix.points()]

    def train(self, matrix: Matrix, machine: Machine) -> None:
        """Trains what is left, until the deadline. A run that failed is tried once more. One that
        another process trains in the same folder is left out."""
        for _ in range(results.MOST_FAILURES):
            by_processes: dict[int, list[dict[str, Any]]] = {}
            for each in self.left(matrix):
                processes = machine.processes(
                    each["size"], matrix.ranks, ranks_of_model(each["flags"])
                )
                by_processes.setdefault(processes, []).append(each)
            for processes, group in by_processes.items():
                self._side_by_side(group, machine.places(processes), processes)

    def _side_by_side(self, group: list[dict[str, Any]], places: list[str], processes: int) -> None:
        free: queue.Queue[str] = queue.Queue()
        for place in places:
            free.put(place)

        def one(each: dict[str, Any]) -> None:
            devices = free.get()
            try:
                self._one(Launch(each, self.work, self.data, devices, processes))
            finally:
                free.put(devices)

        with ThreadPoolExecutor(len(places)) as pool:
            try:
                list(pool.map(one, group))
            except BaseException:  # also an interrupt: the runs end too, and did not fail
                self._stopped.set()
                raise

    def _one(self, launch: Launch) -> None:
        minutes = None if self.deadline is None else (self.deadline - time.monotonic()) / 60
        if self._stopped.is_set() or (minutes is not None and minutes < 1 + MARGIN):
            return
        try:
            # Another command may have other results and the same folder of work.
            with rows.alone(launch.folder / "lock"):
                row = self.run(launch, minutes)
        except rows.InUse:
            run = named({"configuration": launch.configuration})
            self.say(f"study: {run}: left out, since another command trains it in {launch.folder}")
            return
        if row is None or (row["status"] == "failed" and self._stopped.is_set()):
            return  # a run that was ended has not failed
        with self._lock:
            rows.append(self.path, row | {"stamp": self.stamp, "text": self.text})
        self.say(told(row))


def told(row: Row) -> str:
    """A row as a line for the user."""
    loss = f"held-out loss {row['held_out'][-1][1]:.4f}" if "held_out" in row else row["error"]
    return f"study: {named(row)}: {row['status']}, {loss}"


def named(row: Row) -> str:
    """The run of a row, in words."""
    point = point_of(row["configuration"])
    rounding = "" if point.rounding_seed in (None, point.seed) else f"/{point.rounding_seed}"
    return (
        f"{point.recipe}, {point.size}, {point.steps} steps, learning rate "
        f"{point.learning_rate:g}, seed {point.seed}{rounding}"
    )
