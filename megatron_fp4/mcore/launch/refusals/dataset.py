"""Refuses datasets that are missing, damaged, divided into empty splits or of another tokenizer."""

import math
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from megatron.core.tokenizers.utils.build_tokenizer import SP_TOKENIZERS
from megatron.training.global_vars import get_tokenizer
from megatron.training.utils import get_blend_and_blend_per_split

from megatron_fp4.mcore.data import dataset_files, manifest
from megatron_fp4.mcore.data.corpus.tokenizers import vocabulary_sha256
from megatron_fp4.mcore.data.splits import DEFAULT, left_without, shares_of


def files(args: Namespace) -> Iterator[str]:
    """Refuses a launch without data, and a dataset that is missing, truncated or not Megatron's."""
    for path in (args.data_args_path, args.per_split_data_args_path):
        if path is not None and not Path(path).is_file():
            yield f"no file {path}: it should list the datasets"
    lists = args.per_split_data_args_path
    if lists is not None and not dataset_files.is_list_of_splits(Path(lists)):
        yield (
            f"{lists} cannot be used: it should be a JSON object of train, valid and test, each a "
            "list of prefixes"
        )
    prefixes = dataset_files.prefixes(args)
    if not (prefixes or args.mock_data):
        yield (
            "no data: give --train-data-path and --valid-data-path (tools/prepare_data.py writes "
            "both, tools/preprocess.py those of a large corpus), --data-path PREFIX with --split, "
            "or --mock-data"
        )
    for prefix in prefixes:
        yield from _flaw(prefix)


def splits(args: Namespace) -> Iterator[str]:
    """Refuses training or validation without data, and an invalid or unused --split."""
    if args.mock_data:
        return
    blend, per_split = get_blend_and_blend_per_split(args)
    if per_split is None:
        yield from _shares(args, blend[0] if blend else [])
        return
    if args.split is not None:
        yield (
            f"--split {args.split} shares out --data-path alone: leave it out, since each split "
            "has data of its own"
        )
    yield from _without_data(args, [part is not None for part in per_split])


def tokens(args: Namespace) -> Iterator[str]:
    """Refuses a dataset that was made with another tokenizer, or has tokens beyond the vocabulary.

    Only tokens at the start of each dataset are read. args: after Megatron padded the vocabulary.
    """
    yield from _tokenizers(args)
    for prefix in dataset_files.prefixes(args):
        yield from _flaw(prefix)
        largest = dataset_files.largest_token(prefix)
        if largest is not None:
            yield from unknown_token(largest, args)


def are_indexed(args: Namespace) -> bool:
    """Whether all datasets that the arguments name are in Megatron's indexed format."""
    return all(Path(f"{prefix}.idx").is_file() for prefix in dataset_files.prefixes(args))


def unknown_token(token: int, args: Namespace) -> Iterator[str]:
    """Refuses a token that is not below the padded size of the vocabulary."""
    if token >= args.padded_vocab_size:
        yield (
            f"token {token} of the data is beyond the vocabulary of {args.padded_vocab_size}: "
            "give the tokenizer that the data was made with (--tokenizer-model, or --vocab-size)"
        )


def _flaw(prefix: str) -> Iterator[str]:
    if (flaw := dataset_files.flaw_of(prefix)) is not None:
        yield f"no dataset at {prefix}: {flaw}"


def _shares(args: Namespace, prefixes: list[str]) -> Iterator[str]:
    """Refuses a --split that is not three shares, or leaves a split of a dataset without documents.

    prefixes: the datasets of --data-path or --data-args-path.
    """
    split = args.split or (DEFAULT if args.data_path is not None else None)
    if split is None:
        yield "--data-args-path needs --split, such as --split 95,5,0: add it"
        return
    shares = shares_of(split)
    if shares is None:
        yield (
            f"--split {split} is not three shares, of training, validation and test: give such as "
            "95,5,0"
        )
        return
    for prefix in prefixes:
        documents = dataset_files.sequences_of(prefix)
        if documents is not None and (empty := left_without(shares, documents)):
            yield (
                f"{prefix} has {documents} document{'s' * (documents > 1)}, of which --split "
                f"{split} leaves none to {' and '.join(empty)}: give {_instead(prefix, documents)}"
            )
    yield from _without_data(args, [share is not None for share in shares])


