"""Makes Megatron's training data from text: a SentencePiece tokenizer and two indexed datasets.

    megatron-fp4-prepare-data [PATH ...] --output data

A PATH is a folder, a text file, JSON lines (.jsonl or .json) or Parquet; text and JSON lines also
as .gz or .zst. Without a PATH the text is the source code of Python's standard library, which every
machine has. The output folder contains tokenizer.model, train_text_document.{bin,idx},
valid_text_document.{bin,idx} and manifest.json. Whole documents (files, JSON lines, or rows) are
held out for validation. If there is only one document, its end is held out.

All text is kept in memory: this is for small texts, and for a tokenizer. preprocess.py takes a
corpus of any size.

Files of a folder that are not UTF-8 text are left out, and a line for each reason says how many. A
JSON line that cannot be used ends the program with an error that names its file and line number.
"""

import hashlib
import io
import itertools
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megatron_fp4.mcore.data import manifest, outputs
from megatron_fp4.mcore.data.command import OneLineParser
from megatron_fp4.mcore.data.corpus import job
from megatron_fp4.mcore.data.errors import DataError
from megatron_fp4.mcore.data.folders import LeftOut, shown
from megatron_fp4.mcore.data.text import Document, documents_at, library_documents

TOKENIZER_TEXT_BYTES = 64_000_000  # the tokenizer is trained on this much; more changes it little
SMALLEST_VOCABULARY = 260  # a token for each of 256 bytes, 3 control tokens and one character
LARGEST_VOCABULARY = 2**31 - 1  # SentencePiece counts in 32 bits


class VocabularyTooLarge(DataError):
    """The text is too short for the requested vocabulary. most: the largest size that fits."""

    def __init__(self, asked: int, most: int) -> None:
        super().__init__(f"--vocab-size {asked} is too large for this text: {most} at most")
        self.most = most


@dataclass(frozen=True)
class Options:
    """The options that the prepared data depend on, besides the text.

    vocab_size: tokens of the vocabulary. held_out_share: the share of the documents held out for
    validation, between 0 and 1. max_bytes: about how much of the text is used; None: all.
    json_key: the key of a JSON line's text. Raises DataError for values out of range.
    """

    vocab_size: int = 2048
    held_out_share: float = 0.05
    max_bytes: int | None = None
    json_key: str = "text"

    def __post_init__(self) -> None:
        if not SMALLEST_VOCABULARY <= self.vocab_size <= LARGEST_VOCABULARY:
            raise DataError(
                f"--vocab-size {self.vocab_size}: give a number from {SMALLEST_VOCABULARY} to "
                f"{LARGEST_VOCABULARY}"
            )
        if not 0 < self.held_out_share < 1:
            raise DataError(
                f"--held-out-share {self.held_out_share} is not above 0 and below 1: Megatron "
                "evaluates on what is held out"
            )
        if self.max_bytes is not None and self.max_bytes <= 0:
            raise DataError(f"--max-bytes {self.max_bytes}: give 1 or more, or leave it out")


def choose(documents: Iterable[Document], max_bytes: int | None) -> list[Document]:
    """The documents to use, sorted by the hash of their keys.

    max_bytes: the list ends with the document that brings the total size of the texts to this many
    bytes or more; None: all documents. Raises DataError if there are no documents.
    """
    kept = sorted(documents, key=lambda it: hashlib.sha256(it.key.encode()).digest())
    if not kept:
        raise DataError("the text is empty: no file with readable, non-blank UTF-8 text in it")
    return kept if max_bytes is None else _up_to(max_bytes, kept, lambda kept: _size(kept.text))


def split(documents: list[Document], share: float) -> tuple[list[str], list[str]]:
    """(texts to train on, texts held out), at least one each.

    The first documents are held out, in the order that choose() gave them, until their number
    reaches `share` of all. All copies of a held-out text are held out too, so no text is on both
    sides. If there is only one document its last lines are held out, and if it has only one line
    its last characters. Raises DataError if nothing can be held out.
    """
    if len(documents) == 1:
        lines = documents[0].text.splitlines(keepends=True)
        parts = lines if len(lines) > 1 else documents[0].text  # a single line: its characters
        cut = min(round(len(parts) * (1 - share)), len(parts) - 1)
        if cut < 1:
            raise DataError("the text is a single character: nothing can be held out of it")
        return ["".join(parts[:cut])], ["".join(parts[cut:])]
    count = min(max(round(len(documents) * share), 1), len(documents) - 1)
    texts = [document.text for document in documents]
    copies = Counter(texts)  # ordered by the first copy of each text
    if len(copies) == 1:
        raise DataError("all documents are the same text: nothing can be held out")
    held_out: set[str] = set()
    for text in list(copies)[:-1]:
        if count <= 0:
            break
        held_out.add(text)
        count -= copies[text]
    train = [text for text in texts if text not in held_out]
    return train, [text for text in texts if text in held_out]


