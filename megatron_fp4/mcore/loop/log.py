"""What a launch prints: little while it starts, and a training log that resuming does not change.

T stands for megatron/training.
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

FILE = "start.log"  # in the folder of the checkpoints
# The first lines of what is printed while a launch starts, with the indented lines below them.
_SHOWN = re.compile(
    r"megatron-fp4|using world size|.*\b(WARNING|Warning|ERROR|Error)\b"
    r"|.*[Ll]oad(ing|ed) .*checkpoint"
)
# Warnings of Megatron's that ask nothing of anyone: module and start of the message.
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
    """Stands in for stdout until training starts, and holds back what Megatron says on the way: its
    arguments, its stages, its datasets' sizes. Warnings, errors and this package's lines pass.

    What is held back goes to FILE beside the checkpoints, or to stdout with --fp4-verbose and where
    a launch fails otherwise than by a ConfigError.
    """

    def __init__(self) -> None:
        self._stdout = sys.stdout
        self._held: list[str] = []
        self._rest = ""  # of a line that has not ended
        self._shows = False  # whether the line before was shown
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
        """Does what the parsed arguments say: shows all, or knows the folder of the checkpoints."""
        self._args = args
        if args.fp4_verbose:
            self._end(shows=True)

    def before(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """`step`, with which the start ends."""

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
        """Says where the rest is, once the launch has started."""
        if sys.stdout is self and self._args is not None and self._args.rank == 0:
            self._stdout.write(f"megatron-fp4: {self._keep(self._args.save)}\n")

    def _keep(self, folder: str | None) -> str:
        """Writes what was held back beside the checkpoints; returns where it is, for the user."""
        if folder is None or is_object_storage_path(folder):
            return "Megatron's arguments and what it says at the start: add --fp4-verbose"
        try:
            (Path(folder) / FILE).write_text("".join(self._held))
        except OSError as error:
            return f"{folder}/{FILE} cannot be written ({error.strerror})"
        return f"Megatron's arguments and what it said at the start: {folder}/{FILE}"


def precision(args: argparse.Namespace) -> str:
    """What a launch without a recipe of this package trains in, in a line."""
    plain = "BF16" if args.bf16 else "FP16" if args.fp16 else "FP32"
    for upstreams in ("fp4", "fp8"):
        if getattr(args, upstreams) is not None:
            return f"megatron-fp4: linears run in Transformer Engine's {upstreams.upper()}"
    return f"megatron-fp4: no recipe (--fp4-recipe): linears run in {plain}"


def install() -> None:
    """Mends the training log; harmless when called again."""
    if not hasattr(training.training_log, "__wrapped__"):
        for name, starts in _CHATTER.items():
            logging.getLogger(name).addFilter(partial(_says_something, starts))
        training.training_log = _from_the_start(training.training_log)
        training.print_rank_last = _with_time_left(training.print_rank_last)


def _says_something(chatter: tuple[str, ...], record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(chatter)


def _from_the_start(upstream: Callable[..., Any]) -> Callable[..., Any]:
    # T/training.py:training_log logs the first step of a run and keeps its loss for the next line
    # as well, since the interval has not ended. Where it has, that would be an average over two.
    @functools.wraps(upstream)
    def training_log(*args: Any, is_first_iteration: bool = False, **kwargs: Any) -> Any:
        iteration, interval = args[3], training.get_args().log_interval
        is_first_iteration = is_first_iteration and iteration % interval != 0
        return upstream(*args, is_first_iteration=is_first_iteration, **kwargs)

    return training_log


def _with_time_left(upstream: Callable[[str], None]) -> Callable[[str], None]:
    @functools.wraps(upstream)
    def print_rank_last(message: str) -> None:
        upstream(with_time_left(message))

    return print_rank_last


def with_time_left(line: str) -> str:
    """A line of Megatron's training log with the time that the remaining steps take at its pace."""
    step = re.search(r" iteration +(\d+)/ *(\d+) \|", line)
    pace = re.search(r" elapsed time per iteration \(ms\): ([\d.]+) \|", line)
    if step is None or pace is None:
        return line
    left = timedelta(seconds=round((int(step[2]) - int(step[1])) * float(pace[1]) / 1000))
    return f"{line[: pace.end()]} time left: {left} |{line[pace.end() :]}"
