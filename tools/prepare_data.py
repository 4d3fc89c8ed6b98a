#!/usr/bin/env python3
"""Turns text into what Megatron trains on: a SentencePiece tokenizer and two indexed datasets.

    python tools/prepare_data.py [PATH ...] --output data

A PATH is a directory, a text file, or JSON lines (.jsonl or .json); without one, the text is the
source code of Python's own standard library, which lies on every machine. The output holds
tokenizer.model, train_text_document.{bin,idx}, valid_text_document.{bin,idx} and manifest.json.
What is held out are whole files, or whole JSON lines; a lone text file gives its end. All the text
is kept in memory.
"""

import argparse
import hashlib
import io
import itertools
import json
import logging
import re
import shutil
import sys
import sysconfig
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

TOKENIZER_TEXT_BYTES = 64_000_000  # more text than this changes a small vocabulary little
# What lies among the library's sources and is not written as such: installed packages, tests, and
# generated tables and text, of which one file may outweigh all the others held out.
NOT_LIBRARY = {"dist-packages", "site-packages", "__pycache__"}
NOT_LIBRARY |= {"idle_test", "test", "tests", "encodings", "pydoc_data"}
OUTPUTS = [
    "manifest.json",
    "tokenizer.model",
    *(f"{part}_text_document.{ext}" for part in ("train", "valid") for ext in ("bin", "idx")),
]


class DataError(ValueError):
    """The text or an option cannot be used; the message is one line for the user."""


class VocabularyTooLarge(DataError):
    """The text is too short for the vocabulary asked for; `most` fits."""

    def __init__(self, asked: int, most: int) -> None:
        super().__init__(f"--vocab-size {asked} is too large for this text: {most} at most")
        self.most = most


class Document(NamedTuple):
    """A text that stays whole, and the key whose hash decides its place in the order."""

    key: str
    text: str


@dataclass(frozen=True)
class Options:
    """What the prepared data depends on, beside the text itself."""

    vocab_size: int = 2048
    held_out_share: float = 0.05
    max_bytes: int | None = None
    json_key: str = "text"

    def __post_init__(self) -> None:
        if not 0 < self.held_out_share < 1:
            raise DataError(f"--held-out-share {self.held_out_share} is not between 0 and 1")
        if self.max_bytes is not None and self.max_bytes <= 0:
            raise DataError(f"--max-bytes {self.max_bytes} is not positive")


