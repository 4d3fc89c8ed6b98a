"""Reads documents from files and folders: plain text or JSON lines, each also compressed by gzip.

JSON lines has one JSON object on each line, which contains a document's text under some key.
"""

import gzip
import hashlib
import json
import os
import stat
import sysconfig
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

from megatron_fp4.mcore.data import manifest

# Folders of the standard library that are not read: installed packages, tests, and generated tables
# and text. A single generated file could be larger than all other files that are held out.
NOT_LIBRARY = {"dist-packages", "site-packages", "__pycache__"}
NOT_LIBRARY |= {"idle_test", "test", "tests", "encodings", "pydoc_data"}

# The reasons for not reading a file or a document, with what the user can do about it.
BINARY = "binary, with zero bytes (unpack archives first; of packed files only .gz is read)"
NOT_UTF8 = "not UTF-8 text (convert it first, for example with iconv)"
UNREADABLE = "not readable"
NOT_A_FILE = "neither a file nor a folder"
LINKED_FOLDER = "a link to a folder (name that folder on the command line to have it read)"
HIDDEN = "hidden"
BLANK = "blank"
PREPARED = "written by prepare_data"


class DataError(ValueError):
    """The text or an option cannot be used; the message is one line for the user."""


class Document(NamedTuple):
    """One text of the data, which is not divided between training and validation.

    key: a file's path, or the SHA-256 of a JSON line's text. Documents are sorted by its hash.
    """

    key: str
    text: str


class LeftOut:
    """Counts what was found and not read: for each reason the number, and the first few names."""

    NAMES = 3

    def __init__(self) -> None:
        self._found: dict[str, tuple[int, list[str]]] = {}

    def add(self, reason: str, name: str) -> None:
        """Counts one file, folder or JSON line, called `name`, as left out for this reason."""
        count, names = self._found.get(reason, (0, []))
        self._found[reason] = (count + 1, [*names, name][: self.NAMES])

    def lines(self) -> list[str]:
        """One line of text for each reason, for the user."""
        lines = []
        for reason, (count, names) in self._found.items():
            more = f" and {count - len(names)} more" if count > len(names) else ""
            lines.append(f"left out {count}, {reason}: {', '.join(names)}{more}")
        return lines


class _Unusable(Exception):
    """A file cannot be read as text.

    reason: one of the constants above, such as BINARY. detail: more about this file, or None.
    """

    def __init__(self, reason: str, detail: str | None = None) -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail = reason, detail


