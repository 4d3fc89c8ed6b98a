"""What a launch prints: few lines during the start, and Megatron's training log with two changes.

The log's averages are the same in a resumed run as in an uninterrupted one, and each line has the
time that is left. T stands for megatron/training.
"""

import argparse
import functools
import io
import logging
import re
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from megatron.core.datasets.object_storage_utils import is_object_storage_path
from megatron.training import training

from megatron_fp4.errors import ConfigError

FILE = "start.log"  # in the checkpoints' folder
# Lines that are printed while a launch starts. Indented lines that follow one of them are too.
_SHOWN = re.compile(
    r"megatron-fp4|using world size|.*\b(WARNING|Warning|ERROR|Error)\b"
    r"|.*[Ll]oad(ing|ed) .*checkpoint"
)
# Warnings of Megatron's that users can ignore, by module: how the messages start.
_CHATTER: dict[str, tuple[str, ...]] = {
    "megatron.core.models.gpt.gpt_model": ("GPTModel IS DEPRECATED",),
    "megatron.core.datasets.gpt_dataset": ("Unable to save MockGPTDataset indexes",),
    "megatron.core.rerun_state_machine": (
        "RerunStateMachine initialized",
        "Setting RerunStateMachine mode",
        "Result validation enabled",
    ),
}


class Start(io.TextIOBase):
    """Replaces sys.stdout until training starts, and holds back what Megatron prints until then.

    Megatron prints its arguments, the sizes of datasets and much else. Only warnings, errors and
    lines of this package are let through. The rest is written to FILE beside the checkpoints. It is
    printed instead with --fp4-verbose, and if the start fails with an error other than a
    ConfigError or an out-of-memory error. Use it as a context manager.
    """

    def __init__(self) -> None:
        self._stdout = sys.stdout
        self._held: list[str] = []
        self._rest = ""  # the start of a line whose end was not written yet
        self._shows = False  # whether the line before was printed
        self._args: argparse.Namespace | None = None

    def __enter__(self) -> "Start":
        sys.stdout = self  # type: ignore[assignment]
        logging.getLogger("megatron").setLevel(logging.WARNING)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self._tell()
        self._end(shows=not isinstance(error, ConfigError | torch.OutOfMemoryError | None))

    def follow(self, args: argparse.Namespace) -> None:
        """Applies the parsed arguments: --fp4-verbose, and the checkpoints' folder (--save)."""
        self._args = args
        if args.fp4_verbose:
            self._end(shows=True)

    def before(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """`step`, wrapped so that its first call ends the start and restores sys.stdout."""

        @functools.wraps(step)
        def first(*args: Any, **kwargs: Any) -> Any:
            self._tell()
            self._end(shows=False)
            return step(*args, **kwargs)

        return first

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._shows = bool(_SHOWN.match(line)) or (self._shows and line.startswith("  "))
            if self._shows:
                self._stdout.write(line + "\n")
            else:
                self._held.append(line + "\n")
        return len(text)

    def flush(self) -> None:
        self._stdout.flush()

    def _end(self, shows: bool) -> None:
        if sys.stdout is not self:
            return
        sys.stdout = self._stdout
        logging.getLogger("megatron").setLevel(logging.NOTSET)
        if shows:
            self._stdout.write("".join([*self._held, self._rest]))
            self._stdout.flush()

    def _tell(self) -> None:
        """Writes FILE and prints where it is, on rank 0, unless the start has ended before."""
        if sys.stdout is self and self._args is not None and self._args.rank == 0:
            self._stdout.write(f"megatron-fp4: {self._keep(self._args.save)}\n")

    def _keep(self, folder: str | None) -> str:
        """Writes what was held back to FILE in `folder`; returns a line that says where it is."""
        if folder is None or is_object_storage_path(folder):
            return "Megatron's arguments and what it says at the start: add --fp4-verbose"
        try:
            with (Path(folder) / FILE).open("a") as file:
                file.write("".join(self._held))
        except OSError as error:
            return f"{folder}/{FILE} cannot be written ({error.strerror})"
        return f"Megatron's arguments and what it said at the start: {folder}/{FILE}"


def precision(args: argparse.Namespace) -> str:
    """A line with the precision of the linears, for a launch without a recipe of this package."""
    plain = "BF16" if args.bf16 else "FP16" if args.fp16 else "FP32"
    for upstreams in ("fp4", "fp8"):
        if getattr(args, upstreams) is not None:
            return f"megatron-fp4: linears run in Transformer Engine's {upstreams.upper()}"
    return f"megatron-fp4: no recipe (--fp4-recipe): linears run in {plain}"


def install() -> None:
    """Applies the changes to the training log, and hides the warnings in _CHATTER. Idempotent."""
    if not hasattr(training.training_log, "__wrapped__"):
        for name, starts in _CHATTER.items():
            logging.getLogger(name).addFilter(partial(_says_something, starts))
        training.training_log = _from_the_start(training.training_log)
        training.print_rank_last = _printing_time_left(training.print_rank_last)


def _says_something(chatter: tuple[str, ...], record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(chatter)


def _from_the_start(upstream: Callable[..., Any]) -> Callable[..., Any]:
    # T/training.py:training_log also logs the first step of a process. It then keeps that step's
    # loss for the average of the next line, because the log interval has not ended. If it has ended
    # in this step, the next line would average over one step too many.
    @functools.wraps(upstream)
    def training_log(*args: Any, is_first_iteration: bool = False, **kwargs: Any) -> Any:
        iteration, interval = args[3], training.get_args().log_interval
        is_first_iteration = is_first_iteration and iteration % interval != 0
        return upstream(*args, is_first_iteration=is_first_iteration, **kwargs)

    return training_log


def _printing_time_left(upstream: Callable[[str], None]) -> Callable[[str], None]:
    @functools.wraps(upstream)
    def print_rank_last(message: str) -> None:
        upstream(with_time_left(message))

    return print_rank_last


def with_time_left(line: str) -> str:
    """A line of Megatron's training log, with the time that the remaining steps will take.

    That is their number times the line's time per iteration. Other lines are returned unchanged.
    """
    step = re.search(r" iteration +(\d+)/ *(\d+) \|", line)
    pace = re.search(r" elapsed time per iteration \(ms\): ([\d.]+) \|", line)
    if step is None or pace is None:
        return line
    left = timedelta(seconds=round((int(step[2]) - int(step[1])) * float(pace[1]) / 1000))
    return f"{line[: pace.end()]} time left: {left} |{line[pace.end() :]}"