def library_documents() -> Iterator[Document]:
    """The standard library's .py files, its tests and generated files left out."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if NOT_LIBRARY.isdisjoint(name.parts):
            yield from _decodable(path, name.as_posix(), "")


def documents_at(path: Path, json_key: str) -> Iterator[Document]:
    """The documents of a file, or of every decodable file under a directory; hidden ones are
    left out, and a .json of another kind than JSON lines is text as any other. Raises DataError if
    there is no such path, or a file given by name is not UTF-8 or such a .json."""
    if path.is_dir():
        for file in sorted(path.rglob("*")):
            name = file.relative_to(path)
            if file.is_file() and not any(part.startswith(".") for part in name.parts):
                yield from _decodable(file, name.as_posix(), json_key)
    elif path.is_file():
        try:
            if path.suffix.lower() == ".json" and not _holds_json_lines(path):
                raise DataError(
                    f"{path} is not JSON lines: give each text an object on a line of its own, as "
                    f'{{"{json_key}": "..."}}'
                )
            yield from _file_documents(path, path.name, json_key)
        except UnicodeDecodeError as error:
            raise DataError(f"{path} is not UTF-8 text; convert it first") from error
    else:
        raise DataError(f"{path}: no such file or directory")


def _decodable(path: Path, key: str, json_key: str) -> list[Document]:
    try:
        return list(_file_documents(path, key, json_key))
    except UnicodeDecodeError:
        return []


def _file_documents(path: Path, key: str, json_key: str) -> Iterator[Document]:
    if not _holds_json_lines(path):
        # newline="" keeps the text as it is, the same on every system.
        with path.open(encoding="utf-8", newline="") as file:
            yield Document(key, file.read())
        return
    with path.open(encoding="utf-8-sig") as file:  # some editors write a mark at the start
        for number, line in enumerate(file, start=1):
            if line.strip():
                text = _json_text(line, json_key, f"{path}:{number}")
                # Keyed by content: which texts are held out is not a matter of their order.
                yield Document(hashlib.sha256(text.encode()).hexdigest(), text)


def _holds_json_lines(path: Path) -> bool:
    if path.suffix.lower() != ".json":
        return path.suffix.lower() == ".jsonl"
    with path.open(encoding="utf-8-sig") as file:  # Megatron's own tool takes .json for JSON lines
        first = next((line for line in file if line.strip()), "")
    try:
        return isinstance(json.loads(first), dict)
    except json.JSONDecodeError:
        return False


def _json_text(line: str, json_key: str, place: str) -> str:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{place}: not a JSON object: {error}") from error
    text = record.get(json_key) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise DataError(f'{place}: no text under the key "{json_key}"; name the key by --json-key')
    return text.encode(errors="replace").decode()  # JSON can hold half a surrogate pair


def choose(documents: Iterable[Document], max_bytes: int | None) -> list[Document]:
    """The documents that are not blank, in the order of their keys' hashes, up to the one with
    which max_bytes is reached. Raises DataError if none is left."""
    kept = sorted(
        (document for document in documents if document.text.strip()),
        key=lambda document: hashlib.sha256(document.key.encode()).digest(),
    )
    if not kept:
        raise DataError("the text is empty: no file with readable, non-blank UTF-8 text in it")
    return kept if max_bytes is None else _up_to(max_bytes, kept, lambda kept: _size(kept.text))


def split(documents: list[Document], share: float) -> tuple[list[str], list[str]]:
    """The texts to train on and those held out, at least one each. The first documents, in the
    order choose() gave them, are held out, each with all its copies: no text lies on both sides. Of
    a single document it is the last lines. Raises DataError if there is nothing to hold out."""
    if len(documents) == 1:
        lines = documents[0].text.splitlines(keepends=True)
        cut = min(round(len(lines) * (1 - share)), len(lines) - 1)
        if cut < 1:
            raise DataError("the text is a single line: nothing can be held out of it")
        return ["".join(lines[:cut])], ["".join(lines[cut:])]
    count = min(max(round(len(documents) * share), 1), len(documents) - 1)
    texts = [document.text for document in documents]
    copies = Counter(texts)  # in the order of their first
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
    """A SentencePiece BPE model: unknown characters fall back to bytes and white space is kept, so
    that text is encoded without loss, but for U+2581, SentencePiece's own sign for a space, which
    comes back as one. Raises DataError if vocab_size does not fit the text."""
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
            num_threads=1,  # the same model every time
            minloglevel=2,
        )
    except RuntimeError as error:
        raise _vocabulary_mistake(vocab_size, str(error)) from error
    return model.getvalue()


def _vocabulary_mistake(vocab_size: int, reason: str) -> DataError:
    """SentencePiece's complaint in this tool's words: it gives the bound that was broken."""
    if most := re.search(r"too high .*<= (\d+)", reason):
        return VocabularyTooLarge(vocab_size, int(most[1]))
    if least := re.search(r"smaller than required_chars. \d+ vs (\d+)", reason):
        return DataError(
            f"--vocab-size {vocab_size} is too small for this text: {least[1]} at least"
        )
    return DataError(f"--vocab-size {vocab_size} cannot be trained: {reason}")


def write_dataset(prefix: Path, texts: list[str], tokenizer: Any) -> int:
    """Writes prefix.bin and prefix.idx, one document a text, each closed by the end-of-text
    token; returns the number of tokens."""
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is told is of GPU libraries, which play no part here
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
    paths: list[Path], output: Path, options: Options, say: Callable[[str], None] = print
) -> dict[str, Any]:
    """Writes the tokenizer, both datasets and manifest.json into output and returns the manifest;
    where the same text and options were prepared before, nothing is written again. Raises
    DataError for text or options that cannot be used."""
    found = [documents_at(path, options.json_key) for path in paths] or [library_documents()]
    documents = choose(itertools.chain.from_iterable(found), options.max_bytes)
    fingerprint = _fingerprint(documents, options)
    manifest_path = output / "manifest.json"
    if all((output / name).exists() for name in OUTPUTS):
        manifest = json.loads(manifest_path.read_text())
        if manifest["fingerprint"] == fingerprint:
            say(f"Data: {output} is up to date ({_summary(manifest)})")
            return manifest
    manifest_path.unlink(missing_ok=True)  # written last: an interruption leaves none behind
    for part in ("train", "valid"):
        # Megatron keeps its shuffled indices in a directory of the dataset's own name, under a hash
        # that knows nothing of the content: with new text they would point past the end of it.
        shutil.rmtree(output / f"{part}_text_document", ignore_errors=True)

    say(f"Data: {_count(documents)} of {_origin(paths)}")
    train, held_out = split(documents, options.held_out_share)
    model = train_tokenizer(train, options.vocab_size)
    output.mkdir(parents=True, exist_ok=True)
    (output / "tokenizer.model").write_bytes(model)
    manifest = {
        "source": _origin(paths),
        "options": asdict(options),
        "fingerprint": fingerprint,
        "documents": len(documents),
        "bytes": sum(_size(document.text) for document in documents),
        "tokenizer_sha256": hashlib.sha256(model).hexdigest(),
        "train": _write_part(output / "train_text_document", train, model),
        "held_out": _write_part(output / "valid_text_document", held_out, model),
    }
    manifest_path.write_text(json.dumps(manifest, indent=2) + "\n")
    say(f"Data: {output} is ready ({_summary(manifest)})")
    return manifest


def _write_part(prefix: Path, texts: list[str], model: bytes) -> dict[str, int]:
    import sentencepiece

    tokens = write_dataset(prefix, texts, sentencepiece.SentencePieceProcessor(model_proto=model))
    return {"documents": len(texts), "bytes": sum(map(_size, texts)), "tokens": tokens}


def _fingerprint(documents: list[Document], options: Options) -> str:
    import sentencepiece

    digest = hashlib.sha256(repr((options, sentencepiece.__version__)).encode())
    for document in documents:
        digest.update(repr(document).encode())
    return digest.hexdigest()


def _up_to[T](budget: int, items: list[T], size: Callable[[T], int]) -> list[T]:
    """The first items, up to and with the one at which the sum of their sizes reaches budget."""
    sums = itertools.accumulate(map(size, items))
    return items[: 1 + sum(total < budget for total in sums)]


def _size(text: str) -> int:
    return len(text.encode())


def _origin(paths: list[Path]) -> str:
    return ", ".join(map(str, paths)) or "Python's standard library"


def _count(documents: list[Document]) -> str:
    size = sum(_size(document.text) for document in documents)
    return f"{len(documents)} documents, {size / 1e6:.1f} MB,"


def _summary(manifest: dict[str, Any]) -> str:
    train, held_out = manifest["train"]["tokens"], manifest["held_out"]["tokens"]
    vocab_size = manifest["options"]["vocab_size"]
    return f"vocabulary {vocab_size}, {train:,} tokens to train on, {held_out:,} held out"


def main(arguments: list[str] | None = None) -> int:
    """Prepares the data the command line asks for; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("text", nargs="*", type=Path, help="directories, text files, JSON lines (.jsonl, .json)")
    add("--output", type=Path, default=Path("data"), help="where to write (data)")
    add("--vocab-size", type=int, default=Options.vocab_size, help="tokens in all (%(default)s)")
    add(
        "--held-out-share",
        type=float,
        default=Options.held_out_share,
        help="share of the documents kept for evaluation (%(default)s)",
    )
    add("--max-bytes", type=int, help="take about this much of the text (all of it)")
    add("--json-key", default=Options.json_key, help="where a JSON line has its text (%(default)s)")
    given = parser.parse_args(arguments)
    try:
        options = Options(given.vocab_size, given.held_out_share, given.max_bytes, given.json_key)
        prepare(given.text, given.output, options)
    except DataError as error:
        print(f"prepare_data: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