def train_tokenizer(texts: list[str], vocab_size: int) -> bytes:
    """A serialized SentencePiece BPE model that is trained on `texts`.

    Text is encoded without loss: unknown characters are encoded as bytes, and white space is kept.
    The exception is U+2581, SentencePiece's own symbol for a space, which is decoded as a space.
    Raises DataError if vocab_size does not fit the text; see VocabularyTooLarge.
    """
    import sentencepiece

    sample = _up_to(TOKENIZER_TEXT_BYTES, texts, _size)
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(line for text in sample for line in text.splitlines()),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            max_sentence_length=2**30,
            num_threads=1,  # several threads may train another model each time
            minloglevel=2,
        )
    except RuntimeError as error:
        raise _vocabulary_mistake(vocab_size, str(error)) from error
    return model.getvalue()


def _vocabulary_mistake(vocab_size: int, reason: str) -> DataError:
    """The DataError for SentencePiece's error text `reason`, with the bound that it contains."""
    if most := re.search(r"too high .*<= (\d+)", reason):
        return VocabularyTooLarge(vocab_size, int(most[1]))
    if least := re.search(r"smaller than required_chars. \d+ vs (\d+)", reason):
        return DataError(
            f"--vocab-size {vocab_size} is too small for this text: {least[1]} at least"
        )
    return DataError(f"--vocab-size {vocab_size} cannot be trained: {reason}")


def read_tokenizer(path: Path) -> bytes:
    """The serialized SentencePiece model in the file `path`.

    Raises DataError if it cannot be read, is not a SentencePiece model, or has no eos token.
    """
    import sentencepiece

    try:
        model = path.read_bytes()
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    except OSError as error:
        raise DataError(f"--tokenizer-model {path}: not readable: {error.strerror}") from error
    except RuntimeError as error:
        raise DataError(f"--tokenizer-model {path} is no SentencePiece model") from error
    if processor.eos_id() < 0:
        raise DataError(f"--tokenizer-model {path} has no token for the end of a text (eos)")
    return model


def _vocabulary_of(model: bytes) -> int:
    import sentencepiece

    return int(sentencepiece.SentencePieceProcessor(model_proto=model).vocab_size())


def write_dataset(prefix: Path, texts: list[str], tokenizer: Any) -> int:
    """Writes prefix.bin and prefix.idx, and returns the number of tokens.

    Each text becomes one document, which ends with the end-of-text token. tokenizer: a
    SentencePieceProcessor.
    """
    with outputs.without_warnings():
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    dtype = DType.optimal_dtype(tokenizer.vocab_size())
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    tokens = 0
    for batch in itertools.batched(texts, 256):
        for ids in tokenizer.encode(list(batch), add_eos=True, num_threads=-1):
            builder.add_document(ids, [len(ids)])
            tokens += len(ids)
    builder.finalize(f"{prefix}.idx")
    return tokens


def prepare(
    paths: list[Path],
    output: Path,
    options: Options,
    say: Callable[[str], None] = print,
    tokenizer: Path | None = None,
) -> dict[str, Any]:
    """Writes the tokenizer, both datasets and manifest.json to `output`; returns the manifest.

    If `output` already has the data of the same text and options, nothing is written.

    paths: folders and files to read; empty: Python's standard library.
    say: called with each line for the user.
    tokenizer: the file of a SentencePiece model to use; None: a model is trained.
    Raises DataError for text or options that cannot be used, and if writing fails.
    """
    documents = _read(paths, options.json_key, say)
    return prepare_documents(documents, _origin(paths), output, options, say, tokenizer)


def prepare_documents(
    given: Iterable[Document],
    origin: str,
    output: Path,
    options: Options,
    say: Callable[[str], None] = print,
    tokenizer: Path | None = None,
) -> dict[str, Any]:
    """`prepare` of documents that are already found.

    given: is not read if `output` cannot be written. origin: what the manifest says they are.
    """
    outputs.check(output)
    _check_not_a_corpus(output)
    own = None if tokenizer is None else read_tokenizer(tokenizer)
    if own is not None:
        options = replace(options, vocab_size=_vocabulary_of(own))
    documents = choose(given, options.max_bytes)
    fingerprint = _fingerprint(documents, options, own)
    found = manifest.read(output)
    if found and found["fingerprint"] == fingerprint and manifest.describes(found, output):
        say(f"Data: {shown(output)} is up to date ({_summary(found)})")
        return found
    say(f"Data: {_count(documents)} of {origin}")
    train, held_out = split(documents, options.held_out_share)
    model = train_tokenizer(train, options.vocab_size) if own is None else own
    with outputs.writing(output):
        outputs.clear(output)
        (output / "tokenizer.model").write_bytes(model)
        train_name, held_out_name = manifest.DATASETS
        made = {
            "source": origin,
            "options": asdict(options),
            "fingerprint": fingerprint,
            "documents": len(documents),
            "bytes": sum(_size(document.text) for document in documents),
            "tokenizer_sha256": hashlib.sha256(model).hexdigest(),
            "train": _write_dataset(output / train_name, train, model),
            "held_out": _write_dataset(output / held_out_name, held_out, model),
        }
        made["files"] = manifest.sizes(output, manifest.OUTPUTS[1:])
        manifest.write(output, made)  # written last: its presence means that the data are complete
    say(f"Data: {shown(output)} is ready ({_summary(made)})")
    return made


