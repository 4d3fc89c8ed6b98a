"""Tokenizers of a corpus, opened as Megatron's training loop opens them."""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.datasets.indexed_dataset import DType
from megatron.core.tokenizers import MegatronTokenizer

from megatron_fp4.mcore.data import manifest
from megatron_fp4.mcore.data.errors import DataError

# By Megatron's --tokenizer-type: Megatron's name of the library that reads the tokenizer.
LIBRARIES = {"SentencePieceTokenizer": "sentencepiece", "HuggingFaceTokenizer": "huggingface"}
# A text for which tokenizers differ: words, white space, digits, code, other scripts, emoji.
_PROBE = "The  quick brown fox\n\tdef f(x): return x**2 + 3.14159\r\nнорма 量子化 ñandú 🙂 don't"


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer for documents.

    kind: Megatron's --tokenizer-type. path: Megatron's --tokenizer-model. vocab_size: the number of
    tokens. eod: the token that ends a document. sha256: identifies the tokenizer, and is compared
    when a launch reads the data. special: whether the special tokens that a Hugging Face tokenizer
    adds to a text, such as one for its start, are added to each document.
    """

    kind: str
    path: Path
    vocab_size: int
    eod: int
    sha256: str
    special: bool
    _library: Any  # SentencePiece's processor, or a tokenizer of transformers

    def encode(self, texts: list[str]) -> list[list[int]]:
        """The tokens of each text, without the token that ends a document."""
        if self.kind == "SentencePieceTokenizer":
            return list(self._library.encode(texts, num_threads=1))
        return list(self._library(texts, add_special_tokens=self.special, verbose=False).input_ids)

    @property
    def dtype(self) -> str:
        """The dtype of tokens that Megatron uses for such a vocabulary, as numpy names it."""
        return str(DType.optimal_dtype(self.vocab_size).__name__)

    def probe(self) -> list[int]:
        """The tokens of a fixed text.

        They are recorded with unfinished work. If a later command finds others, its tokenizer is
        not the one that the work was begun with.
        """
        return self.encode([_PROBE])[0]


def open_tokenizer(kind: str, model: Path, special: bool = True) -> Tokenizer:
    """The tokenizer in `model`: a SentencePiece model, or a folder of transformers' files.

    kind: Megatron's --tokenizer-type. For a Hugging Face tokenizer `model` may also be the
    tokenizer.json in that folder. special: see Tokenizer. Raises DataError if it cannot be opened,
    or has no token for the end of a text.
    """
    if kind == "HuggingFaceTokenizer":
        model = model.parent if model.name == "tokenizer.json" else model
        _check_transformers(model)
    elif not model.is_file():
        raise DataError(f"--tokenizer-model {model} is no file: give a SentencePiece model")
    try:
        opened = MegatronTokenizer.from_pretrained(
            str(model), metadata_path={"library": LIBRARIES[kind]}
        )
        eod = opened.eod
    except (ValueError, OSError, RuntimeError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"--tokenizer-model {model} is no {kind}: {reason}") from error
    if eod is None or eod < 0:
        raise DataError(
            f"--tokenizer-model {model} has no token for the end of a text (eos): name it as "
            "eos_token in tokenizer_config.json, or give another tokenizer"
        )
    is_own = kind == "SentencePieceTokenizer"
    sha256 = manifest.sha256_of(model) if is_own else vocabulary_sha256(opened)
    library = opened._tokenizer.tokenizer
    return Tokenizer(kind, model, opened.vocab_size, eod, sha256, special, library)


def vocabulary_sha256(tokenizer: Any) -> str:
    """The SHA-256 of a vocabulary and of its end-of-text token, as hexadecimal digits.

    It does not depend on where the tokenizer's files are and which other settings they have.
    tokenizer: Megatron's, of a Hugging Face tokenizer.
    """
    vocabulary = sorted(tokenizer.inv_vocab.items())
    return hashlib.sha256(json.dumps([vocabulary, tokenizer.eod]).encode()).hexdigest()


def _check_transformers(model: Path) -> None:
    if not model.is_dir():
        raise DataError(
            f"--tokenizer-model {model} is no folder: give the one that has tokenizer.json"
        )
    # Each worker is a process of its own, and forks after the tokenizer was used.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        import transformers
    except ImportError as error:
        raise DataError(
            "--tokenizer-type HuggingFaceTokenizer needs the package transformers, which is not "
            "installed: pip install transformers"
        ) from error
    transformers.logging.set_verbosity_error()
