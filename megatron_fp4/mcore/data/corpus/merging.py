"""Merges parts into a dataset of Megatron's, in memory that does not depend on its size.

dataset_files.py describes the files. The result is byte for byte what Megatron's
IndexedDatasetBuilder writes for the same documents.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy

from megatron_fp4.mcore.data import dataset_files
from megatron_fp4.mcore.data.corpus import parts
from megatron_fp4.mcore.data.corpus.parts import Array, Header


def merge(folder: Path, headers: list[Header], side: str, prefix: Path, dtype: str) -> None:
    """Writes prefix.bin and prefix.idx from the parts in `folder`.

    side: which documents of the parts, "train" or "held_out". dtype: of a token. Each file is
    written under another name and renamed when it is complete. Raises OSError.
    """
    size = numpy.dtype(dtype).itemsize
    partial = prefix.with_name(f".{prefix.name}.partial")
    with partial.open("wb") as file:
        for header in headers:
            file.write(parts.tokens(folder, header, side, size))
        _finish(file, partial, Path(f"{prefix}.bin"))
    with partial.open("wb") as file:
        _write_index(file, folder, headers, side, dtype)
        _finish(file, partial, Path(f"{prefix}.idx"))


def _finish(file: IO[bytes], partial: Path, path: Path) -> None:
    file.flush()
    os.fsync(file.fileno())
    partial.replace(path)


def _write_index(
    file: IO[bytes], folder: Path, headers: list[Header], side: str, dtype: str
) -> None:
    """Writes an .idx file: its head, then the arrays of sequences and of documents.

    A document is one sequence, or none if it is empty. The arrays are the length of each sequence
    (int32, in tokens), its place in the .bin file (int64, in bytes), and for each document the
    number of sequences up to its end (int64), after a 0.
    """
    size = numpy.dtype(dtype).itemsize
    documents = sum(header.counts[side].documents for header in headers)
    sequences = sum(header.counts[side].filled for header in headers)

    def lengths() -> Iterator[Array]:
        for header in headers:
            yield parts.lengths(folder, header, side, size)

    file.write(dataset_files.head(numpy.dtype(dtype).type, sequences, documents + 1))
    for found in lengths():
        file.write(found[found > 0].tobytes())
    at = 0
    for found in lengths():
        ends = at + size * numpy.cumsum(found[found > 0], dtype=numpy.int64)
        file.write(numpy.concatenate([[at], ends]).astype(numpy.int64)[:-1].tobytes())
        at = int(ends[-1]) if ends.size else at
    file.write(numpy.zeros(1, numpy.int64).tobytes())
    count = 0
    for found in lengths():
        ends = count + numpy.cumsum(found > 0, dtype=numpy.int64)
        file.write(ends.tobytes())
        count = int(ends[-1]) if ends.size else count
