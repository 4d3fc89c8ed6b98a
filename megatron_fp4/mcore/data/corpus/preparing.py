"""Makes the datasets of a corpus: tokenizes what is left to do, merges, writes the manifest."""

import itertools
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy

from megatron_fp4.mcore.data import manifest, outputs
from megatron_fp4.mcore.data.corpus import job, parts
from megatron_fp4.mcore.data.corpus.blocks import START, SourceFile, blocks
from megatron_fp4.mcore.data.corpus.encoding import Encoder
from megatron_fp4.mcore.data.corpus.merging import merge
from megatron_fp4.mcore.data.corpus.options import CorpusOptions, Running
from megatron_fp4.mcore.data.corpus.parts import SIDES, Count, Header
from megatron_fp4.mcore.data.corpus.progress import Progress
from megatron_fp4.mcore.data.corpus.sources import changed
from megatron_fp4.mcore.data.corpus.tokenizers import Tokenizer
from megatron_fp4.mcore.data.corpus.workers import encoded
from megatron_fp4.mcore.data.errors import DataError
from megatron_fp4.mcore.data.folders import shown

SMALLEST_BLOCK, LARGEST_BLOCK = 2**20, 2**24  # bytes
_BLOCKS = 1024  # into which a corpus is divided, unless its blocks would be too small or too large


def preprocess(
    sources: list[SourceFile],
    output: Path,
    options: CorpusOptions,
    tokenizer: Tokenizer,
    running: Running,
) -> dict[str, Any]:
    """Writes the datasets and manifest.json to `output`; returns the manifest.

    Goes on with what an interrupted call for the same data has left there. If `output` already has
    the data, nothing is written.

    Raises DataError if the text cannot be used or changes meanwhile, if `output` has other data,
    and if reading or writing fails.
    """
    outputs.check(output)
    work = _job(sources, options, tokenizer)
    made = manifest.read(output)
    if made and made["fingerprint"] == job.fingerprint(work) and manifest.describes(made, output):
        running.say(f"Data: {shown(output)} is up to date ({_summary(made)})")
    else:
        _check_empty(output, made)
        with outputs.writing(output), job.opened(output, work) as folder:
            with _dropped_if_refused(folder, lambda: not _documents(_finished(folder, tokenizer))):
                headers = _tokenize(sources, options, tokenizer, running, folder)
            if path := changed(sources):
                raise DataError(f"{path} changed while it was read: delete {folder} to start anew")
            with _dropped_if_refused(folder):
                counts = _counts(headers, options)
            made = _manifest(work, headers, options, tokenizer, counts)
            running.say(f"Data: writing {shown(output)}")
            made["files"] = _write(output, folder, headers, counts, tokenizer.dtype)
            manifest.write(output, made)  # written last: it means that the data are complete
        for line in _left_out_lines(headers, output):
            running.say(f"Data: {line}")
        running.say(f"Data: {shown(output)} is ready ({_summary(made)})")
    shutil.rmtree(output / job.FOLDER, ignore_errors=True)
    return made


def _job(sources: list[SourceFile], options: CorpusOptions, tokenizer: Tokenizer) -> dict[str, Any]:
    """All that the data depend on. The keys are words that job.py tells the user."""
    return {
        "format": 1,
        "text": [list(source) for source in sources],
        "tokenizer": [tokenizer.kind, tokenizer.sha256, tokenizer.probe()],
        "options": asdict(options),
    }


def _check_empty(output: Path, made: dict[str, Any] | None) -> None:
    """Raises DataError if `output` has data that would be overwritten. made: their manifest."""
    if made is not None:
        raise DataError(
            f"{output} has data of another text, tokenizer or options, or its files changed: give "
            "another --output, or delete it"
        )
    for name in manifest.DATASETS:
        for path in (output / f"{name}.bin", output / f"{name}.idx"):
            if path.exists() and not job.exists(output):
                raise DataError(f"{path} exists already: give another --output, or delete it")


@contextmanager
def _dropped_if_refused(
    folder: Path, is_useless: Callable[[], bool] = lambda: True
) -> Iterator[None]:
    """A context that deletes `folder` at a DataError if is_useless(), so that the parts of a
    command that was refused do not stand in the way of the corrected one."""
    try:
        yield
    except DataError:
        if is_useless():
            shutil.rmtree(folder)
        raise


def _finished(folder: Path, tokenizer: Tokenizer) -> list[Header]:
    return parts.finished(folder, numpy.dtype(tokenizer.dtype).itemsize)


