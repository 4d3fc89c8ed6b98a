"""Indexed datasets as files: whether they are there, whole, and within the vocabulary."""

import argparse
import struct
from pathlib import Path

import numpy
from megatron.core.datasets.indexed_dataset import _INDEX_HEADER, DType
from megatron.core.datasets.object_storage_utils import is_object_storage_path
from megatron.training.utils import get_blend_and_blend_per_split

from megatron_fp4.errors import ConfigError

_INDEX = struct.Struct("<9sQBQQ")  # of an .idx: magic, version, tokens' type, sequences, documents
_TOKENS_SEEN = 2**16  # of each dataset, before training: another tokenizer's show soon


def check_files(args: argparse.Namespace) -> None:
    """Raises ConfigError for a dataset that is missing, cut short or not of Megatron's making."""
    for path in (args.data_args_path, args.per_split_data_args_path):
        if path is not None and not Path(path).is_file():
            raise ConfigError(f"no file {path}: it should list the datasets")
    prefixes = _prefixes(args)
    if not (prefixes or args.mock_data):
        raise ConfigError(
            "no data: give --data-path PREFIX (tools/prepare_data.py writes one), or --mock-data"
        )
    for prefix in prefixes:
        _token_type(prefix)


def check_tokens(args: argparse.Namespace) -> None:
    """Raises ConfigError where the start of a dataset holds a token beyond the vocabulary."""
    for prefix in _prefixes(args):
        if kind := _token_type(prefix):
            tokens = numpy.fromfile(f"{prefix}.bin", kind, _TOKENS_SEEN)
            check_vocabulary(int(tokens.max()), args)


def check_vocabulary(token: int, args: argparse.Namespace) -> None:
    """Raises ConfigError for a token that the embedding has no row for."""
    if token >= args.padded_vocab_size:
        raise ConfigError(
            f"token {token} of the data is beyond the vocabulary of {args.padded_vocab_size}: "
            "give the tokenizer that the data was made with (--tokenizer-model, or --vocab-size)"
        )


def _prefixes(args: argparse.Namespace) -> list[str]:
    blend, per_split = get_blend_and_blend_per_split(args)
    blends = [one for one in [blend, *(per_split or [])] if one is not None]
    return [prefix for prefixes, _ in blends for prefix in prefixes]


def _token_type(prefix: str) -> type[numpy.number] | None:
    """The type of a dataset's tokens, None if it lies on no disk. Raises ConfigError for files that
    are missing, cut short or not of Megatron's making; it would fail with an AttributeError."""
    if is_object_storage_path(prefix):
        return None
    index, data = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    for file in (index, data):
        if not file.is_file():
            raise ConfigError(
                f"no dataset at {prefix}: {file} does not exist; give the prefix of a .bin and "
                ".idx pair, as tools/prepare_data.py writes them"
            )
    with index.open("rb") as stream:
        head = stream.read(_INDEX.size).ljust(_INDEX.size, b"\0")
    magic, version, code, sequences, documents = _INDEX.unpack(head)
    if magic != _INDEX_HEADER or version != 1 or code not in DType:
        problem = f"{index} is not an index of Megatron's"
    elif index.stat().st_size < _INDEX.size + 12 * sequences + 8 * documents:
        problem = f"{index} is cut short"
    elif sequences == 0:
        problem = f"{index} lists no text"
    else:
        kind = DType.dtype_from_code(code)
        # int32 lengths, then int64 places in the .bin: the last ones say where that ends.
        length = numpy.fromfile(index, numpy.int32, 1, offset=_INDEX.size + 4 * sequences - 4)
        start = numpy.fromfile(index, numpy.int64, 1, offset=_INDEX.size + 12 * sequences - 8)
        if 0 < int(start[0]) + int(length[0]) * DType.size(kind) <= data.stat().st_size:
            return kind
        problem = f"{data} is cut short"
    raise ConfigError(f"no dataset at {prefix}: {problem}; prepare it again")
