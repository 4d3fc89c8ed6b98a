"""Indexed datasets as files: which ones a launch names, whether they are whole, what they hold.

A dataset goes by its prefix: PREFIX.idx is Megatron's index of what PREFIX.bin holds, one token
after the other. launch/refusals/dataset.py says which launches are refused for them.
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

_INDEX = struct.Struct("<9sQBQQ")  # of an .idx: magic, version, tokens' type, sequences, documents
_TOKENS_SEEN = 2**16  # of each dataset, before training: another tokenizer's show soon


class _Head(NamedTuple):
    """The start of an .idx. code: of the tokens' type, in megatron.core's DType."""

    magic: bytes
    version: int
    code: int
    sequences: int
    documents: int


def prefixes(args: argparse.Namespace) -> list[str]:
    """The datasets that a launch names, of all splits. args: Megatron's."""
    blend, per_split = get_blend_and_blend_per_split(args)
    blends = [one for one in [blend, *(per_split or [])] if one is not None]
    return [prefix for prefixes, _ in blends for prefix in prefixes]


def is_list_of_splits(path: Path) -> bool:
    """Whether a file is what --per-split-data-args-path names."""
    try:
        splits = json.loads(path.read_bytes())
        return all(isinstance(splits[name], str | list) for name in ("train", "valid", "test"))
    except (OSError, ValueError, TypeError, LookupError, RecursionError):
        return False


def flaw_of(prefix: str) -> str | None:
    """What a dataset lacks to be whole and of Megatron's making, and what to do; None if nothing,
    or if it lies in an object store. Upstream would fail with an AttributeError."""
    if is_object_storage_path(prefix):
        return None
    index, data = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    for file in (index, data):
        if not file.is_file():
            return (
                f"{file} does not exist; give the prefix of a .bin and .idx pair, as "
                "tools/prepare_data.py writes them"
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
    """The number of sequences in a whole dataset: its documents, where each is one sequence. None
    if it lies in an object store."""
    return None if is_object_storage_path(prefix) else _head_of(prefix).sequences


def tokens_of(prefix: str) -> int | None:
    """The number of tokens in a whole dataset; None if it lies in an object store."""
    if is_object_storage_path(prefix):
        return None
    return Path(f"{prefix}.bin").stat().st_size // DType.size(_type_of(prefix))


def largest_token(prefix: str) -> int | None:
    """The largest of a whole dataset's first tokens; None if it lies in an object store."""
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
    """How many bytes the .bin of an index has. After its head, an .idx has the sequences' lengths
    in int32, then their places in the .bin in int64: the last ones say where that ends."""
    length_at = _INDEX.size + 4 * head.sequences - 4
    start_at = _INDEX.size + 12 * head.sequences - 8
    [length] = numpy.fromfile(index, numpy.int32, 1, offset=length_at)
    [start] = numpy.fromfile(index, numpy.int64, 1, offset=start_at)
    return int(start) + int(length) * int(DType.size(DType.dtype_from_code(head.code)))
