"""Reads documents from files and folders: plain text, JSON lines or Parquet.

JSON lines has one JSON object on each line, which contains a document's text under some key. In
Parquet each row is a document, and its text is in a column. Plain text and JSON lines may be
compressed (.gz, .zst).
"""

import hashlib
import io
import json
import os
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Literal, NamedTuple

from megatron_fp4.mcore.data import parquet
from megatron_fp4.mcore.data.errors import DataError
from megatron_fp4.mcore.data.folders import (
    BINARY,
    BLANK,
    NOT_UTF8,
    UNREADABLE,
    LeftOut,
    Unusable,
    check_regular,
    files,
    shown,
)
from megatron_fp4.mcore.data.json_lines import BadLine, text_of
from megatron_fp4.mcore.data.opening import DAMAGE, check_packages, decompressed, suffix_of

Kind = Literal["text", "lines", "parquet"]

# Folders of the standard library that are not read: installed packages, tests, and generated tables
# and text. A single generated file could be larger than all other files that are held out.
NOT_LIBRARY = {"dist-packages", "site-packages", "__pycache__"}
NOT_LIBRARY |= {"idle_test", "test", "tests", "encodings", "pydoc_data"}


class Document(NamedTuple):
    """One text of the data, which is not divided between training and validation.

    key: a file's path, or the SHA-256 of the text of a JSON line or of a row. Documents are sorted
    by its hash.
    """

    key: str
    text: str


def library_documents() -> Iterator[Document]:
    """The .py files of Python's standard library, without its tests and generated files."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if NOT_LIBRARY.isdisjoint(name.parts):
            try:
                yield from _file_documents(path, name.as_posix(), "", LeftOut())
            except Unusable:  # some Linux distributions add files that are not readable text
                continue


def documents_at(path: Path, json_key: str, left_out: LeftOut) -> Iterator[Document]:
    """The documents of the file `path`, or of every text file under the folder `path`.

    Blank documents, and files of a folder that cannot be read as text, are left out and counted in
    `left_out`. A .json file of a folder that is not JSON lines is read as plain text.

    Raises DataError if `path` itself does not exist or cannot be read as text, and for a line of a
    JSON lines file that is not an object with a string under `json_key`, a row of Parquet without a
    string in that column, and a missing package.
    """
    try:
        if os.path.isdir(path):  # does not raise, unlike Path.is_dir
            yield from _folder_documents(path, json_key, left_out)
            return
        check_named(path, json_key)
        yield from _file_documents(path, shown(path.name), json_key, left_out)
    except Unusable as error:
        raise DataError(f"{path}: {error}") from error


def check_named(path: Path, json_key: str) -> None:
    """Checks a file that is named on the command line.

    Raises Unusable if it cannot be read, and DataError if it is a .json file without JSON lines.
    """
    check_regular(path)
    if suffix_of(path) == ".json" and kind_of(path) != "lines":
        raise DataError(
            f"{path} is not JSON lines: give each text an object on a line of its own, as "
            f'{{"{json_key}": "..."}}'
        )


def _folder_documents(root: Path, json_key: str, left_out: LeftOut) -> Iterator[Document]:
    for path in files(root, left_out):
        name = shown(path.relative_to(root))
        try:
            check_regular(path)
            documents = list(_file_documents(path, name, json_key, left_out))
        except Unusable as error:
            left_out.add(error.reason, f"{name} ({error.detail})" if error.detail else name)
        else:
            yield from documents


def _file_documents(path: Path, key: str, json_key: str, left_out: LeftOut) -> Iterator[Document]:
    """The documents of one file; blank ones are counted in `left_out` instead.

    key: the key of the document that a plain text file makes. Raises Unusable if the file cannot
    be read as text, and DataError for a line of a JSON lines file that has no text.
    """
    kind = kind_of(path)
    if kind == "text":
        text = whole_text(path)
        if text.strip():
            yield Document(key, text)
        else:
            left_out.add(BLANK, key)
        return
    empty = True
    texts = _line_texts if kind == "lines" else _row_texts
    for number, text in texts(path, json_key):
        empty = False
        if text.strip():
            # The key is made from the text, not from the line number, so that the choice of the
            # held-out texts does not depend on the order of the lines.
            yield Document(hashlib.sha256(text.encode()).hexdigest(), text)
        else:
            left_out.add(BLANK, f"{key}:{number}")
    if empty:
        left_out.add(BLANK, key)


def _line_texts(path: Path, json_key: str) -> Iterator[tuple[int, str]]:
    """(line number from 1, text) for the lines of a JSON lines file that are not blank."""
    for number, line in _lines(path):
        try:
            yield number, text_of(line, json_key)
        except BadLine as error:
            raise DataError(f"{path}:{number}: {error}") from error


def _row_texts(path: Path, column: str) -> Iterator[tuple[int, str]]:
    """(row number from 1, text) for the rows of a Parquet file."""
    try:
        groups = len(parquet.row_groups(path, column))
        rows = (text for group in range(groups) for text in parquet.texts(path, column, group))
        for number, text in enumerate(rows, start=1):
            if text is None:
                raise DataError(f"{path}: row {number} has {parquet.NO_TEXT}")
            yield number, text
    except (OSError, parquet.DamagedParquet) as error:
        raise _unreadable(error) from error


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """The content of a file, decompressed if its name ends in .gz or .zst.

    Raises Unusable if the file cannot be opened, or if reading it in the context fails; DataError
    if the package that decompresses it is missing.
    """
    try:
        with open(path, "rb") as raw:
            yield decompressed(raw, path)
    except (OSError, *DAMAGE) as error:
        raise _unreadable(error) from error


def _unreadable(error: Exception) -> Unusable:
    return Unusable(UNREADABLE, getattr(error, "strerror", None) or str(error))


def whole_text(path: Path) -> str:
    """The content of a text file, without a byte order mark at its start.

    Raises Unusable if it cannot be read, or is not UTF-8 text.
    """
    with _opened(path) as file:
        content = file.read()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        utf16 = content.startswith((b"\xff\xfe", b"\xfe\xff"))  # its text contains zero bytes
        raise Unusable(BINARY if b"\0" in content and not utf16 else NOT_UTF8) from error
    if "\0" in text:
        raise Unusable(BINARY)
    return text


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """(line number from 1, line) for the lines of a file that are not blank.

    Bytes that are not UTF-8 become surrogate characters, so that `text_of` can name the byte.
    """
    with _opened(path) as file:
        # utf-8-sig: some editors write a byte order mark at the start of a file.
        lines = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape")
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield number, line


def kind_of(path: Path) -> Kind:
    """How a file is read, by its extension; a .json file is JSON lines if its first line is one.

    Raises Unusable if the first line of a .json file cannot be read, and DataError if a package
    that reads the file is missing.
    """
    check_packages(path)
    suffix = suffix_of(path)
    if path.suffix.lower() == ".parquet":
        parquet.check_package(path)
        return "parquet"
    # Megatron's own tool reads JSON lines from .json files too.
    is_lines = suffix == ".jsonl" or (suffix == ".json" and _starts_with_object(path))
    return "lines" if is_lines else "text"


def _starts_with_object(path: Path) -> bool:
    first = next((line for _, line in _lines(path)), "")
    try:
        return isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        return False
