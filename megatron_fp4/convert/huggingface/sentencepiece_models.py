"""Converts a SentencePiece model to a tokenizer of `transformers` that gives the same ids."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from megatron_fp4.errors import ConfigError

# What a tokenizer can get wrong: spaces at the start and in a row, lines, bytes, long numbers.
_SAMPLES = (
    "The quick brown fox", " leading", "two  spaces", "a\n\n  b\tc", "äöü 漢字 🙂", "12345.678", "x"
)  # fmt: skip


def convert(path: Path) -> Any:
    """A tokenizer of `transformers` that gives the ids of the SentencePiece model in file `path`.

    Raises ConfigError if it gives other ids for one of a few samples.
    """
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2
    from transformers import LlamaTokenizer

    kind: Any = sentencepiece_model_pb2  # its classes are made when it is imported
    proto = kind.ModelProto.FromString(path.read_bytes())
    processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(path, Path(folder) / "tokenizer.model")
        made = LlamaTokenizer.from_pretrained(
            folder,
            # Megatron's SentencePieceTokenizer does not begin a text with a token of its own.
            add_bos_token=False,
            add_prefix_space=proto.normalizer_spec.add_dummy_prefix,
            legacy=False,
            unk_token=processor.id_to_piece(processor.unk_id()),
            bos_token=_piece(processor, processor.bos_id()),
            eos_token=_piece(processor, processor.eos_id()),
            pad_token=_piece(processor, processor.pad_id()),
        )
    for sample in _SAMPLES:
        if made.encode(sample, add_special_tokens=False) != processor.encode(sample):
            raise ConfigError(
                f"{path}: transformers tokenizes {sample!r} in another way: export with --like, "
                "a model that has this tokenizer"
            )
    return made


def _piece(processor: Any, token: int) -> str | None:
    return processor.id_to_piece(token) if token >= 0 else None
