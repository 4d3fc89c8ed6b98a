"""Tokenizes a corpus of any size into Megatron's indexed format, in parallel.

    megatron-fp4-preprocess PATH ... --tokenizer-model MODEL --output data

A PATH is a folder, a text file, JSON lines (.jsonl or .json) or Parquet; text and JSON lines also
as .gz or .zst. Documents keep the order of the files and of their lines. The output folder contains
train_text_document.{bin,idx}, valid_text_document.{bin,idx} if a share is held out, manifest.json,
and left_out.txt if lines or files were left out. The data do not depend on the number of workers.
They are what Megatron-LM's tools/preprocess_data.py writes with --append-eod.

After an interruption the same command goes on where it was. prepare_data.py is for small texts, and
trains a tokenizer.
"""

import os
import sys
from argparse import Namespace
from pathlib import Path

from megatron_fp4.mcore.data import outputs
from megatron_fp4.mcore.data.command import OneLineParser
from megatron_fp4.mcore.data.corpus.options import CorpusOptions, Running
from megatron_fp4.mcore.data.errors import DataError


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line `arguments` (None: sys.argv); returns the exit status."""
    try:
        _run(_parser().parse_args(arguments))
    except DataError as error:
        print(f"preprocess: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("preprocess: interrupted; the same command goes on", file=sys.stderr)
        return 130
    return 0


def _parser() -> OneLineParser:
    parser = OneLineParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add(
        "text",
        nargs="+",
        type=Path,
        help="folders, text files, JSON lines (.jsonl, .json), also as .gz and .zst, and Parquet",
    )
    add("--output", type=Path, default=Path("data"), help="the folder to write to (data)")
    add(
        "--tokenizer-model",
        type=Path,
        required=True,
        help="a SentencePiece model, or the folder of a Hugging Face tokenizer",
    )
    add(
        "--tokenizer-type",
        choices=("SentencePieceTokenizer", "HuggingFaceTokenizer"),
        help="as for the training (HuggingFaceTokenizer if --tokenizer-model is a folder or "
        "tokenizer.json)",
    )
    add(
        "--tokenizer-hf-no-include-special-tokens",
        action="store_true",
        help="do not add what a Hugging Face tokenizer adds to a text, such as a token for its "
        "start",
    )
    add(
        "--json-key",
        default=CorpusOptions.json_key,
        help="where a JSON line, or Parquet, has its text (%(default)s)",
    )
    add(
        "--held-out-share",
        type=float,
        default=CorpusOptions.held_out_share,
        help="share of the documents kept for evaluation, chosen by the hash of their text "
        "(%(default)s)",
    )
    add(
        "--workers",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="processes that tokenize (%(default)s: one for each core)",
    )
    add("--strict", action="store_true", help="end at the first line or file without usable text")
    add("--dry-run", action="store_true", help="say what would be read and written; write nothing")
    return parser


def _run(given: Namespace) -> None:
    options = CorpusOptions(given.json_key, given.held_out_share)
    running = Running(given.workers, given.strict)
    outputs.check(given.output)
    outputs.without_transformer_engine()
    with outputs.without_warnings():
        from megatron_fp4.mcore.data.corpus.estimate import estimate
        from megatron_fp4.mcore.data.corpus.preparing import preprocess
        from megatron_fp4.mcore.data.corpus.sources import sources_of
        from megatron_fp4.mcore.data.corpus.tokenizers import open_tokenizer
    sources = sources_of(given.text, options.json_key, running.say)
    is_folder = given.tokenizer_model.is_dir() or given.tokenizer_model.name == "tokenizer.json"
    kind = given.tokenizer_type
    kind = kind or ("HuggingFaceTokenizer" if is_folder else "SentencePieceTokenizer")
    with_special = not given.tokenizer_hf_no_include_special_tokens
    if kind != "HuggingFaceTokenizer" and not with_special:
        raise DataError(
            "--tokenizer-hf-no-include-special-tokens is for a Hugging Face tokenizer: leave it out"
        )
    tokenizer = open_tokenizer(kind, given.tokenizer_model, with_special)
    if given.dry_run:
        for line in estimate(sources, options, tokenizer):
            print(line)
        return
    preprocess(sources, given.output, options, tokenizer, running)
    print(f"Train with --tokenizer-type {tokenizer.kind} --tokenizer-model {tokenizer.path}")


if __name__ == "__main__":
    sys.exit(main())
