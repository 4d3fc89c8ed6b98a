"""Finished data are left alone; what cannot be used is named in a line."""

import json
import os
import resource
from pathlib import Path

import pytest

from megatron_fp4.mcore.data import prepare_data
from megatron_fp4.mcore.data.errors import DataError
from testing.builders.corpus import (
    megatrons_dataset,
    megatrons_tokenizer,
)
from testing.builders.preprocessing import TEXTS, TRAIN, failure, files, run, write_corpus


def test_finished_data_are_neither_made_again_nor_overwritten(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_corpus(tmp_path / "text", "lines")
    output = tmp_path / "data"
    command = (tmp_path / "text", "--tokenizer-model", models / "sp.model", "--output", output)
    run(*command)
    before = (output / f"{TRAIN}.bin").stat().st_mtime_ns
    capsys.readouterr()
    run(*command, "--workers", 1)
    assert "is up to date" in capsys.readouterr().out
    assert (output / f"{TRAIN}.bin").stat().st_mtime_ns == before
    said = failure(capsys, *command, "--held-out-share", "0.5")
    assert f"{output} has data of another text, tokenizer or options" in said
    with pytest.raises(DataError, match="has data that megatron-fp4-preprocess wrote"):
        prepare_data.prepare([tmp_path / "text"], output, prepare_data.Options(vocab_size=300))
    (output / "manifest.json").unlink()
    assert f"{output / TRAIN}.bin exists already" in failure(capsys, *command)


def test_a_dry_run_writes_nothing(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = write_corpus(tmp_path / "text", "gz")
    size = sum(path.stat().st_size for path in paths)
    (tmp_path / "text" / "0.jsonl").write_text('{"text": "a b"}\n{\n')
    capsys.readouterr()
    run(
        *paths,
        tmp_path / "text" / "0.jsonl",
        "--tokenizer-model",
        models / "sp.model",
        "--output",
        tmp_path / "data",
        "--dry-run",
    )
    said = capsys.readouterr().out
    assert "files: 3 of JSON lines" in said and f"{(size + 18) / 1e6:,.1f} MB" in said
    run(
        *paths,
        tmp_path / "text" / "0.jsonl",
        "--tokenizer-model",
        models / "sp.model",
        "--output",
        tmp_path / "whole",
    )
    tokens = json.loads((tmp_path / "whole" / "manifest.json").read_text())["train"]["tokens"]
    assert f"as these go: {tokens:,} tokens in all" in said  # the sample is the whole corpus
    assert f"{tmp_path / 'text' / '0.jsonl'}:2: not a JSON object" in said
    assert not (tmp_path / "data").exists()


# --- what cannot be used ---------------------------------------------------------------------

BAD = {5: "{", 50: '{"txt": "b"}', 90: '{"text": 1}', 91: "[]", 150: '{"text": "caf\udce9"}'}


def write_bad(path: Path) -> Path:
    """TEXTS as JSON lines, with BAD lines between them by their numbers."""
    lines = iter([json.dumps({"text": text}) for text in TEXTS])
    total = len(TEXTS) + len(BAD)
    content = [BAD[number] if number in BAD else next(lines) for number in range(1, total + 1)]
    path.write_bytes("".join(f"{line}\n" for line in content).encode(errors="surrogateescape"))
    return path


def test_lines_without_text_are_counted_and_named(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_bad(tmp_path / "text.jsonl")
    command = (path, "--tokenizer-model", models / "sp.model", "--output", tmp_path / "data")
    run(*command, "--workers", 2)
    tokenizer = megatrons_tokenizer(models / "sp.model")
    assert files(tmp_path / "data") == megatrons_dataset(TEXTS, tokenizer, tmp_path / "megatrons")
    said = capsys.readouterr().out
    assert (
        f"Data: left out 5 lines or files, listed in {tmp_path / 'data' / 'left_out.txt'}" in said
    )
    named = (tmp_path / "data" / "left_out.txt").read_text().splitlines()
    assert [line.split(": ")[0] for line in named] == [f"{path}:{number}" for number in BAD]
    assert "not UTF-8: byte 0xe9" in named[-1] and 'no text under the key "text"' in named[1]


def test_strict_ends_at_the_first_of_them(
    models: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write_bad(tmp_path / "text.jsonl")
    command = (path, "--tokenizer-model", models / "sp.model", "--strict", "--workers", 2)
    said = failure(capsys, *command, "--output", tmp_path / "data")
    assert said == f"preprocess: {path}:5: not a JSON object: " + said.split("object: ")[1]
    assert f"{path}:5: " in failure(
        capsys, *command, "--output", tmp_path / "data"
    )  # parts at hand


def test_a_mistake_can_be_corrected_while_nothing_is_finished(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, _ = write_corpus(tmp_path / "text", "parquet")
    command = (source, "--tokenizer-model", models / "sp.model", "--output", tmp_path / "data")
    assert 'no column "body"' in failure(capsys, *command, "--json-key", "body")
    run(*command)
    assert (tmp_path / "data" / "manifest.json").exists()


@pytest.mark.parametrize(
    ("mistake", "says"),
    [
        (["--json-key", "body"], 'no text under the key "body"'),
        (["--json-key", "body", "--strict"], 'no text under the key "body"'),
        (["--held-out-share", "1e-9"], "leaves one side of 200 documents without text"),
    ],
)
def test_a_refused_command_leaves_nothing_in_the_way_of_the_corrected_one(
    models: Path, tmp_path: Path, mistake: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = write_corpus(tmp_path / "text", "lines")
    command = (*paths, "--tokenizer-model", models / "sp.model", "--output", tmp_path / "data")
    assert says in failure(capsys, *command, *mistake)
    run(*command)
    assert (tmp_path / "data" / "manifest.json").exists()


def test_what_strict_has_tokenized_before_its_refusal_is_kept(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_bad(tmp_path / "text.jsonl")
    command = (path, "--tokenizer-model", models / "sp.model", "--output", tmp_path / "data")
    failure(capsys, *command, "--strict", "--workers", 1)
    run(*command)
    assert "going on after" in capsys.readouterr().out


def test_prepare_data_leaves_an_unfinished_corpus_alone(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_bad(tmp_path / "text.jsonl")
    command = (path, "--tokenizer-model", models / "sp.model", "--output", tmp_path / "data")
    failure(capsys, *command, "--strict")
    with pytest.raises(DataError, match="data has unfinished data of megatron-fp4-preprocess"):
        prepare_data.prepare([tmp_path], tmp_path / "data", prepare_data.Options(vocab_size=300))
    assert [each.name for each in (tmp_path / "data").iterdir()] == [".parts"]


def test_more_workers_than_the_system_allows(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_corpus(tmp_path / "text", "lines")
    command = (tmp_path / "text", "--tokenizer-model", models / "sp.model")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 9, before[1]))
    try:
        said = failure(capsys, *command, "--output", tmp_path / "data", "--workers", 64)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert "--workers 64: Too many open files: give fewer" in said
    run(*command, "--output", tmp_path / "data", "--workers", 1)


def test_a_damaged_file_is_read_as_far_as_it_goes(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, cut = write_corpus(tmp_path / "text", "gz")
    cut.write_bytes(cut.read_bytes()[:-500])
    command = (cut, whole, "--tokenizer-model", models / "sp.model")
    run(*command, "--output", tmp_path / "data")
    [said] = (tmp_path / "data" / "left_out.txt").read_text().splitlines()
    kept = int(said.split("damaged after line ")[1].split(",")[0])
    assert said.startswith(f"{cut}: ") and "Compressed file ended" in said and 0 < kept < 80
    tokenizer = megatrons_tokenizer(models / "sp.model")
    made = megatrons_dataset(TEXTS[120 : 120 + kept] + TEXTS[:120], tokenizer, tmp_path / "m")
    assert files(tmp_path / "data") == made
    assert f"{cut}: damaged after" in failure(
        capsys, *command, "--strict", "--output", tmp_path / "s"
    )


def test_files_that_are_no_text_are_named(models: Path, tmp_path: Path) -> None:
    write_corpus(tmp_path / "text", "lines")
    os.mkdir(os.fsencode(tmp_path) + b"/text/caf\xe9")  # a name that is not UTF-8
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/text/caf\xe9/a.jsonl")).write_text("{\n")
    (tmp_path / "text" / "picture.png").write_bytes(b"\x89PNG\0\xff")
    (tmp_path / "text" / "broken.parquet").write_bytes(b"PAR1 and nothing else")
    run(tmp_path / "text", "--tokenizer-model", models / "sp.model", "--output", tmp_path / "data")
    named = (tmp_path / "data" / "left_out.txt").read_text()
    assert "picture.png: binary" in named and "broken.parquet: damaged, all" in named
    assert "caf\\xe9/a.jsonl:1: not a JSON object" in named


@pytest.mark.parametrize(
    ("content", "words", "says"),
    [
        (None, [], "text.jsonl: not readable: No such file or directory"),
        ("\n", [], "the text is empty"),
        ('{"text": ""}\n', [], "the text is empty"),
        ('{"content": "a"}\n', [], 'text.jsonl:1: no text under the key "text"; name the key'),
        (
            '{"text": "a"}\n',
            ["--held-out-share", "0.001"],
            "leaves one side of 1 documents without",
        ),
        ('{"text": "a"}\n', ["--held-out-share", "1"], "1.0 is not at least 0 and below 1"),
        ('{"text": "a"}\n', ["--workers", "0"], "--workers 0: give 1 or more"),
        (
            '{"text": "a"}\n',
            ["--tokenizer-hf-no-include-special-tokens"],
            "is for a Hugging Face tokenizer: leave it out",
        ),
        ('{"text": "a"}\n', ["--no-such-option"], "unrecognized arguments: --no-such-option"),
        ('{"text": "a"}\n', ["--tokenizer-model", "no.model"], "no.model is no file"),
        ('{"text": "a"}\n', ["--tokenizer-model", __file__], "is no SentencePieceTokenizer"),
        (
            '{"text": "a"}\n',
            ["--tokenizer-type", "HuggingFaceTokenizer"],
            "is no folder: give the one that has tokenizer.json",
        ),
    ],
)
def test_a_mistake_is_one_line(
    content: str | None,
    words: list[str],
    says: str,
    models: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "text.jsonl"
    if content is not None:
        file.write_text(content)
    command = (file, "--tokenizer-model", models / "sp.model", "--output", tmp_path / "data")
    assert says in failure(capsys, *command, *words)
    assert not (tmp_path / "data" / "manifest.json").exists()
