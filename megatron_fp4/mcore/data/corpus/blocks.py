"""Divides a corpus into blocks, which workers tokenize independently of each other.

JSON lines are divided between lines and Parquet files between row groups; a file of plain text is
never divided. Files smaller than a block are put together.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal, NamedTuple

from megatron_fp4.mcore.data import parquet
from megatron_fp4.mcore.data.errors import DataError
from megatron_fp4.mcore.data.opening import DAMAGE, decompressed, is_compressed
from megatron_fp4.mcore.data.text import Kind

_READ_BYTES = 2**20  # of decompressed content at a time


class SourceFile(NamedTuple):
    """A file of the corpus. size: in bytes on the disk. mtime_ns: when it was changed last."""

    path: str
    kind: Kind
    size: int
    mtime_ns: int


class Cursor(NamedTuple):
    """A place in the corpus between two documents.

    source: the number of the file. offset: where in it: a number of bytes of decompressed JSON
    lines, or of row groups of Parquet. before: the number of lines or rows before that place.
    """

    source: int = 0
    offset: int = 0
    before: int = 0


START = Cursor()


class FilePiece(NamedTuple):
    """A part of one file.

    kind: as of the file; "damaged" stands for the rest of a file, which cannot be read.
    before: the number of lines or rows of the file before the piece.
    content: of JSON lines, the lines; of "damaged", the reason. Empty otherwise: the worker reads
    the file. group: the number of the row group of Parquet.
    """

    path: str
    kind: Kind | Literal["damaged"]
    before: int = 0
    content: bytes = b""
    group: int = 0


@dataclass(frozen=True)
class Block:
    """Consecutive pieces of a corpus.

    number: counted from 0. begin, end: what it covers. position: how many bytes of the corpus on
    the disk have been read at its end.
    """

    number: int
    begin: Cursor
    end: Cursor
    position: int
    pieces: list[FilePiece]


class _Step(NamedTuple):
    """A piece, the place where it ends, its size in memory, and the bytes read of its file."""

    piece: FilePiece
    end: Cursor
    size: int
    position: int


def blocks(
    sources: list[SourceFile], column: str, size: int, number: int = 0, begin: Cursor = START
) -> Iterator[Block]:
    """The blocks of a corpus, from the place `begin` on.

    column: the key of JSON lines and the column of Parquet that has the text. size: of a block in
    bytes; the last one may be smaller, and a line, a row group or a text file may be larger.
    number: of the first block. Raises DataError if a file cannot be read, or if a Parquet file has
    no such column.
    """
    pieces: list[FilePiece] = []
    held = read = 0
    end = begin
    before = sum(source.size for source in sources[: begin.source])
    for index, source in enumerate(sources[begin.source :], start=begin.source):
        start = begin if index == begin.source else Cursor(index)
        for step in _steps(source, start, column, size):
            pieces.append(step.piece)
            held, read, end = held + step.size, before + step.position, step.end
            if held >= size:
                yield Block(number, begin, end, read, pieces)
                number, begin, pieces, held = number + 1, end, [], 0
        before += source.size
    if pieces:
        yield Block(number, begin, end, before, pieces)


def _steps(source: SourceFile, start: Cursor, column: str, size: int) -> Iterator[_Step]:
    try:
        yield from _steps_of_kind(source, start, column, size)
    except OSError as error:
        raise DataError(
            f"{source.path} cannot be read: {error.strerror or error}; when it can be, the same "
            "command goes on"
        ) from error


def _steps_of_kind(source: SourceFile, start: Cursor, column: str, size: int) -> Iterator[_Step]:
    if source.kind == "text":
        piece = FilePiece(source.path, "text")
        yield _Step(piece, Cursor(start.source + 1), source.size, source.size)
    elif source.kind == "lines":
        yield from _line_steps(source, start, size)
    else:
        yield from _row_steps(source, start, column)


def _row_steps(source: SourceFile, start: Cursor, column: str) -> Iterator[_Step]:
    try:
        groups = parquet.row_groups(Path(source.path), column)
    except parquet.DamagedParquet as error:
        yield _damaged(source, start, str(error))
        return
    before = start.before
    for group, (rows, held) in enumerate(groups[start.offset :], start=start.offset):
        piece = FilePiece(source.path, "parquet", before, group=group)
        before += rows
        position = source.size * (group + 1) // len(groups)
        yield _Step(piece, Cursor(start.source, group + 1, before), held, position)


def _line_steps(source: SourceFile, start: Cursor, size: int) -> Iterator[_Step]:
    path, at = Path(source.path), start
    with path.open("rb") as raw:
        try:
            for content in _whole_lines(_chunks(raw, path, start.offset), size):
                piece = FilePiece(source.path, "lines", at.before, content)
                lines = content.count(b"\n")
                at = Cursor(at.source, at.offset + len(content), at.before + lines)
                yield _Step(piece, at, len(content), raw.tell())
        except _Rest as rest:
            yield _damaged(source, at, str(rest))


def _damaged(source: SourceFile, at: Cursor, reason: str) -> _Step:
    piece = FilePiece(source.path, "damaged", at.before, reason.encode())
    return _Step(piece, Cursor(at.source + 1), 0, source.size)


class _Rest(Exception):
    """The rest of a file cannot be read; the message has the reason."""


def _chunks(raw: IO[bytes], path: Path, offset: int) -> Iterator[bytes]:
    """The content of a file from `offset` on, decompressed. Raises _Rest where it is damaged.

    A compressed file is read from its start, in the same steps for every offset. So the same
    content comes before a damaged place.
    """
    if not is_compressed(path):
        raw.seek(offset)
        offset = 0
    stream = decompressed(raw, path)
    try:
        while chunk := stream.read1(_READ_BYTES):  # type: ignore[attr-defined]
            if content := chunk[offset:]:
                yield content
            offset = max(0, offset - len(chunk))
    except DAMAGE as error:
        raise _Rest(str(error)) from error


def _whole_lines(chunks: Iterator[bytes], size: int) -> Iterator[bytes]:
    """Joins and divides `chunks` into whole lines, of about `size` bytes at a time.

    The last line of a file may lack its newline. If the file is damaged, the line in which the
    damage begins is dropped.
    """
    held: list[bytes] = []
    length = 0
    try:
        for chunk in chunks:
            held.append(chunk)
            length += len(chunk)
            if length >= size and (cut := chunk.rfind(b"\n") + 1):
                content = b"".join(held)
                length = len(chunk) - cut
                yield content[: len(content) - length]
                held = [chunk[cut:]]
    except _Rest:
        content = b"".join(held)
        if whole := content[: content.rfind(b"\n") + 1]:
            yield whole
        raise
    if length:
        yield b"".join(held)
