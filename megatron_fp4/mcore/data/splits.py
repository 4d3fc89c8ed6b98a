"""What of the data training, validation and test get, checked before the first step.

A split that gets nothing has Megatron count epochs of no tokens for ever, or end at the first
evaluation with a traceback.
"""

import argparse
import math
from pathlib import Path

from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from megatron.training.utils import get_blend_and_blend_per_split

from megatron_fp4.errors import ConfigError
from megatron_fp4.mcore.data import dataset_files, manifest
from megatron_fp4.mcore.launch.flags import flag_of

_SPLITS = ("training", "validation", "test")
_DEFAULT = "969, 30, 1"  # of --data-path, T/arguments.py:validate_args


def check(args: argparse.Namespace) -> None:
    """Raises ConfigError where training or validation would get no data, or the flags that share
    it out contradict each other."""
    for name in ("full_validation", "multiple_validation_sets"):
        if getattr(args, name):
            raise ConfigError(
                f"{flag_of(name)} is not supported: leave it out, and give --eval-iters N"
            )
    if args.mock_data:
        return
    blend, per_split = get_blend_and_blend_per_split(args)
    if per_split is not None and args.split is not None:
        raise ConfigError(
            f"--split {args.split} shares out --data-path alone: leave it out, since each split "
            "has data of its own"
        )
    if per_split is not None:
        given = [part is not None for part in per_split]
    else:
        given = _shared_out(args, blend[0] if blend else [])
    if not given[0] and not args.skip_train:
        raise ConfigError(
            "no data to train on: give --train-data-path, or a --split whose first share is not 0"
        )
    if not given[1] and args.eval_iters:
        raise ConfigError(
            f"no data for --eval-iters {args.eval_iters}: give --valid-data-path (or a --split "
            "whose second share is not 0), or --eval-iters 0"
        )


def _shared_out(args: argparse.Namespace, prefixes: list[str]) -> list[bool]:
    """Which splits get a share of all datasets. Raises ConfigError where one that is to get some
    gets no document of a dataset."""
    split = args.split or (_DEFAULT if args.data_path is not None else None)
    if split is None:
        raise ConfigError("--data-args-path needs --split, such as --split 95,5,0: add it")
    try:
        shares = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
    except (AssertionError, ValueError) as error:
        raise ConfigError(
            f"--split {split} is not three shares, of training, validation and test: give such as "
            "95,5,0"
        ) from error
    for prefix in prefixes:
        documents = dataset_files.sequences_of(prefix)
        if documents is None:
            continue
        empty = [
            name
            for name, share in zip(_SPLITS, shares, strict=True)
            if share and round(share[0] * documents) == round(share[1] * documents)
        ]
        if empty:
            raise ConfigError(
                f"{prefix} has {documents} document{'s' * (documents > 1)}, of which --split "
                f"{split} leaves none to {' and '.join(empty)}: give {_remedy(prefix, documents)}"
            )
    return [share is not None for share in shares]


def _remedy(prefix: str, documents: int) -> str:
    train, held_out = manifest.PARTS
    beside = Path(prefix).with_name(held_out)
    if Path(prefix).name == train and beside.with_suffix(".idx").is_file():
        return f"--train-data-path {prefix} --valid-data-path {beside} in place of --data-path"
    own = "--train-data-path and --valid-data-path"
    if documents == 1:
        return own
    percent = math.ceil(100 / documents)  # one document at least
    return f"another (such as {100 - percent},{percent},0), or {own}"
