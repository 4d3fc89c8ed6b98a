"""Indexed datasets as files: whether they are there, whole, and of the launch's tokenizer."""

import argparse
import json
import struct
from pathlib import Path

import numpy
from megatron.core.datasets.indexed_dataset import _INDEX_HEADER, DType
from megatron.core.datasets.object_storage_utils import is_object_storage_path
from megatron.core.tokenizers.utils.build_tokenizer import SP_TOKENIZERS
from megatron.training.utils import get_blend_and_blend_per_split

from megatron_fp4.errors import ConfigError
from megatron_fp4.mcore.data import manifest

_INDEX = struct.Struct("<9sQBQQ")  # of an .idx: magic, version, tokens' type, sequences, documents
_TOKENS_SEEN = 2**16  # of each dataset, before training: another tokenizer's show soon


def check_files(args: argparse.Namespace) -> None:
    """Raises ConfigError for a dataset that is missing, cut short or not of Megatron's making."""
    for path in (args.data_args_path, args.per_split_data_args_path):
        if path is not None and not Path(path).is_file():
            raise ConfigError(f"no file {path}: it should list the datasets")
    if args.per_split_data_args_path is not None:
        _check_splits(Path(args.per_split_data_args_path))
    prefixes = _prefixes(args)
    if not (prefixes or args.mock_data):
        raise ConfigError(
            "no data: give --train-data-path and --valid-data-path (tools/prepare_data.py writes "
            "both), --data-path PREFIX with --split, or --mock-data"
        )
    for prefix in prefixes:
        _token_type(prefix)


def check_tokens(args: argparse.Namespace) -> None:
    """Raises ConfigError where a dataset was made with another tokenizer than the launch's, or its
    start holds a token beyond the vocabulary."""
    _check_tokenizers(args)
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


def sequences_of(prefix: str) -> int | None:
    """The number of sequences in a dataset that `check_files` found whole: its documents, where
    each is one sequence. None if the dataset is in an object store."""
    if is_object_storage_path(prefix):
        return None
    with Path(f"{prefix}.idx").open("rb") as stream:
        return int(_INDEX.unpack(stream.read(_INDEX.size))[3])


def _check_splits(path: Path) -> None:
    try:
        splits = json.loads(path.read_bytes())
        good = all(isinstance(splits[name], str | list) for name in ("train", "valid", "test"))
    except (OSError, ValueError, TypeError, LookupError, RecursionError):
        good = False
    if not good:
        raise ConfigError(
            f"{path} cannot be used: it should be a JSON object of train, valid and test, each a "
            "list of prefixes"
        )


def _prefixes(args: argparse.Namespace) -> list[str]:
    blend, per_split = get_blend_and_blend_per_split(args)
    blends = [one for one in [blend, *(per_split or [])] if one is not None]
    return [prefix for prefixes, _ in blends for prefix in prefixes]


def _check_tokenizers(args: argparse.Namespace) -> None:
    """Compares the launch's tokenizer with those that the manifests beside its datasets name. Data
    without a manifest may be anyone's. NullTokenizer takes data as numbers, whoever made them."""
    made_by: dict[str, str] = {}  # sha256 of a tokenizer: the first dataset made with it
    for prefix in _prefixes(args):
        if sha256 := _tokenizer_of(prefix):
            made_by.setdefault(sha256, prefix)
    if len(made_by) > 1:
        first, second, *_ = made_by.values()
        raise ConfigError(
            f"{first} and {second} were made with different tokenizers: prepare one of the texts "
            "again with the other's (tools/prepare_data.py --tokenizer-model PATH)"
        )
    for sha256, prefix in made_by.items():
        own = (
            args.tokenizer_type in SP_TOKENIZERS
            and manifest.sha256_of(Path(args.tokenizer_model)) == sha256
        )
        if own or args.tokenizer_type == "NullTokenizer":
            continue
        beside = Path(prefix).with_name("tokenizer.model")
        there = beside.is_file() and manifest.sha256_of(beside) == sha256
        remedy = f"give --tokenizer-type SentencePieceTokenizer --tokenizer-model {beside}"
        raise ConfigError(
            f"{prefix} was made with another tokenizer than "
            f"{args.tokenizer_model or args.tokenizer_type}: "
            f"{remedy if there else 'give the one it was made with, or prepare the data again'}"
        )


def _tokenizer_of(prefix: str) -> str | None:
    """The sha256 of the tokenizer that tools/prepare_data.py made this dataset with; None where it
    made no such dataset. Raises ConfigError for a manifest that is damaged or tells of others."""
    part, path = manifest.PARTS.get(Path(prefix).name), Path(prefix).with_name(manifest.NAME)
    kind = _token_type(prefix)
    if part is None or kind is None or not path.exists():
        return None
    remedy = "prepare the data again, or delete that file if you know the data's tokenizer"
    try:
        found = json.loads(path.read_bytes())
        if "tokenizer_sha256" not in found:
            return None  # another program's
        sha256, tokens = str(found["tokenizer_sha256"]), int(found[part]["tokens"])
    except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): {remedy}") from error
    there = Path(f"{prefix}.bin").stat().st_size // DType.size(kind)
    if there != tokens:
        raise ConfigError(
            f"{path} tells of other data, of {tokens} tokens where {prefix} has {there}: {remedy}"
        )
    return sha256


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
