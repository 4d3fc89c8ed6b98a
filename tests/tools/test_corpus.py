"""The parts of tools/preprocess.py: blocks, tokenizers, progress, and what a launch checks."""

import argparse
import gzip
import io
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_fp4.errors import ConfigError
from megatron_fp4.mcore.data.corpus import blocks, parts
from megatron_fp4.mcore.data.corpus.blocks import START, Block, FilePiece, SourceFile
from megatron_fp4.mcore.data.corpus.encoding import texts_of, tokenized
from megatron_fp4.mcore.data.corpus.merging import merge
from megatron_fp4.mcore.data.corpus.options import CorpusOptions
from megatron_fp4.mcore.data.corpus.progress import Progress
from megatron_fp4.mcore.data.corpus.sources import sources_of
from megatron_fp4.mcore.data.corpus.tokenizers import Tokenizer, open_tokenizer
from megatron_fp4.mcore.data.errors import DataError
from megatron_fp4.mcore.data.preprocess import main
from megatron_fp4.mcore.launch.refusals import dataset
from megatron_fp4.mcore.launch.refusals.table import refuse
from testing.builders.corpus import (
    hugging_face_tokenizer,
    megatrons_dataset,
    megatrons_tokenizer,
    sentencepiece_model,
    texts,
    write_lines,
)

CHECKOUT = Path(__file__).parents[2]

# --- blocks ----------------------------------------------------------------------------------


def corpus(folder: Path) -> list[SourceFile]:
    """JSON lines, whole and compressed, of which one is cut short, a text file, Parquet."""
    lines = write_lines(folder / "a.jsonl", texts(60)).read_bytes()
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines)[:-300])
    (folder / "c.txt").write_text("a text\n")
    (folder / "d.jsonl").write_bytes(lines.replace(b"\n", b"\n\n")[:-2] + b"\n{")
    write_lines(folder / "e.jsonl", ["small"])
    if parquet := pytest.importorskip("pyarrow.parquet"):
        table = pytest.importorskip("pyarrow").table({"text": [*texts(30), None]})
        parquet.write_table(table, folder / "f.parquet", row_group_size=4)
    return sources_of([folder], "text", print)


def found(made: list[blocks.Block]) -> list[Any]:
    """The texts and problems of blocks."""
    pieces = itertools.chain.from_iterable(block.pieces for block in made)
    return [text for piece in pieces for text in texts_of(piece, "text")]


@pytest.mark.parametrize("size", [1, 700, 5000])
def test_a_corpus_can_be_read_on_from_the_end_of_every_block(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "_READ_BYTES", 333)
    sources = corpus(tmp_path)
    whole = list(blocks.blocks(sources, "text", size))
    expected = found(list(blocks.blocks(sources, "text", 10**9)))
    assert len(expected) > 150 and found(whole) == expected
    assert [block.number for block in whole] == list(range(len(whole)))
    assert whole[-1].position == sum(source.size for source in sources)
    for number, block in enumerate(whole):
        rest = list(blocks.blocks(sources, "text", size, block.number + 1, block.end))
        assert found(whole[: number + 1]) + found(rest) == expected
        assert all(one.end == two.begin for one, two in itertools.pairwise(whole[: number + 1]))
    # The known mistake, to go on at another place, is seen.
    moved = whole[0].end._replace(offset=whole[0].end.offset + 1)
    assert (
        found(whole[:1]) + found(list(blocks.blocks(sources, "text", size, 1, moved))) != expected
    )


def test_a_line_longer_than_a_block_stays_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "_READ_BYTES", 10)
    write_lines(tmp_path / "a.jsonl", ["short", "long" * 100, "short"])
    made = list(blocks.blocks(sources_of([tmp_path], "text", print), "text", 20))
    assert found(made) == ["short", "long" * 100, "short"] and len(made) > 1


