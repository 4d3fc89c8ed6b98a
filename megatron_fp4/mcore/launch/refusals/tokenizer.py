"""Whether the tokenizer that the flags name can be opened."""

import argparse
from pathlib import Path

import sentencepiece

from megatron_fp4.errors import ConfigError
from megatron_fp4.mcore.launch.refusals import packages

# By type: the package that reads it, and the flags that name its files.
_READ_BY = {
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


def check(args: argparse.Namespace) -> None:
    """Raises ConfigError for a tokenizer whose type, package or files are missing."""
    kind = args.tokenizer_type
    if kind is None:
        raise ConfigError(
            "no tokenizer: give --tokenizer-type SentencePieceTokenizer --tokenizer-model PATH, "
            "or --tokenizer-type NullTokenizer --vocab-size N for data that is already numbers"
        )
    if kind not in _READ_BY:
        raise ConfigError(f"--tokenizer-type {kind} is not supported: use one of text")
    if kind == "NullTokenizer" and not args.vocab_size:
        raise ConfigError("--tokenizer-type NullTokenizer needs --vocab-size")
    package, flags = _READ_BY[kind]
    for flag in flags:
        _check_path(kind, flag, getattr(args, flag[2:].replace("-", "_")))
    if package is not None and not packages.installed(package):
        raise ConfigError(f"--tokenizer-type {kind} needs {package}: pip install {package}")
    if package == "sentencepiece":
        _check_sentencepiece(args.tokenizer_model)


def _check_path(kind: str, flag: str, path: str | None) -> None:
    if path is None:
        raise ConfigError(f"{kind} needs {flag} PATH")
    # Of Hugging Face's hub it may be a name, as in owner/name.
    is_name = kind == "HuggingFaceTokenizer" and path[0] not in "./~" and path.count("/") < 2
    if not (is_name or Path(path).exists()):
        raise ConfigError(
            f"no tokenizer at {path}: give {flag} what the data was prepared with "
            "(tools/prepare_data.py writes a tokenizer.model)"
        )


def _check_sentencepiece(path: str) -> None:
    try:
        sentencepiece.SentencePieceProcessor(model_file=path)
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            f"{path} is no SentencePiece model, or is cut short: give --tokenizer-model the .model "
            "file that the data was prepared with"
        ) from error