def _tokenize(
    sources: list[SourceFile],
    options: CorpusOptions,
    tokenizer: Tokenizer,
    running: Running,
    folder: Path,
) -> list[Header]:
    """Tokenizes what is not yet tokenized; returns the headers of all parts."""
    headers = [_accepted(header, running.strict) for header in _finished(folder, tokenizer)]
    parts.drop_after(folder, len(headers))
    begin, position = (headers[-1].end, headers[-1].position) if headers else (START, 0)
    if headers:
        running.say(f"Data: going on after {_documents(headers):,} documents")
    total = sum(source.size for source in sources)
    size = min(max(total // _BLOCKS, SMALLEST_BLOCK), LARGEST_BLOCK)
    todo = blocks(sources, options.json_key, size, len(headers), begin)
    with (
        closing(encoded(todo, Encoder(folder, tokenizer, options), running.workers)) as fresh,
        closing(Progress(total, position, _documents(headers), sys.stderr)) as progress,
    ):
        for header in fresh:
            headers.append(_accepted(header, running.strict))
            progress.add(_documents([header]), _text_bytes(header), header.position)
    return headers


def _accepted(header: Header, strict: bool) -> Header:
    """The same header. Raises DataError if `strict` and something was left out."""
    if strict and header.problems:
        raise DataError(": ".join(header.problems[0]))
    return header


def _text_bytes(header: Header) -> int:
    return sum(count.bytes for count in header.counts.values())


def _write(
    output: Path, folder: Path, headers: list[Header], counts: dict[str, Count], dtype: str
) -> dict[str, int]:
    """Writes the datasets and left_out.txt; returns the size in bytes of each file by name.

    counts: of each side of all parts; a side without tokens has no dataset.
    """
    outputs.clear(output)
    names = []
    for name, side in manifest.DATASETS.items():
        if counts[side].tokens:
            merge(folder, headers, side, output / name, dtype)
            names += [f"{name}.bin", f"{name}.idx"]
    if any(header.left_out for header in headers):
        names.append(manifest.LEFT_OUT)
        with (output / manifest.LEFT_OUT).open("w", encoding="utf-8") as file:
            for header in headers:
                file.writelines(
                    f"{it.place}: {it.reason}\n" for it in parts.problems(folder, header)
                )
    return manifest.sizes(output, names)


def _left_out_lines(headers: list[Header], output: Path) -> list[str]:
    """Lines for the user: how many lines and files were left out, and the first of them."""
    count = sum(header.left_out for header in headers)
    if not count:
        return []
    first = itertools.chain.from_iterable(header.problems for header in headers)
    shown_first = list(itertools.islice(first, parts.PROBLEMS_SHOWN))
    return [
        f"left out {count:,} lines or files, listed in {shown(output / manifest.LEFT_OUT)}:",
        *(f"  {place}: {reason}" for place, reason in shown_first),
        *(["  ..."] if count > len(shown_first) else []),
    ]


def _counts(headers: list[Header], options: CorpusOptions) -> dict[str, Count]:
    """What each side has in all parts. Raises DataError if one that is asked for has no tokens."""
    counts = {side: sum((it.counts[side] for it in headers), Count()) for side in SIDES}
    train, held_out = (counts[side].tokens for side in SIDES)
    if not train + held_out:
        first = next((problem for header in headers for problem in header.problems), None)
        why = "no line or file has text that can be used" if first is None else ": ".join(first)
        raise DataError(f"the text is empty: {why}")
    if not train or (options.held_out_share and not held_out):
        raise DataError(
            f"--held-out-share {options.held_out_share} leaves one side of "
            f"{_documents(headers):,} documents without text: give another share, or 0"
        )
    return counts


def _documents(headers: list[Header]) -> int:
    return sum(count.documents for header in headers for count in header.counts.values())


def _manifest(
    work: dict[str, Any],
    headers: list[Header],
    options: CorpusOptions,
    tokenizer: Tokenizer,
    counts: dict[str, Count],
) -> dict[str, Any]:
    """The manifest, but for the sizes of the files."""
    return {
        "command": manifest.PREPROCESS,
        "fingerprint": job.fingerprint(work),
        "files_read": len(work["text"]),
        "options": {**asdict(options), "vocab_size": tokenizer.vocab_size},
        "tokenizer": {"type": tokenizer.kind, "model": str(tokenizer.path), "eod": tokenizer.eod},
        "tokenizer_sha256": tokenizer.sha256,
        "left_out": sum(header.left_out for header in headers),
        **{side: asdict(count) if count.tokens else None for side, count in counts.items()},
    }


def _summary(made: dict[str, Any]) -> str:
    train, held_out = made["train"], made["held_out"]
    text = (
        f"vocabulary {made['options']['vocab_size']:,}, {train['documents']:,} documents and "
        f"{train['tokens']:,} tokens to train on"
    )
    if held_out:
        text += f", {held_out['documents']:,} documents and {held_out['tokens']:,} tokens held out"
    empty = sum(side["documents"] - side["filled"] for side in (train, held_out) if side)
    return text + (f"; {empty:,} documents are empty" if empty else "")
