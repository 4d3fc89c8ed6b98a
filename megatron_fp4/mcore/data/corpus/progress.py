"""Shows how far a long command is: on a terminal one line that is redrawn, else a line at times."""

import time
from collections.abc import Callable
from typing import TextIO

_REDRAW_SECONDS = 0.5  # on a terminal
_LINE_SECONDS = 30.0  # in a log


class Progress:
    """Prints documents, the share that is done, MB/s and the time left.

    total: bytes of the corpus on the disk. position, documents: how many of them, and how many
    documents, were done before. stream: where lines go. clock: returns the time in seconds.
    """

    def __init__(
        self,
        total: int,
        position: int,
        documents: int,
        stream: TextIO,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total, self._begin, self._stream, self._clock = total, position, stream, clock
        self._terminal = stream.isatty()
        self._started = self._shown = clock()
        self._documents, self._bytes = documents, 0

    def add(self, documents: int, text_bytes: int, position: int) -> None:
        """Takes note of a block, and prints if it is time to.

        documents, text_bytes: of the block. position: how many bytes of the corpus on the disk are
        done at its end.
        """
        self._documents += documents
        self._bytes += text_bytes
        now = self._clock()
        if now - self._shown >= (_REDRAW_SECONDS if self._terminal else _LINE_SECONDS):
            self._shown = now
            self._print(position, now - self._started)

    def close(self) -> None:
        """Clears the line on a terminal."""
        if self._terminal:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def _print(self, position: int, seconds: float) -> None:
        done, left = position - self._begin, self._total - position
        eta = _duration(seconds * left / done) if done else "unknown time"
        share = 100 * position / self._total if self._total else 100.0
        line = (
            f"Data: {self._documents:,} documents, {share:.1f}% of {self._total / 1e6:,.1f} MB, "
            f"{self._bytes / 1e6 / seconds:.1f} MB/s of text, {eta} left"
        )
        self._stream.write(f"\r\x1b[K{line}" if self._terminal else f"{line}\n")
        self._stream.flush()


def _duration(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}"
