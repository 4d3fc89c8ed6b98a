"""Reads the texts of a Parquet file: each row is a document, and its text is in one column.

A Parquet file consists of row groups, each of which can be read without the others.
"""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from megatron_fp4.mcore.data.errors import DataError

NO_TEXT = "no text in the column: null, no string, or not UTF-8"
_BATCH_ROWS = 1024  # decoded at a time


class DamagedParquet(Exception):
    """A file is no Parquet file, or is damaged; the message has the reason."""


class RowGroup(NamedTuple):
    """rows: how many it has. bytes: of the column of texts, uncompressed."""

    rows: int
    bytes: int


def check_package(path: Path) -> None:
    """Raises DataError if pyarrow, which reads `path`, is not installed."""
    if importlib.util.find_spec("pyarrow") is None:
        raise DataError(
            f"{path} needs the package pyarrow, which is not installed: pip install pyarrow"
        )


def row_groups(path: Path, column: str) -> list[RowGroup]:
    """The row groups of the file `path`.

    Raises DamagedParquet, OSError if the file cannot be read, and DataError if there is no column
    of that name.
    """
    with _noticed(), _opened(path) as file:
        names = file.schema_arrow.names
        if column not in names:
            raise DataError(
                f'{path} has no column "{column}": name one of {", ".join(names)} by --json-key'
            )
        groups = [file.metadata.row_group(group) for group in range(file.num_row_groups)]
        return [RowGroup(group.num_rows, _bytes_of(group, column)) for group in groups]


def texts(path: Path, column: str, group: int) -> Iterator[str | None]:
    """The strings of `column` in a row group; None for a row without one.

    Raises DamagedParquet, and OSError if the file cannot be read.
    """
    with _noticed(), _opened(path) as file:
        # Each worker is a process of its own, so more threads would not be faster.
        of_group = {"row_groups": [group], "columns": [column], "use_threads": False}
        for batch in file.iter_batches(_BATCH_ROWS, **of_group):
            for value in batch.column(0):
                yield _string(value)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """The open file, as pyarrow's ParquetFile."""
    import pyarrow.parquet

    with path.open("rb") as file:  # pyarrow opens no file whose name is not UTF-8
        yield pyarrow.parquet.ParquetFile(file)


@contextmanager
def _noticed() -> Iterator[None]:
    """A context in which pyarrow's errors for damaged content are raised as DamagedParquet."""
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        if getattr(error, "errno", None) is not None:  # of the disk, not of the content
            raise
        raise DamagedParquet(" ".join(str(error).split())) from error


def _bytes_of(group: Any, column: str) -> int:
    chunks = [group.column(index) for index in range(group.num_columns)]
    return sum(it.total_uncompressed_size for it in chunks if it.path_in_schema == column)


def _string(value: Any) -> str | None:
    try:
        text = value.as_py()
    except UnicodeDecodeError:
        return None
    return text if isinstance(text, str) else None
