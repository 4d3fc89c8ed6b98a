"""The files of Megatron's indexed datasets: which a launch uses, and whether they are complete.

A dataset is named by its prefix. PREFIX.bin contains the tokens of all sequences, one after the
other. PREFIX.idx is the index: the length of each sequence and its place in PREFIX.bin.
launch/refusals/dataset.py refuses launches whose datasets cannot be used.
"""

import argparse
import json
import struct
from pathlib import Path
from typing import NamedTuple

import numpy
from megatron.core.datasets.indexed_dataset import _INDEX_HEADER, DType
from megatron.core.datasets.object_storage_utils import is_object_storage_path
from megatron.training.utils import get_blend_and_blend_per_split

# The header of an .idx file: magic, version, code of the tokens' dtype, sequences, documents.
_INDEX = struct.Struct("<9sQBQQ")
# How many tokens at the start of a dataset are compared with the vocabulary before training. If a
# tokenizer of a larger vocabulary made the data, one of these is normally beyond the vocabulary.
_TOKENS_SEEN = 2**16


class _Head(NamedTuple):
    """The header of an .idx file.

    magic, version: of the file format. code: the tokens' dtype, as megatron.core's DType numbers
    it. sequences: the number of sequences. documents: the number of document boundaries, which is
    one more than the number of documents.
    """

    magic: bytes
    version: int
    code: int
    sequences: int
    documents: int


def head(dtype: type[numpy.number], sequences: int, boundaries: int) -> bytes:
    """The header of an .idx file. dtype: of a token. boundaries: the number of documents plus 1."""
    return _INDEX.pack(_INDEX_HEADER, 1, DType.code_from_dtype(dtype), sequences, boundaries)


def prefixes(args: argparse.Namespace) -> list[str]:
    """The prefixes of all datasets that a launch uses, of all splits. args: Megatron's."""
    blend, per_split = get_blend_and_blend_per_split(args)
    blends = [one for one in [blend, *(per_split or [])] if one is not None]
    return [prefix for prefixes, _ in blends for prefix in prefixes]


def is_list_of_splits(path: Path) -> bool:
    """Whether a file has the format that --per-split-data-args-path expects.

    That is a JSON object with a string or a list under each of "train", "valid" and "test".
    """
    try:
        splits = json.loads(path.read_bytes())
        return all(isinstance(splits[name], str | list) for name in ("train", "valid", "test"))
    except (OSError, ValueError, TypeError, LookupError, RecursionError):
        return False


def flaw_of(prefix: str) -> str | None:
    """Why a dataset cannot be read, and what to do, as text for an error line; None if it can.

    Checks that both files exist, that the header is Megatron's, that neither file is truncated, and
    that there is a sequence. Without this check upstream fails with an AttributeError. A dataset in
    an object store is not checked: None.
    """
    if is_object_storage_path(prefix):
        return None
    index, data = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    for file in (index, data):
        if not file.is_file():
            return (
                f"{file} does not exist; give the prefix of a .bin and .idx pair, as "
                "tools/prepare_data.py and tools/preprocess.py write them"
            )
    head = _head_of(prefix)
    if head.magic != _INDEX_HEADER or head.version != 1 or head.code not in DType:
        flaw = f"{index} is not an index of Megatron's"
    elif index.stat().st_size < _INDEX.size + 12 * head.sequences + 8 * head.documents:
        flaw = f"{index} is cut short"
    elif head.sequences == 0:
        flaw = f"{index} lists no text"
    elif 0 < _end_of_data(index, head) <= data.stat().st_size:
        return None
    else:
        flaw = f"{data} is cut short"
    return f"{flaw}; prepare it again"


def sequences_of(prefix: str) -> int | None:
    """The number of sequences of a complete dataset; None if it is in an object store.

    That is also the number of its documents if each document is one sequence, as prepare_data.py
    writes them.
    """
    return None if is_object_storage_path(prefix) else _head_of(prefix).sequences


def tokens_of(prefix: str) -> int | None:
    """The number of tokens of a complete dataset; None if it is in an object store."""
    if is_object_storage_path(prefix):
        return None
    return Path(f"{prefix}.bin").stat().st_size // DType.size(_type_of(prefix))


def largest_token(prefix: str) -> int | None:
    """The largest of the first 65,536 tokens of a complete dataset.

    None if the dataset is in an object store.
    """
    if is_object_storage_path(prefix):
        return None
    return int(numpy.fromfile(f"{prefix}.bin", _type_of(prefix), _TOKENS_SEEN).max())


def _head_of(prefix: str) -> _Head:
    with Path(f"{prefix}.idx").open("rb") as stream:
        return _Head(*_INDEX.unpack(stream.read(_INDEX.size).ljust(_INDEX.size, b"\0")))


def _type_of(prefix: str) -> type[numpy.number]:
    kind: type[numpy.number] = DType.dtype_from_code(_head_of(prefix).code)
    return kind


def _end_of_data(index: Path, head: _Head) -> int:
    """The size in bytes that the .bin file should have, computed from the index.

    After its header an .idx file has the length of each sequence (int32, in tokens), then the
    offset of each sequence in the .bin file (int64, in bytes). The last sequence ends the .bin
    file.
    """
    length_at = _INDEX.size + 4 * head.sequences - 4
    start_at = _INDEX.size + 12 * head.sequences - 8
    [length] = numpy.fromfile(index, numpy.int32, 1, offset=length_at)
    [start] = numpy.fromfile(index, numpy.int64, 1, offset=start_at)
    return int(start) + int(length) * int(DType.size(DType.dtype_from_code(head.code)))
