"""Refuses tokenizers that cannot be opened, and vocabularies that cannot be sharded over ranks."""

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import sentencepiece

from megatron_fp4.mcore.arguments import machine

# By --tokenizer-type: the package that reads the tokenizer, and the flags that name its files.
READ_BY = {
    "HuggingFaceTokenizer": ("transformers", ["--tokenizer-model"]),
    "TikTokenizer": ("tiktoken", ["--tokenizer-model"]),
    "GPT2BPETokenizer": ("transformers", ["--vocab-file", "--merge-file"]),
    "BertWordPieceLowerCase": ("transformers", ["--vocab-file"]),
    "BertWordPieceCase": ("transformers", ["--vocab-file"]),
    "SentencePieceTokenizer": ("sentencepiece", ["--tokenizer-model"]),
    "GPTSentencePieceTokenizer": ("sentencepiece", ["--tokenizer-model"]),
    "Llama2Tokenizer": ("sentencepiece", ["--tokenizer-model"]),
    "NullTokenizer": (None, []),
}


def choice(args: Namespace) -> Iterator[str]:
    """Refuses a tokenizer without a type, or whose package or files are missing."""
    kind = args.tokenizer_type
    if kind is None:
        yield (
            "no tokenizer: give --tokenizer-type SentencePieceTokenizer --tokenizer-model PATH, "
            "or --tokenizer-type NullTokenizer --vocab-size N for data that is already numbers"
        )
    if kind not in READ_BY:
        yield f"--tokenizer-type {kind} is not supported: use one of {', '.join(READ_BY)}"
    if kind == "NullTokenizer" and not args.vocab_size:
        yield "--tokenizer-type NullTokenizer needs --vocab-size"
    package, flags = READ_BY[kind]
    for flag in flags:
        yield from _path(kind, flag, getattr(args, flag[2:].replace("-", "_")))
    if package is not None and not machine.installed(package):
        yield f"--tokenizer-type {kind} needs {package}: pip install {package}"
    if package == "sentencepiece":
        yield from _sentencepiece(args.tokenizer_model)


def vocabulary(args: Namespace) -> Iterator[str]:
    """Refuses a padded vocabulary of unknown size, or not divisible by the tensor-parallel size."""
    rows, parts = args.padded_vocab_size, args.tensor_model_parallel_size
    if rows is None and not args.pad_vocab_size:
        yield (
            "--no-pad-vocab-size leaves the embedding's rows open: give "
            "--padded-vocab-size N instead"
        )
    if rows is not None and rows % parts:
        yield (
            f"--padded-vocab-size {rows} is not a multiple of --tensor-model-parallel-size "
            f"{parts}: give one that is, or leave it out"
        )


def _path(kind: str, flag: str, path: str | None) -> Iterator[str]:
    if path is None:
        yield f"{kind} needs {flag} PATH"
        return
    if kind == "HuggingFaceTokenizer" and Path(path).is_file():
        yield f"{path} is a file: give {flag} {Path(path).parent}, the folder that it is in"
    # It may be a name on Hugging Face's hub, such as owner/name.
    is_name = kind == "HuggingFaceTokenizer" and path[0] not in "./~" and path.count("/") < 2
    if not (is_name or Path(path).exists()):
        yield (
            f"no tokenizer at {path}: give {flag} what the data was prepared with "
            "(tools/prepare_data.py writes a tokenizer.model)"
        )


def _sentencepiece(path: str) -> Iterator[str]:
    try:
        sentencepiece.SentencePieceProcessor(model_file=path)
    except (OSError, RuntimeError):
        yield (
            f"{path} is no SentencePiece model, or is cut short: give --tokenizer-model the .model "
            "file that the data was prepared with"
        )
