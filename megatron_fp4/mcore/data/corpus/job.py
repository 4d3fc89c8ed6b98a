"""The folder of the parts of an unfinished corpus, and the command that they belong to."""

import fcntl
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_fp4.mcore.data.corpus import parts
from megatron_fp4.mcore.data.errors import DataError

FOLDER = ".parts"
_FILE = "job.json"


def fingerprint(job: dict[str, Any]) -> str:
    """The SHA-256 of a job, as hexadecimal digits. job: all that the result depends on, as JSON."""
    return hashlib.sha256(json.dumps(job, sort_keys=True).encode()).hexdigest()


@contextmanager
def opened(output: Path, job: dict[str, Any]) -> Iterator[Path]:
    """The folder for the parts of a job, which no other process uses at the same time.

    Made if it does not exist. Raises DataError if it has finished parts of another job, or if
    another process uses it.
    """
    folder = output / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            # Unlike flock's, this lock is not inherited by workers, which may outlive a process
            # that was killed by some moments.
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise DataError(f"another process is writing to {output}: wait for it") from error
        _check_own(folder, job)
        yield folder


def exists(output: Path) -> bool:
    """Whether `output` has parts of an unfinished corpus."""
    return (output / FOLDER / _FILE).exists()


def _check_own(folder: Path, job: dict[str, Any]) -> None:
    """Raises DataError if the folder has finished parts of another job; writes down the job if of
    none."""
    path = folder / _FILE
    if not path.exists() or not parts.any_finished(folder):
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(job))
        partial.replace(path)
        return
    try:
        found = json.loads(path.read_bytes())
    except ValueError:
        found = {}
    # JSON has lists where the job may have tuples.
    ours = json.loads(json.dumps(job))
    if changed := [name for name in ours if found.get(name) != ours[name]]:
        raise DataError(
            f"{folder} has the unfinished work of another command ({changed[0]} was not the same): "
            f"run that one to its end, or delete {folder} to start anew"
        )
