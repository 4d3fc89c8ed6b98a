"""A target folder that appears only when it is complete, and progress while it is written."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from megatron_fp4.errors import ConfigError


def check_target(path: Path, force: bool, sources: tuple[Path, ...] = ()) -> None:
    """Raises ConfigError, before anything is written, if `path` cannot be the target.

    It must not exist, or with `force` be a folder, and must not be one of `sources` or contain one.
    """
    real = path.resolve()
    for source in sources:
        if real == source.resolve() or real in source.resolve().parents:
            raise ConfigError(f"{path} has what is to be read: give another --output")
    there = next(above for above in real.parents if above.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"{path} cannot be written: no permission in {there}")
    if path.exists() and not path.is_dir():
        raise ConfigError(f"{path} is not a folder: give another --output")
    if path.exists() and not force:
        raise ConfigError(f"{path} exists: give another --output, or --force to replace it")


@contextmanager
def complete_folder(path: Path) -> Iterator[Path]:
    """A new folder beside `path` to write to, which takes its place at the end.

    What was at `path` is removed only after the new folder is complete. If the context ends with an
    exception, the new folder is removed and `path` stays as it was. A process that is killed leaves
    the new folder under its own name, PATH.partial. Raises ConfigError if the new folder cannot be
    made, and if a disk is full.
    """
    path = path.resolve()  # "." has no name, and what a link names is replaced where it is
    partial = path.with_name(f"{path.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(
            f"{partial} cannot be made ({error.strerror or error}): give another --output"
        ) from error
    try:
        yield partial
        _take_place(partial, path)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from error
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _take_place(made: Path, path: Path) -> None:
    """Moves the folder `made` to `path`. What is there is removed, but kept if that fails."""
    old = path.with_name(f"{path.name}.replaced")
    replaces = path.exists()
    if replaces:
        shutil.rmtree(old, ignore_errors=True)  # of a process that was killed at this place
        path.rename(old)
    try:
        made.rename(path)
    except BaseException:
        if replaces:
            old.rename(path)
        raise
    shutil.rmtree(old, ignore_errors=True)


class Progress:
    """Prints how much of the work is done: on a terminal one line that is redrawn, else a line
    every ten seconds.

    what: the first word of the line. total: bytes in all.
    """

    SECONDS = 10.0

    def __init__(
        self,
        what: str,
        total: int,
        stream: TextIO = sys.stderr,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what, self._total, self._stream, self._clock = what, total, stream, clock
        self._done, self._start, self._last = 0, clock(), clock()

    def add(self, size: int) -> None:
        """Counts `size` more bytes as done."""
        self._done += size
        now = self._clock()
        terminal = self._stream.isatty()
        if now - self._last < (0.2 if terminal else self.SECONDS) and self._done < self._total:
            return
        self._last = now
        rate = self._done / max(now - self._start, 1e-3)
        left = (self._total - self._done) / max(rate, 1.0)
        share = self._done / max(self._total, 1)
        line = (
            f"{self._what}: {self._done / 1e9:.2f} of {self._total / 1e9:.2f} GB "
            f"({share:.0%}), {rate / 1e6:.0f} MB/s, {left:.0f} s left"
        )
        end = "\n" if self._done >= self._total or not terminal else ""
        self._stream.write(f"\r\033[K{line}{end}" if terminal else f"{line}\n")
        self._stream.flush()
