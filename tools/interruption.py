"""Ctrl-C while a command is imported, which takes seconds with torch."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def quiet_interruption() -> Iterator[None]:
    """A context for imports: Ctrl-C ends the process there at once, with the exit status 130.

    A KeyboardInterrupt would not do: torch, half imported, can lose it and fail in other ways.
    """

    def end(number: int, frame: FrameType | None) -> None:
        os._exit(130)

    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:  # as of a command in the background
        signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