def library_documents() -> Iterator[Document]:
    """The .py files of Python's standard library, without its tests and generated files."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if NOT_LIBRARY.isdisjoint(name.parts):
            try:
                yield from _file_documents(path, name.as_posix(), "", LeftOut())
            except _Unusable:  # some Linux distributions add files that are not readable text
                continue


def documents_at(path: Path, json_key: str, left_out: LeftOut) -> Iterator[Document]:
    """The documents of the file `path`, or of every text file under the folder `path`.

    Blank documents, and files of a folder that cannot be read as text, are left out and counted in
    `left_out`. A .json file of a folder that is not JSON lines is read as plain text.

    Raises DataError if `path` itself does not exist or cannot be read as text, and for a line of a
    JSON lines file that is not an object with a string under `json_key`.
    """
    try:
        if os.path.isdir(path):  # does not raise, unlike Path.is_dir
            yield from _folder_documents(path, json_key, left_out)
            return
        _check_regular(path)
        if _suffix(path) == ".json" and not _holds_json_lines(path):
            raise DataError(
                f"{path} is not JSON lines: give each text an object on a line of its own, as "
                f'{{"{json_key}": "..."}}'
            )
        yield from _file_documents(path, shown(path.name), json_key, left_out)
    except _Unusable as error:
        raise DataError(f"{path}: {error}") from error


def _folder_documents(root: Path, json_key: str, left_out: LeftOut) -> Iterator[Document]:
    for path in _files(root, left_out):
        name = shown(path.relative_to(root))
        try:
            _check_regular(path)
            documents = list(_file_documents(path, name, json_key, left_out))
        except _Unusable as error:
            left_out.add(error.reason, f"{name} ({error.detail})" if error.detail else name)
        else:
            yield from documents


def _files(root: Path, left_out: LeftOut) -> Iterator[Path]:
    """The files under `root` that may be text, at any depth; others are counted in `left_out`.

    Hidden files and folders, links to folders, the output of prepare_data, and folders that cannot
    be read are left out.
    """

    def unreadable(error: OSError) -> None:
        name = shown(os.path.relpath(error.filename, root))
        left_out.add(UNREADABLE, f"{name} ({error.strerror})")

    for folder, folders, files in os.walk(root, onerror=unreadable):
        here = Path(folder)
        outputs, inner = manifest.outputs_in(here), set(folders)
        enter = []
        for name in sorted(folders + files):
            path = here / name
            if name.startswith("."):
                left_out.add(HIDDEN, shown(path.relative_to(root)))
            elif name in outputs:
                left_out.add(PREPARED, shown(path.relative_to(root)))
            elif name not in inner:
                yield path
            elif path.is_symlink():  # to a folder, perhaps one that contains this folder
                left_out.add(LINKED_FOLDER, shown(path.relative_to(root)))
            else:
                enter.append(name)
        folders[:] = enter  # os.walk enters the folders that remain in this list


def shown(path: Path | str) -> str:
    """The path as a string to print and to hash; bytes that are not UTF-8 become escapes."""
    return os.fsencode(Path(path).as_posix()).decode(errors="backslashreplace")


def _check_regular(path: Path) -> None:
    try:
        mode = path.stat().st_mode
    except OSError as error:  # missing, a broken link, a loop of links, no permission
        raise _Unusable(UNREADABLE, error.strerror) from error
    if not stat.S_ISREG(mode):  # opening a pipe would wait until something writes to it
        raise _Unusable(NOT_A_FILE)


def _file_documents(path: Path, key: str, json_key: str, left_out: LeftOut) -> Iterator[Document]:
    """The documents of one file; blank ones are counted in `left_out` instead.

    key: the key of the document that a plain text file makes. Raises _Unusable if the file cannot
    be read as text, and DataError for a line of a JSON lines file that has no text.
    """
    if not _holds_json_lines(path):
        text = _whole_text(path)
        if text.strip():
            yield Document(key, text)
        else:
            left_out.add(BLANK, key)
        return
    empty = True
    for number, line in _lines(path):
        empty = False
        text = _json_text(line, json_key, f"{path}:{number}")
        if text.strip():
            # The key is made from the text, not from the line number, so that the choice of the
            # held-out texts does not depend on the order of the lines.
            yield Document(hashlib.sha256(text.encode()).hexdigest(), text)
        else:
            left_out.add(BLANK, f"{key}:{number}")
    if empty:
        left_out.add(BLANK, key)


@contextmanager
def _opened(path: Path, mode: str, **text_mode: str) -> Iterator[IO[Any]]:
    """The open file, decompressed if its name ends in .gz.

    Raises _Unusable if the file cannot be opened, or if reading it in the context fails.
    """
    open_file: Any = gzip.open if path.suffix.lower() == ".gz" else open
    try:
        with open_file(path, mode, **text_mode) as file:
            yield file
    except (OSError, EOFError, zlib.error) as error:
        raise _Unusable(UNREADABLE, getattr(error, "strerror", None) or str(error)) from error


def _suffix(path: Path) -> str:
    """The file name's extension in lower case, without a trailing .gz: ".jsonl" for a.jsonl.gz."""
    kind = path.suffix.lower()
    return Path(path.stem).suffix.lower() if kind == ".gz" else kind


def _whole_text(path: Path) -> str:
    with _opened(path, "rb") as file:
        content = file.read()
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        utf16 = content.startswith((b"\xff\xfe", b"\xfe\xff"))  # its text contains zero bytes
        raise _Unusable(BINARY if b"\0" in content and not utf16 else NOT_UTF8) from error
    if "\0" in text:
        raise _Unusable(BINARY)
    return text


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """(line number from 1, line) for the lines of a file that are not blank.

    Bytes that are not UTF-8 become surrogate characters, so that `_json_text` can name the line.
    """
    # utf-8-sig: some editors write a byte order mark at the start of a file.
    with _opened(path, "rt", encoding="utf-8-sig", errors="surrogateescape") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, line


def _holds_json_lines(path: Path) -> bool:
    if _suffix(path) != ".json":
        return _suffix(path) == ".jsonl"
    # Megatron's own tool reads JSON lines from .json files too.
    first = next((line for _, line in _lines(path)), "")
    try:
        return isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        return False


def _json_text(line: str, json_key: str, place: str) -> str:
    try:
        line.encode()
    except UnicodeEncodeError as error:
        byte = ord(line[error.start]) - 0xDC00
        raise DataError(
            f"{place}: not UTF-8: byte 0x{byte:02x} after {error.start} characters; mend or delete "
            "the line, or convert the file (iconv -c -t utf-8 drops such bytes)"
        ) from error
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: not a JSON object: {error}") from error
    text = record.get(json_key) if isinstance(record, dict) else None
    if isinstance(record, dict) and json_key in record and not isinstance(text, str):
        raise DataError(
            f'{place}: what the key "{json_key}" has is no string: mend or delete the line'
        )
    if not isinstance(text, str):
        raise DataError(f'{place}: no text under the key "{json_key}"; name the key by --json-key')
    return text.encode(errors="replace").decode()  # JSON can contain half of a surrogate pair
