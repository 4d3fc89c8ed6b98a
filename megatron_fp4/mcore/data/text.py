"""Reads documents from files and folders: text, JSON lines, and either of them packed by gzip."""

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

# What lies among the library's sources and is not written as such: installed packages, tests, and
# generated tables and text, of which one file may outweigh all the others held out.
NOT_LIBRARY = {"dist-packages", "site-packages", "__pycache__"}
NOT_LIBRARY |= {"idle_test", "test", "tests", "encodings", "pydoc_data"}

# Why something is not read, with the remedy where there is one.
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
    """A text that stays whole, and the key whose hash decides its place in the order."""

    key: str
    text: str


class LeftOut:
    """What was found and not read: for each reason how many, and the first few names."""

    NAMES = 3

    def __init__(self) -> None:
        self._found: dict[str, tuple[int, list[str]]] = {}

    def add(self, reason: str, name: str) -> None:
        """Counts one file, folder or JSON line."""
        count, names = self._found.get(reason, (0, []))
        self._found[reason] = (count + 1, [*names, name][: self.NAMES])

    def lines(self) -> list[str]:
        """One line for each reason."""
        lines = []
        for reason, (count, names) in self._found.items():
            more = f" and {count - len(names)} more" if count > len(names) else ""
            lines.append(f"left out {count}, {reason}: {', '.join(names)}{more}")
        return lines


class _Unusable(Exception):
    """A file cannot be read as text: one of the reasons above, and more about this file."""

    def __init__(self, reason: str, detail: str | None = None) -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail = reason, detail


def library_documents() -> Iterator[Document]:
    """The standard library's .py files, its tests and generated files left out."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if NOT_LIBRARY.isdisjoint(name.parts):
            try:
                yield from _file_documents(path, name.as_posix(), "", LeftOut())
            except _Unusable:  # some distributions add files of their own
                continue


def documents_at(path: Path, json_key: str, left_out: LeftOut) -> Iterator[Document]:
    """The documents of a file, or of every file of text under a folder; blank ones are left out.

    A folder may hold other things beside text: they are counted in left_out. A .json file in it
    that is not JSON lines is text like any other.

    Raises DataError for a path given by name that is not there or cannot be read, and for a line
    of a JSON lines file that is not an object with text under json_key.
    """
    try:
        if os.path.isdir(path):  # unlike Path.is_dir it does not raise
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
    """What lies under root and may be a file of text."""

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
            elif path.is_symlink():  # it may lead back here
                left_out.add(LINKED_FOLDER, shown(path.relative_to(root)))
            else:
                enter.append(name)
        folders[:] = enter  # where os.walk goes on


def shown(path: Path | str) -> str:
    """The path as text to print and to hash, also where its bytes are not UTF-8."""
    return os.fsencode(Path(path).as_posix()).decode(errors="backslashreplace")


def _check_regular(path: Path) -> None:
    try:
        mode = path.stat().st_mode
    except OSError as error:  # not there, a link to nowhere, a loop of links, no permission
        raise _Unusable(UNREADABLE, error.strerror) from error
    if not stat.S_ISREG(mode):  # opening a pipe would wait for someone to write
        raise _Unusable(NOT_A_FILE)


def _file_documents(path: Path, key: str, json_key: str, left_out: LeftOut) -> Iterator[Document]:
    """The file's documents that are not blank. Raises _Unusable, and DataError for a bad line."""
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
            # Keyed by content: which texts are held out is not a matter of their order.
            yield Document(hashlib.sha256(text.encode()).hexdigest(), text)
        else:
            left_out.add(BLANK, f"{key}:{number}")
    if empty:
        left_out.add(BLANK, key)


@contextmanager
def _opened(path: Path, mode: str, **text_mode: str) -> Iterator[IO[Any]]:
    """The open file, unpacked if its name ends in .gz. Raises _Unusable where reading fails."""
    open_file: Any = gzip.open if path.suffix.lower() == ".gz" else open
    try:
        with open_file(path, mode, **text_mode) as file:
            yield file
    except (OSError, EOFError, zlib.error) as error:
        raise _Unusable(UNREADABLE, getattr(error, "strerror", None) or str(error)) from error


def _suffix(path: Path) -> str:
    """What kind of text the name says, with or without .gz behind it: ".jsonl" of a.jsonl.gz."""
    kind = path.suffix.lower()
    return Path(path.stem).suffix.lower() if kind == ".gz" else kind


def _whole_text(path: Path) -> str:
    with _opened(path, "rb") as file:
        content = file.read()
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        utf16 = content.startswith((b"\xff\xfe", b"\xfe\xff"))  # text, with zero bytes in it
        raise _Unusable(BINARY if b"\0" in content and not utf16 else NOT_UTF8) from error
    if "\0" in text:
        raise _Unusable(BINARY)
    return text


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines that are not blank, with their numbers. What is not UTF-8 comes as surrogates, so
    that the line can be named."""
    # utf-8-sig: some editors write a mark at the start.
    with _opened(path, "rt", encoding="utf-8-sig", errors="surrogateescape") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, line


def _holds_json_lines(path: Path) -> bool:
    if _suffix(path) != ".json":
        return _suffix(path) == ".jsonl"
    first = next((line for _, line in _lines(path)), "")  # Megatron's own tool takes .json too
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
    return text.encode(errors="replace").decode()  # JSON can hold half a surrogate pair
