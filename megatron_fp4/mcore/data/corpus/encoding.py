"""Tokenizes a block: what a worker process does."""

import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy

from megatron_fp4.mcore.data import parquet
from megatron_fp4.mcore.data.corpus.blocks import Block, FilePiece
from megatron_fp4.mcore.data.corpus.options import CorpusOptions
from megatron_fp4.mcore.data.corpus.parts import (
    PROBLEMS_SHOWN,
    SIDES,
    Count,
    Header,
    Part,
    Problem,
    Side,
    write,
)
from megatron_fp4.mcore.data.corpus.tokenizers import Tokenizer
from megatron_fp4.mcore.data.errors import DataError
from megatron_fp4.mcore.data.folders import Unusable, shown
from megatron_fp4.mcore.data.json_lines import BadLine, text_of
from megatron_fp4.mcore.data.text import whole_text

_BATCH = 64  # documents given to the tokenizer at a time
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # some editors write it at the start of a file


@dataclass(frozen=True)
class Encoder:
    """Tokenizes blocks into parts. folder: where parts are written."""

    folder: Path
    tokenizer: Tokenizer
    options: CorpusOptions

    def encode(self, block: Block) -> Header:
        """Writes the part of a block and returns its header.

        Raises OSError if it cannot be written, and DataError if a file cannot be read.
        """
        part = tokenized(block, self.tokenizer, self.options)
        write(self.folder, part)
        return part.header


def tokenized(block: Block, tokenizer: Tokenizer, options: CorpusOptions) -> Part:
    """The part of a block. Raises DataError if a file cannot be read."""
    sides = {side: _Builder(tokenizer.dtype) for side in SIDES}
    problems: list[Problem] = []
    for batch in itertools.batched(_texts(block, options.json_key, problems), _BATCH):
        for text, ids in zip(batch, tokenizer.encode(list(batch)), strict=True):
            side = sides[side_of(text, options.held_out_share)]
            # As upstream: a document without tokens stays empty.
            side.add(text, [*ids, tokenizer.eod] if ids else [])
    header = Header(
        block.number,
        block.begin,
        block.end,
        block.position,
        {name: side.count for name, side in sides.items()},
        len(problems),
        problems[:PROBLEMS_SHOWN],
    )
    return Part(header, problems, {name: side.arrays() for name, side in sides.items()})


def _texts(block: Block, column: str, problems: list[Problem]) -> Iterator[str]:
    """The texts of a block in their order; what cannot be read is added to `problems`."""
    for piece in block.pieces:
        for found in texts_of(piece, column):
            if isinstance(found, Problem):
                problems.append(found)
            else:
                yield found


class _Builder:
    """Collects the documents of one side of a part. dtype: of a token."""

    def __init__(self, dtype: str) -> None:
        self.count = Count()
        self._dtype = dtype
        self._tokens = [numpy.empty(0, dtype)]
        self._lengths: list[int] = []

    def add(self, text: str, ids: list[int]) -> None:
        self._tokens.append(numpy.array(ids, self._dtype))
        self._lengths.append(len(ids))
        self.count += Count(1, bool(ids), len(ids), len(text.encode()))

    def arrays(self) -> Side:
        return Side(numpy.concatenate(self._tokens), numpy.array(self._lengths, numpy.int32))


def side_of(text: str, held_out_share: float) -> str:
    """Which of SIDES a document is on: a function of its text, so that copies stay together."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    train, held_out = SIDES
    return held_out if int.from_bytes(digest) < held_out_share * 2**64 else train


def texts_of(piece: FilePiece, column: str) -> Iterator[str | Problem]:
    """The texts of a piece in their order, and a Problem for each line or file without one.

    Blank lines of JSON lines are skipped.
    """
    if piece.kind == "lines":
        yield from _line_texts(piece, column)
    elif piece.kind == "parquet":
        yield from _row_texts(piece, column)
    elif piece.kind == "text":
        try:
            yield whole_text(Path(piece.path))
        except Unusable as error:
            yield Problem(shown(piece.path), str(error))
    else:
        reason = piece.content.decode()
        if piece.before:
            reason = f"damaged after line {piece.before}, the rest left out: {reason}"
        else:
            reason = f"damaged, all of it left out: {reason}"
        yield Problem(shown(piece.path), reason)


def _line_texts(piece: FilePiece, column: str) -> Iterator[str | Problem]:
    content = piece.content if piece.before else piece.content.removeprefix(_BYTE_ORDER_MARK)
    for number, line in enumerate(content.split(b"\n"), start=piece.before + 1):
        if line.strip():
            try:
                yield text_of(line.decode(errors="surrogateescape"), column)
            except BadLine as error:
                yield Problem(f"{shown(piece.path)}:{number}", str(error))


def _row_texts(piece: FilePiece, column: str) -> Iterator[str | Problem]:
    number = piece.before
    try:
        for number, text in enumerate(
            parquet.texts(Path(piece.path), column, piece.group), start=piece.before + 1
        ):
            yield (
                Problem(f"{shown(piece.path)}:{number}", parquet.NO_TEXT) if text is None else text
            )
    except OSError as error:
        raise DataError(f"{piece.path} cannot be read: {error.strerror}") from error
    except parquet.DamagedParquet as error:
        yield Problem(
            shown(piece.path),
            f"damaged after row {number}, the rest of the row group left out: {error}",
        )
