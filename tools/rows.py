"""Result files of JSON lines: a line for each result, written when it is there."""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class InUse(ValueError):
    """Another process holds a file; the message is one line for the user."""


def read(path: Path, keys: set[str]) -> list[Row]:
    """The rows of a result file; none if there is no such file.

    keys: those that every row has. A last line that was cut off, as by a machine that was lost, is
    left out. Raises ValueError, with the path and the line, if another line is not a row.
    """
    rows: list[Row] = []
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    for number, line in enumerate(lines[:-1], start=1):  # what follows the last line break: cut off
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}:{number} is not JSON: mend or delete the line") from error
        if not isinstance(row, dict) or not keys <= row.keys():
            raise ValueError(f"{path}:{number} lacks {', '.join(sorted(keys))}: delete the line")
        rows.append(row)
    return rows


def append(path: Path, row: Row) -> None:
    """Adds a row; a last line that was cut off is removed. The row is on disk at the end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write(json.dumps(row, allow_nan=False).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Holds the file, which is made if there is none, so that nobody else holds it at the same
    time. Raises InUse if another process does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InUse(
                f"another run is writing to {path}: wait for it, or give another --results"
            ) from error
        yield
