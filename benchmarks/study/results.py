"""The result file of a study: a line of JSON for each run that finished or failed."""

from pathlib import Path

from benchmarks.study.configuration import hash_of, of_this_version
from benchmarks.study.errors import StudyError
from tools import rows
from tools.rows import Row

MOST_FAILURES = 2  # a run that failed so often is not tried again


def read(path: Path) -> list[Row]:
    """The rows of a result file; none if there is no such file.

    An earlier version of the package may have written a row. Its configuration is therefore brought
    to the form of this version (`of_this_version`), and its hash is computed anew. Raises
    StudyError if a line is not a row.
    """
    try:
        found = rows.read(path, {"hash", "status", "configuration"})
    except ValueError as error:
        raise StudyError(str(error)) from error
    today = [of_this_version(row["configuration"]) for row in found]
    return [
        row | {"configuration": own, "hash": hash_of(own)}
        for row, own in zip(found, today, strict=True)
    ]


def finished(found: list[Row]) -> dict[str, Row]:
    """The finished runs by their hash."""
    return {row["hash"]: row for row in found if row["status"] == "finished"}


def failed(found: list[Row]) -> dict[str, Row]:
    """The last row of each run that failed MOST_FAILURES times and did not finish, by its hash."""
    failures: dict[str, list[Row]] = {}
    for row in found:
        if row["status"] == "failed":
            failures.setdefault(row["hash"], []).append(row)
    done = finished(found)
    return {
        key: own[-1]
        for key, own in failures.items()
        if len(own) >= MOST_FAILURES and key not in done
    }
