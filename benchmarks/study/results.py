"""The result file of a study: a line of JSON for each run that finished or failed."""

import json
import os
from pathlib import Path
from typing import Any

from benchmarks.study.errors import StudyError

Row = dict[str, Any]
MOST_FAILURES = 2  # a run that failed so often is not tried again


def read(path: Path) -> list[Row]:
    """The rows of a result file; none if there is no such file.

    A last line that was cut off, as by a machine that was lost, is left out. Raises StudyError if
    another line is not a row.
    """
    rows: list[Row] = []
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    for number, line in enumerate(lines[:-1], start=1):  # what follows the last line break: cut off
        try:
            row = json.loads(line)
        except ValueError as error:
            raise StudyError(f"{path}:{number} is not JSON: mend or delete the line") from error
        if not isinstance(row, dict) or not {"hash", "status", "configuration"} <= row.keys():
            raise StudyError(f"{path}:{number} is no row of a study: delete the line")
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


def finished(rows: list[Row]) -> dict[str, Row]:
    """The finished runs by their hash."""
    return {row["hash"]: row for row in rows if row["status"] == "finished"}


def failed(rows: list[Row]) -> dict[str, Row]:
    """The last row of each run that failed MOST_FAILURES times and did not finish, by its hash."""
    failures: dict[str, list[Row]] = {}
    for row in rows:
        if row["status"] == "failed":
            failures.setdefault(row["hash"], []).append(row)
    done = finished(rows)
    return {
        key: own[-1]
        for key, own in failures.items()
        if len(own) >= MOST_FAILURES and key not in done
    }
