"""The padded size of the vocabulary, which is the number of rows of the embedding.

It is the same in every parallel layout whose tensor-parallel size divides
--make-vocab-size-divisible-by.
"""

from __future__ import annotations

import argparse
import sys

from megatron.core.tokenizers.utils import build_tokenizer

from megatron_fp4.vocabulary import padded_size


def install() -> None:
    """Makes Megatron pad the vocabulary to `padded_size` rows. Idempotent.

    Upstream rounds up to a multiple of --make-vocab-size-divisible-by times the tensor-parallel
    size. The rows of padding take part in the softmax and in the initialization, so the loss of the
    same model would depend on the tensor-parallel size.
    """
    build_tokenizer.vocab_size_with_padding = _padded_for


def is_installed() -> bool:
    """Whether Megatron pads the vocabulary to `padded_size` rows: not in an unchecked launch."""
    return build_tokenizer.vocab_size_with_padding is _padded_for


def _padded_for(tokens: int, args: argparse.Namespace, logging_enabled: bool = True) -> int:
    divisor, parts = args.make_vocab_size_divisible_by, args.tensor_model_parallel_size
    rows = padded_size(tokens, divisor, parts)
    if rows != padded_size(tokens, divisor, 1) and args.rank == 0:
        sys.stderr.write(
            f"megatron-fp4: the vocabulary of {tokens} is padded to {rows} rows because of "
            f"--tensor-model-parallel-size {parts}; for the same loss in another layout give "
            f"--padded-vocab-size {rows} there\n"
        )
    return rows
