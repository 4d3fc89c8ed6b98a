"""Parts: the files that hold the tokens of a block each until all blocks are tokenized.

A part begins with two lines of JSON, its header and the list of its problems. The arrays of the two
sides follow, first those to train on and then those held out: the tokens, and the length of each
document in tokens (int32), 0 for an empty one. A part is written under another name and renamed
when it is complete.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import numpy.typing

from megatron_fp4.mcore.data.corpus.blocks import START, Cursor

PROBLEMS_SHOWN = 3
SIDES = ("train", "held_out")  # as in manifest.DATASETS
_PREFIX, _PARTIAL = "part-", "partial-"
_LENGTH = numpy.dtype(numpy.int32)

Array = numpy.typing.NDArray[Any]


class Problem(NamedTuple):
    """A line or a file that was left out. place: file, or file and line number."""

    place: str
    reason: str


@dataclass
class Count:
    """What a side has: documents, those of them that are not empty, tokens, bytes of text."""

    documents: int = 0
    filled: int = 0
    tokens: int = 0
    bytes: int = 0

    def __add__(self, other: "Count") -> "Count":
        return Count(
            self.documents + other.documents,
            self.filled + other.filled,
            self.tokens + other.tokens,
            self.bytes + other.bytes,
        )


@dataclass
class Header:
    """What a part has.

    number, begin, end, position: of its block. counts: of each side. left_out: the number of
    problems. problems: the first of them. The header has no more, since all headers are in memory.
    """

    number: int
    begin: Cursor
    end: Cursor
    position: int
    counts: dict[str, Count]
    left_out: int
    problems: list[Problem]


class Side(NamedTuple):
    """The arrays of one side of a part."""

    tokens: Array
    lengths: Array


class Part(NamedTuple):
    """The content of a part. problems: all of them."""

    header: Header
    problems: list[Problem]
    sides: dict[str, Side]


def write(folder: Path, part: Part) -> None:
    """Writes a part to `folder`. Raises OSError."""
    header, problems, sides = part
    partial = folder / f"{_PARTIAL}{header.number:08}.{os.getpid()}"
    with partial.open("wb") as file:
        file.write(json.dumps(asdict(header)).encode() + b"\n")
        file.write(json.dumps(problems).encode() + b"\n")
        for name in SIDES:
            file.write(sides[name].tokens.tobytes())
            file.write(sides[name].lengths.astype(_LENGTH).tobytes())
        file.flush()
        os.fsync(file.fileno())
    partial.replace(_path(folder, header.number))


def problems(folder: Path, header: Header) -> list[Problem]:
    """All problems of a part."""
    with _path(folder, header.number).open("rb") as file:
        file.readline()
        return [Problem(*problem) for problem in json.loads(file.readline())]


def finished(folder: Path, token_bytes: int) -> list[Header]:
    """The headers of the complete parts from the first one on, up to the first that is missing.

    Each of them continues where the one before it ends. token_bytes: of a token.
    """
    found: list[Header] = []
    while (header := _header(_path(folder, len(found)), token_bytes)) is not None:
        if header.begin != (found[-1].end if found else START):
            break
        found.append(header)
    return found


def any_finished(folder: Path) -> bool:
    """Whether the folder has a complete part."""
    return any(path.name.startswith(_PREFIX) for path in folder.iterdir())


def drop_after(folder: Path, count: int) -> None:
    """Deletes all parts but the first `count`, and what interrupted writes have left."""
    for path in folder.iterdir():
        stale = path.name.startswith(_PREFIX) and int(path.name.removeprefix(_PREFIX)) >= count
        if stale or path.name.startswith(_PARTIAL):
            path.unlink()


def lengths(folder: Path, header: Header, side: str, token_bytes: int) -> Array:
    """The lengths of the documents of a side of a part, in tokens."""
    path = _path(folder, header.number)
    start = _start(path, header, side, token_bytes) + header.counts[side].tokens * token_bytes
    return numpy.fromfile(path, _LENGTH, header.counts[side].documents, offset=start)


def tokens(folder: Path, header: Header, side: str, token_bytes: int) -> bytes:
    """The tokens of a side of a part, as they are written to a .bin file."""
    path = _path(folder, header.number)
    with path.open("rb") as file:
        file.seek(_start(path, header, side, token_bytes))
        return file.read(header.counts[side].tokens * token_bytes)


def _path(folder: Path, number: int) -> Path:
    return folder / f"{_PREFIX}{number:08}"


def _start(path: Path, header: Header, side: str, token_bytes: int) -> int:
    """Where the arrays of a side begin in the file, in bytes."""
    start = path.stat().st_size
    for name in reversed(SIDES):
        start -= _bytes_of(header.counts[name], token_bytes)
        if name == side:
            break
    return start


def _bytes_of(count: Count, token_bytes: int) -> int:
    return count.tokens * token_bytes + count.documents * _LENGTH.itemsize


def _header(path: Path, token_bytes: int) -> Header | None:
    """The header of a part; None if there is no such part, or if it is not complete."""
    try:
        with path.open("rb") as file:
            line = file.readline()
            lines = len(line) + len(file.readline())
        found = json.loads(line)
        header = Header(
            found["number"],
            Cursor(*found["begin"]),
            Cursor(*found["end"]),
            found["position"],
            {side: Count(**found["counts"][side]) for side in SIDES},
            found["left_out"],
            [Problem(*problem) for problem in found["problems"]],
        )
    except (OSError, ValueError, LookupError, TypeError):
        return None
    arrays = sum(_bytes_of(header.counts[side], token_bytes) for side in SIDES)
    return header if path.stat().st_size == lines + arrays else None