def _without_data(args: Namespace, given: list[bool]) -> Iterator[str]:
    """Refuses training or evaluation without data.

    given: whether there are data for training, validation and test.
    """
    if not given[0] and not args.skip_train:
        yield "no data to train on: give --train-data-path, or a --split whose first share is not 0"
    if not given[1] and args.eval_iters:
        yield (
            f"no data for --eval-iters {args.eval_iters}: give --valid-data-path (or a --split "
            "whose second share is not 0), or --eval-iters 0"
        )


def _instead(prefix: str, documents: int) -> str:
    """Flags with which every split gets documents of a dataset that has this number of them."""
    train, held_out = manifest.DATASETS
    beside = Path(prefix).with_name(held_out)
    if Path(prefix).name == train and beside.with_suffix(".idx").is_file():
        return f"--train-data-path {prefix} --valid-data-path {beside} in place of --data-path"
    own = "--train-data-path and --valid-data-path"
    if documents == 1:
        return own
    percent = math.ceil(100 / documents)  # at least one document
    return f"another (such as {100 - percent},{percent},0), or {own}"


def _tokenizers(args: Namespace) -> Iterator[str]:
    """Refuses a tokenizer other than the one that the manifests beside the datasets record.

    Nothing is known about data without a manifest, so they are accepted. NullTokenizer is accepted
    with all data.
    """
    made_by: dict[str, str] = {}  # by the SHA-256 of a tokenizer: the first dataset made with it
    for prefix in dataset_files.prefixes(args):
        yield from _flaw(prefix)
        yield from _record(prefix)
        if recorded := manifest.recorded(prefix):
            made_by.setdefault(recorded.tokenizer_sha256, prefix)
    if len(made_by) > 1:
        first, second, *_ = made_by.values()
        yield (
            f"{first} and {second} were made with different tokenizers: prepare one of the texts "
            "again with the other's (--tokenizer-model PATH)"
        )
    for sha256, prefix in made_by.items():
        if args.tokenizer_type != "NullTokenizer" and _sha256(args) != sha256:
            yield (
                f"{prefix} was made with another tokenizer than "
                f"{args.tokenizer_model or args.tokenizer_type}: {_own_tokenizer(prefix, sha256)}"
            )


def _sha256(args: Namespace) -> str | None:
    """The SHA-256 that manifests record for the launch's tokenizer; None if its type has none."""
    if args.tokenizer_type in SP_TOKENIZERS:
        return manifest.sha256_of(Path(args.tokenizer_model))
    if args.tokenizer_type == "HuggingFaceTokenizer":
        return vocabulary_sha256(get_tokenizer())
    return None


def _record(prefix: str) -> Iterator[str]:
    """Refuses a manifest that is damaged, or that was written for other data."""
    remedy = "prepare the data again, or delete that file if you know the data's tokenizer"
    try:
        recorded = manifest.recorded(prefix)
    except manifest.DamagedManifest as error:
        yield f"{error}: {remedy}"
        return
    there = dataset_files.tokens_of(prefix)
    if recorded is not None and there is not None and recorded.tokens != there:
        yield (
            f"{Path(prefix).with_name(manifest.NAME)} tells of other data, of {recorded.tokens} "
            f"tokens where {prefix} has {there}: {remedy}"
        )


def _own_tokenizer(prefix: str, sha256: str) -> str:
    """What to do so that the launch uses the tokenizer that the dataset was made with.

    Names the file if it is beside the dataset, or if the manifest does. sha256: of that tokenizer.
    """
    beside = Path(prefix).with_name("tokenizer.model")
    if beside.is_file() and manifest.sha256_of(beside) == sha256:
        return f"give --tokenizer-type SentencePieceTokenizer --tokenizer-model {beside}"
    if flags := manifest.tokenizer_flags(prefix):
        return f"give {flags}, which it was made with"
    return "give the one it was made with, or prepare the data again"
