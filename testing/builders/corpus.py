"""Texts and tokenizers to prepare data from, and what Megatron's own classes make of them."""

import io
import json
import os
from pathlib import Path
from typing import Any

import sentencepiece
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
from megatron.core.tokenizers import MegatronTokenizer

# Words of several scripts, so that tokens of more than one byte are met.
WORDS = "tensor Block größe 量子化 норма ñandú 🙂 x**2 \t\n  def(): 3.14159 don't".split(" ")


def texts(count: int) -> list[str]:
    """Documents of very different lengths; some are empty, blank or equal to another."""
    made = [
        " ".join(WORDS[(i * i + j) % len(WORDS)] for j in range(1 + i * 37 % 150))
        for i in range(count - 4)
    ]
    return [made[0], "", *made, " \n", made[0]]


def write_lines(path: Path, documents: list[str]) -> Path:
    """Writes documents as JSON lines, not escaped to ASCII in every second line."""
    lines = (json.dumps({"text": it}, ensure_ascii=i % 2 == 0) for i, it in enumerate(documents))
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def sentencepiece_model(path: Path) -> Path:
    """Trains a small SentencePiece model that drops blank text, as many models do."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts(60)),
        model_writer=model,
        model_type="bpe",
        vocab_size=300,
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    path.write_bytes(model.getvalue())
    return path


def hugging_face_tokenizer(
    folder: Path,
    eos: str | None = "<eos>",
    vocab_size: int = 400,
    text: list[str] | None = None,
) -> Path:
    """Trains a byte-level tokenizer of transformers, which begins each text with <bos>.

    eos: its token for the end of a text, or None. text: to train on; None: some of `texts`.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # this process forks later
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text or texts(60), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 0)]
    )
    tokens = {"bos_token": "<bos>"} | ({"eos_token": eos} if eos else {})
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **tokens).save_pretrained(folder)
    return folder


def megatrons_tokenizer(model: Path, **options: Any) -> Any:
    """Megatron's tokenizer in a SentencePiece model, or in the folder of a Hugging Face one."""
    library = "huggingface" if model.is_dir() else "sentencepiece"
    return MegatronTokenizer.from_pretrained(
        str(model), metadata_path={"library": library}, **options
    )


def megatrons_dataset(documents: list[str], tokenizer: Any, prefix: Path) -> tuple[bytes, bytes]:
    """The .bin and .idx files that Megatron's builder makes of documents, with --append-eod.

    Written from what tools/preprocess_data.py of Megatron-LM does: a document without tokens gets
    no end-of-text token, and is a document of no sequence.
    """
    dtype = DType.optimal_dtype(tokenizer.vocab_size)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for document in documents:
        ids = tokenizer.tokenize(document)
        ids = [*ids, tokenizer.eod] if ids else []
        builder.add_document(ids, [len(ids)] if ids else [])
    builder.finalize(f"{prefix}.idx")
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()