# --- merging ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_499, "uint16"), (65_500, "int32")])
def test_a_large_vocabulary_takes_wider_tokens(vocab_size: int, dtype: str, tmp_path: Path) -> None:
    ids = {text: [vocab_size - 1 - i] * i for i, text in enumerate(texts(9))}
    library = SimpleNamespace(encode=lambda batch, num_threads: [ids[text] for text in batch])
    kind = "SentencePieceTokenizer"
    tokenizer = Tokenizer(kind, tmp_path, vocab_size, 2, "sha256", True, library)
    assert tokenizer.dtype == dtype
    content = write_lines(tmp_path / "a.jsonl", texts(9)).read_bytes()
    piece = FilePiece("a.jsonl", "lines", content=content)
    part = tokenized(Block(0, START, START, 0, [piece]), tokenizer, CorpusOptions())
    parts.write(tmp_path, part)
    merge(tmp_path, [part.header], "train", tmp_path / "merged", dtype)
    megatrons = SimpleNamespace(vocab_size=vocab_size, eod=2, tokenize=ids.get)
    expected = megatrons_dataset(texts(9), megatrons, tmp_path / "megatrons")
    assert tuple((tmp_path / f"merged.{end}").read_bytes() for end in ("bin", "idx")) == expected


# --- progress --------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_gets_a_line_at_times_and_a_terminal_one_that_is_redrawn() -> None:
    for stream, start in ((io.StringIO(), ""), (Terminal(), "\r\x1b[K")):
        now = iter([0.0, 0.1, 50.0, 50.2, 100.0]).__next__
        progress = Progress(4_000_000, 1_000_000, 10, stream, now)
        progress.add(5, 1_000_000, 1_100_000)  # too early
        progress.add(5, 9_000_000, 2_000_000)
        progress.add(5, 1, 2_100_000)  # too early again
        progress.add(1975, 9_999_999, 3_000_000)
        lines = stream.getvalue().replace("\r\x1b[K", "\n").strip().split("\n")
        assert lines == [
            "Data: 20 documents, 50.0% of 4.0 MB, 0.2 MB/s of text, 0:01:40 left",
            "Data: 2,000 documents, 75.0% of 4.0 MB, 0.2 MB/s of text, 0:00:50 left",
        ]
        assert stream.getvalue().startswith(start)


# --- memory ----------------------------------------------------------------------------------


def peak(path: Path, model: Path, output: Path) -> float:
    """The peak memory in MB of a command, of its main process and of the largest worker."""
    code = (
        "import resource, sys; from megatron_fp4.mcore.data.preprocess import main; "
        "assert main(sys.argv[1:]) == 0; "
        "print(*(resource.getrusage(who).ru_maxrss for who in "
        "(resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))"
    )
    words = [path, "--tokenizer-model", model, "--output", output, "--workers", "2"]
    made = subprocess.run(
        [sys.executable, "-c", code, *map(str, words)],
        capture_output=True,
        text=True,
        check=True,
        cwd=CHECKOUT,
    )
    return max(int(size) for size in made.stdout.split()[-2:]) / 1e3


@pytest.mark.slow
def test_a_longer_text_takes_no_more_memory(tmp_path: Path) -> None:
    model = sentencepiece_model(tmp_path / "sp.model")
    documents = texts(200)
    sizes = {}
    for name, copies in (("short", 20), ("long", 220)):
        with (tmp_path / f"{name}.jsonl").open("w") as file:
            for _ in range(copies):
                file.writelines(json.dumps({"text": text}) + "\n" for text in documents)
        sizes[name] = (tmp_path / f"{name}.jsonl").stat().st_size / 1e6
    few, many = (peak(tmp_path / f"{it}.jsonl", model, tmp_path / it) for it in sizes)
    assert sizes["long"] - sizes["short"] > 20  # MB, which a command that holds all would show
    assert many - few < 10


# --- tokenizers ------------------------------------------------------------------------------


def test_a_tokenizer_without_an_end_of_text_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = hugging_face_tokenizer(tmp_path / "tokenizer", eos=None)
    with pytest.raises(DataError, match="has no token for the end of a text .eos.: name it as eos"):
        open_tokenizer("HuggingFaceTokenizer", folder)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="empty is no HuggingFaceTokenizer: ") as error:
        open_tokenizer("HuggingFaceTokenizer", tmp_path / "empty")
    assert "\n" not in str(error.value)


def test_missing_transformers_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(DataError, match="needs the package transformers.*pip install transformers"):
        open_tokenizer("HuggingFaceTokenizer", tmp_path)


