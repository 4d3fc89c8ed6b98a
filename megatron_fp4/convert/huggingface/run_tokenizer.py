"""The tokenizer of a Megatron run, for the model that is made of its checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from megatron_fp4.convert.arguments import whole_number
from megatron_fp4.convert.huggingface import model_files
from megatron_fp4.convert.huggingface import sentencepiece_models as sentencepiece


class RunTokenizer:
    """The tokenizer that the arguments of a run name, opened by `transformers`.

    args: the run's. size: the number of tokens, or None if it is not known here. problem: why there
    is no tokenizer to write, as what the run does ("names none"); "" if there is one.

    Raises ConfigError if the tokenizer is here and cannot be opened, or if `transformers` would
    give other tokens than the run had.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._kind = getattr(args, "tokenizer_type", None)
        self._path = Path(str(getattr(args, "tokenizer_model", None) or ""))
        self.problem = self._problem(args)
        self._opened = None if self.problem else self._open()
        self.size = None if self._opened is None else len(self._opened)
        if self._kind == "NullTokenizer" and getattr(args, "vocab_size", None) is not None:
            self.size = whole_number(args, "vocab_size")

    def _problem(self, args: argparse.Namespace) -> str:
        if self._kind is None:
            return "names none"
        if getattr(args, "special_tokens", None):
            return "adds --special-tokens to its own"
        is_there = {
            "HuggingFaceTokenizer": self._path.is_dir(),
            "SentencePieceTokenizer": self._path.is_file(),
        }
        if self._kind not in is_there:
            return f"names {self._kind}, which is not converted"
        if not is_there[self._kind]:
            return f"names {self._kind} {self._path}, which is not here"
        return ""

    def _open(self) -> Any:
        if self._kind == "SentencePieceTokenizer":
            return sentencepiece.convert(self._path)
        return model_files.read_tokenizer(self._path)

    def ids(self) -> dict[str, int | None]:
        """The fields of config.json that name special tokens; None for one that there is not."""
        fields = [f"{word}_token_id" for word in ("bos", "eos", "pad")]
        return {field: getattr(self._opened, field, None) for field in fields}

    def write(self, folder: Path) -> None:
        """Writes the tokenizer to `folder`, if there is one."""
        if self._kind == "SentencePieceTokenizer" and self._opened is not None:
            self._opened.save_pretrained(folder)
        elif self._opened is not None:
            model_files.copy_tokenizer(self._path, folder)