def _read(paths: list[Path], json_key: str, say: Callable[[str], None]) -> Iterator[Document]:
    """All documents of the paths; at the end calls `say` with what was left out, and why."""
    left_out = LeftOut()
    for path in paths:
        yield from documents_at(path, json_key, left_out)
    if not paths:
        yield from library_documents()
    for line in left_out.lines():
        say(f"Data: {line}")


def _check_not_a_corpus(output: Path) -> None:
    """Raises DataError if `output` has data of preprocess.py, which may have taken days to make."""
    found = manifest.read(output)
    if found and found.get("command") == manifest.PREPROCESS:
        raise DataError(
            f"{output} has data that megatron-fp4-preprocess wrote: give another --output, or "
            "delete it"
        )
    if job.exists(output):
        raise DataError(
            f"{output} has unfinished data of megatron-fp4-preprocess: give another --output, or "
            f"delete {output / job.FOLDER}"
        )


def _write_dataset(prefix: Path, texts: list[str], model: bytes) -> dict[str, int]:
    import sentencepiece

    tokens = write_dataset(prefix, texts, sentencepiece.SentencePieceProcessor(model_proto=model))
    return {"documents": len(texts), "bytes": sum(map(_size, texts)), "tokens": tokens}


def _fingerprint(documents: list[Document], options: Options, tokenizer: bytes | None) -> str:
    import sentencepiece

    digest = hashlib.sha256(
        repr((options, sentencepiece.__version__)).encode() + (tokenizer or b"")
    )
    for document in documents:
        digest.update(repr(document).encode())
    return digest.hexdigest()


def _up_to[T](budget: int, items: list[T], size: Callable[[T], int]) -> list[T]:
    """The first items, up to and including the one at which the sum of sizes reaches `budget`."""
    sums = itertools.accumulate(map(size, items))
    return items[: 1 + sum(total < budget for total in sums)]


def _size(text: str) -> int:
    return len(text.encode())


def _origin(paths: list[Path]) -> str:
    return ", ".join(map(shown, paths)) or "Python's standard library"


def _count(documents: list[Document]) -> str:
    size = sum(_size(document.text) for document in documents)
    return f"{len(documents)} documents, {size / 1e6:.1f} MB,"


def _summary(made: dict[str, Any]) -> str:
    train, held_out = made["train"]["tokens"], made["held_out"]["tokens"]
    vocab_size = made["options"]["vocab_size"]
    return f"vocabulary {vocab_size}, {train:,} tokens to train on, {held_out:,} held out"


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line `arguments` (None: sys.argv); returns the exit status."""
    parser = OneLineParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add(
        "text",
        nargs="*",
        type=Path,
        help="folders, text files, JSON lines (.jsonl, .json), also as .gz and .zst, and Parquet; "
        "without any, the sources of Python's standard library, to try it out",
    )
    add("--output", type=Path, default=Path("data"), help="where to write (data)")
    add("--vocab-size", type=int, help=f"tokens in all ({Options.vocab_size})")
    add("--tokenizer-model", type=Path, help="take this SentencePiece model; train none")
    add(
        "--held-out-share",
        type=float,
        default=Options.held_out_share,
        help="share of the documents kept for evaluation (%(default)s)",
    )
    add("--max-bytes", type=int, help="take about this much of the text (all of it)")
    add(
        "--json-key",
        default=Options.json_key,
        help="where a JSON line, or Parquet, has its text (%(default)s)",
    )
    outputs.without_transformer_engine()
    try:
        given = parser.parse_args(arguments)
        if given.tokenizer_model is not None and given.vocab_size is not None:
            raise DataError(
                "--vocab-size is that of a tokenizer to train: leave it out, or --tokenizer-model"
            )
        vocab_size = Options.vocab_size if given.vocab_size is None else given.vocab_size
        options = Options(vocab_size, given.held_out_share, given.max_bytes, given.json_key)
        prepare(given.text, given.output, options, tokenizer=given.tokenizer_model)
    except DataError as error:
        print(f"prepare_data: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