# --- what a launch checks --------------------------------------------------------------------


def launch(monkeypatch: pytest.MonkeyPatch, prefix: Path, kind: str, model: Path) -> Any:
    """The arguments of a launch whose tokenizer Megatron has opened."""
    monkeypatch.setattr(dataset, "get_tokenizer", lambda: megatrons_tokenizer(model))
    return argparse.Namespace(
        data_path=[str(prefix)],
        data_args_path=None,
        per_split_data_args_path=None,
        train_data_path=None,
        valid_data_path=None,
        test_data_path=None,
        tokenizer_type=kind,
        tokenizer_model=str(model),
        padded_vocab_size=1024,
    )


def test_a_launch_with_another_tokenizer_than_the_datas_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    own = hugging_face_tokenizer(tmp_path / "own")
    other = hugging_face_tokenizer(tmp_path / "other", vocab_size=262)
    copy = hugging_face_tokenizer(tmp_path / "copy")
    (copy / "more.txt").write_text("a file that changes no token")
    sentencepiece = sentencepiece_model(tmp_path / "sp.model")
    write_lines(tmp_path / "text.jsonl", texts(50))
    kinds = {"HuggingFaceTokenizer": own, "SentencePieceTokenizer": sentencepiece}
    for kind, model in kinds.items():
        output = tmp_path / kind
        words = [tmp_path / "text.jsonl", "--tokenizer-model", model, "--output", output]
        assert main([str(word) for word in words]) == 0
        prefix = output / "train_text_document"
        refuse(dataset.tokens(launch(monkeypatch, prefix, kind, model)))
        wrong = {"HuggingFaceTokenizer": other, "SentencePieceTokenizer": sentencepiece} | (
            {"HuggingFaceTokenizer": own} if kind == "SentencePieceTokenizer" else {}
        )
        for its_kind, its_model in wrong.items():
            if its_model != model:
                args = launch(monkeypatch, prefix, its_kind, its_model)
                remedy = f"give --tokenizer-type {kind} --tokenizer-model {model}"
                with pytest.raises(ConfigError, match=f"made with another tokenizer.*{remedy}"):
                    refuse(dataset.tokens(args))
    prefix = tmp_path / "HuggingFaceTokenizer" / "train_text_document"
    refuse(dataset.tokens(launch(monkeypatch, prefix, "HuggingFaceTokenizer", copy)))


# --- Megatron-LM's own tool ------------------------------------------------------------------


@pytest.mark.outside
@pytest.mark.parametrize("kind", ["SentencePieceTokenizer", "HuggingFaceTokenizer"])
def test_the_data_are_what_upstreams_tool_writes(kind: str, tmp_path: Path) -> None:
    """No wheel has the tool: MEGATRON_LM names a checkout of Megatron-LM."""
    if not (checkout := os.environ.get("MEGATRON_LM")):
        pytest.skip("set MEGATRON_LM to a checkout of Megatron-LM, of v0.19 or later")
    is_own = kind == "SentencePieceTokenizer"
    make = sentencepiece_model if is_own else hugging_face_tokenizer
    model = make(tmp_path / "tokenizer")
    lines = write_lines(tmp_path / "text.jsonl", texts(300))
    flags = ["--input", lines, "--output-prefix", tmp_path / "up", "--append-eod", "--workers", "2"]
    flags += ["--tokenizer-type", kind, "--tokenizer-model", model]
    tool = Path(checkout) / "tools" / "preprocess_data.py"
    subprocess.run([sys.executable, str(tool), *map(str, flags)], check=True)
    command = [lines, "--tokenizer-model", model, "--output", tmp_path / "data"]
    assert main([str(word) for word in command]) == 0
    for end in ("bin", "idx"):
        theirs = (tmp_path / f"up_text_document.{end}").read_bytes()
        assert (tmp_path / "data" / f"train_text_document.{end}").read_bytes() == theirs
    # Our account of the tool, with which the quick tests compare, is the same.
    made = megatrons_dataset(texts(300), megatrons_tokenizer(model), tmp_path / "account")
    assert made[0] == (tmp_path / "up_text_document.bin").read_bytes()
    assert made[1] == (tmp_path / "up_text_document.idx").read_bytes()
