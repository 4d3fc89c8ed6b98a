"""Evaluates combinations in several processes, and keeps each result as soon as it is there."""

from __future__ import annotations

import hashlib
import json
import math
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from megatron_fp4.arithmetic.formats import NUMERICS_VERSION
from tools import rows
from tools.rows import Row
from tools.sweep import results, tensors
from tools.sweep.axes import Combination
from tools.sweep.stages import STAGES
from tools.sweep.stages.stage import Figures

FINISHED, FAILED = "finished", "failed"
SAY_EVERY = 30  # seconds, between lines that say how far a run is


class SweepError(RuntimeError):
    """A sweep cannot go on; the message says why and what to do."""


@dataclass(frozen=True)
class Task:
    """A combination to evaluate by a stage. star: of the sample. tensors_file: the recorded ones;
    None for a stage that reads none."""

    stage: str
    combination: Combination
    star: str
    tensors_file: Path | None

    @property
    def configuration(self) -> dict[str, Any]:
        """All that the figures depend on."""
        stage = STAGES[self.stage]
        recorded = tensors.digest(self.tensors_file) if self.tensors_file else None
        return {
            "stage": self.stage,
            "settings": {"seeds": stage.seeds, **stage.settings},
            "combination": self.combination.chosen,
            "tensors": recorded,
            "numerics": NUMERICS_VERSION,
        }

    @property
    def hash(self) -> str:
        """16 hexadecimal digits of the configuration."""
        text = json.dumps(self.configuration, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def evaluate(task: Task) -> Row:
    """The row of a task: its figures by seed, or why there are none. Raises SweepError, with the
    combination, if the code cannot evaluate it."""
    began, stage = time.monotonic(), STAGES[task.stage]
    row = {"hash": task.hash, "star": task.star, **task.configuration, "seeds": {}}
    recorded = tensors.read(task.tensors_file) if task.tensors_file else []
    try:
        for seed in range(1, stage.seeds + 1):
            row["seeds"][str(seed)] = _finite(stage.evaluate(task.combination, recorded, seed))
        row["status"] = FINISHED
    except ArithmeticError as error:  # a loss or product that is not finite is a result too
        row |= {"status": FAILED, "error": str(error)}
    except Exception as error:  # as text, since not every error can be sent to another process
        what = f"{task.stage} cannot evaluate {task.combination}"
        raise SweepError(f"{what}: {type(error).__name__}: {error}") from error
    return row | {"seconds": round(time.monotonic() - began, 3)}


def _finite(figures: Figures) -> Figures:
    """The figures. Raises ArithmeticError for one that is NaN or Inf."""
    for name, value in figures.items():
        if not math.isfinite(value):
            raise ArithmeticError(f"{name} is {value}")
    return figures


def run(
    tasks: Sequence[Task],
    path: Path,
    stamp: dict[str, Any],
    processes: int,
    deadline: float | None = None,
) -> int:
    """Evaluates the tasks whose results the file `path` does not have; the number that is left.

    stamp: recorded with each row. deadline: of time.monotonic(); None: all are evaluated. An
    interrupt loses only what is being evaluated. Raises ValueError, before any is evaluated, if
    the results could not be compared with the file's. Raises SweepError if a process was ended, or
    if the code cannot evaluate a combination, which the message names.
    """
    found = results.read(path)
    done = {row["hash"] for row in found}
    left = [task for task in tasks if task.hash not in done]
    # Through JSON, as the rows: it has lists in place of tuples.
    configurations = json.loads(json.dumps([task.configuration for task in left]))
    results.check_alike(found + configurations, path)
    said = time.monotonic()
    with _pool(processes) as pool:
        waiting: set[Future[Row]] = set()
        while left or waiting:
            while left and len(waiting) < 2 * processes and not _over(deadline):
                waiting.add(pool.submit(evaluate, left.pop(0)))
            if not waiting:
                break
            ready, waiting = wait(waiting, SAY_EVERY, FIRST_COMPLETED)
            # Results come before errors, which end the sweep.
            for future in sorted(ready, key=lambda each: each.exception() is not None):
                rows.append(path, future.result() | {"stamp": stamp})
            if time.monotonic() >= said + SAY_EVERY:
                said = time.monotonic()
                print(f"sweep: {len(tasks) - len(left) - len(waiting)} of {len(tasks)}", flush=True)
    return len(left)


@contextmanager
def _pool(processes: int) -> Iterator[ProcessPoolExecutor]:
    """Worker processes. An error ends them and what they evaluate. They end with this process too,
    even if that is killed."""
    context = multiprocessing.get_context("spawn")
    theirs, ours = context.Pipe(duplex=False)
    with ProcessPoolExecutor(processes, context, _start_worker, (theirs,)) as pool:
        try:
            yield pool
        except BaseException as error:
            pool.shutdown(wait=False, cancel_futures=True)
            ours.close()
            if isinstance(error, BrokenProcessPool):
                reason = "a process was ended from outside: give the same command again"
                raise SweepError(reason) from error
            raise


def _start_worker(pipe: Connection) -> None:
    """Prepares a new process of the pool.

    PyTorch gets one thread, since the tensors are small. The process ends when the main process
    closes its end of `pipe`, or ends itself.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process ends the workers
    torch.set_num_threads(1)
    threading.Thread(target=_end_with, args=(pipe,), daemon=True).start()


def _end_with(pipe: Connection) -> None:
    with suppress(EOFError):
        pipe.recv()
    os._exit(1)


def _over(deadline: float | None) -> bool:
    return deadline is not None and time.monotonic() > deadline
