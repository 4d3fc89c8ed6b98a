"""A corpus of any size in, the files that Megatron's own builder writes out."""

import gzip
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_fp4.mcore.data import prepare_data
from megatron_fp4.mcore.data.corpus import blocks, parts, preparing, workers
from megatron_fp4.mcore.data.corpus.encoding import side_of
from megatron_fp4.mcore.data.errors import DataError
from megatron_fp4.mcore.data.preprocess import main
from testing.builders.corpus import (
    hugging_face_tokenizer,
    megatrons_dataset,
    megatrons_tokenizer,
    sentencepiece_model,
    texts,
    write_lines,
)

TRAIN, VALID = "train_text_document", "valid_text_document"
TEXTS = texts(200)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a SentencePiece model."""
    folder = tmp_path_factory.mktemp("models")
    sentencepiece_model(folder / "sp.model")
    return folder


@pytest.fixture(scope="module")
def hugging_face(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    return hugging_face_tokenizer(tmp_path_factory.mktemp("hugging_face"))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a small corpus has many blocks; worker processes are forked, so they have it too."""
    monkeypatch.setattr(preparing, "SMALLEST_BLOCK", 2000)
    monkeypatch.setattr(preparing, "LARGEST_BLOCK", 2000)
    monkeypatch.setattr(blocks, "_READ_BYTES", 500)


def files(output: Path, part: str = TRAIN) -> tuple[bytes, bytes]:
    return (output / f"{part}.bin").read_bytes(), (output / f"{part}.idx").read_bytes()


def run(*words: object) -> None:
    assert main([str(word) for word in words]) == 0


def failure(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """The line for the user of a command that fails."""
    capsys.readouterr()
    assert main([str(word) for word in words]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.startswith("preprocess: ")
    return said.strip()


# --- the data --------------------------------------------------------------------------------


def write_zst(path: Path, content: bytes) -> None:
    zstandard = pytest.importorskip("zstandard")
    half = content.find(b"\n", len(content) // 2) - 5  # within a line
    compress = zstandard.ZstdCompressor().compress
    path.write_bytes(compress(content[:half]) + compress(content[half:]))


def write_corpus(folder: Path, kind: str) -> list[Path]:
    """TEXTS in two files."""
    folder.mkdir()
    paths = []
    for index, documents in enumerate((TEXTS[:120], TEXTS[120:])):
        path = write_lines(folder / f"{index}.jsonl", documents)
        content = path.read_bytes()
        if kind == "parquet":
            table = pytest.importorskip("pyarrow").table(
                {"id": range(len(documents)), "text": documents}
            )
            path = folder / f"{index}.parquet"
            pytest.importorskip("pyarrow.parquet").write_table(table, path, row_group_size=7)
        elif kind == "gz":
            path = folder / f"{index}.jsonl.gz"
            path.write_bytes(gzip.compress(content[:999]) + gzip.compress(content[999:]))
        elif kind == "zst":
            path = folder / f"{index}.jsonl.zst"
            write_zst(path, content)
        elif kind == "crlf":
            path.write_bytes(b"\xef\xbb\xbf\n" + content.replace(b"\n", b"\r\n\n")[:-3])
        paths.append(path)
    return paths


@pytest.mark.parametrize("kind", ["lines", "crlf", "gz", "zst", "parquet"])
def test_the_data_are_what_megatrons_builder_writes(
    kind: str, models: Path, tmp_path: Path
) -> None:
    paths = write_corpus(tmp_path / "text", kind)
    tokenizer = megatrons_tokenizer(models / "sp.model")
    for count in (1, 2):
        run(
            *paths,
            "--tokenizer-model",
            models / "sp.model",
            "--output",
            tmp_path / f"{count}",
            "--workers",
            count,
        )
        assert files(tmp_path / f"{count}") == megatrons_dataset(
            TEXTS, tokenizer, tmp_path / "megatrons"
        )
        assert sorted(os.listdir(tmp_path / f"{count}")) == [
            "manifest.json",
            f"{TRAIN}.bin",
            f"{TRAIN}.idx",
        ]
    # The comparison sees a document that is missing, moved or without tokens.
    for wrong in (TEXTS[:1] + TEXTS[2:], [TEXTS[3], *TEXTS[1:3], TEXTS[0], *TEXTS[4:]]):
        assert files(tmp_path / "1") != megatrons_dataset(wrong, tokenizer, tmp_path / "wrong")


@pytest.mark.parametrize("special", [True, False])
def test_a_hugging_face_tokenizer_encodes_as_in_megatron(
    special: bool, hugging_face: Path, tmp_path: Path
) -> None:
    write_corpus(tmp_path / "text", "lines")
    words = [] if special else ["--tokenizer-hf-no-include-special-tokens"]
    model = hugging_face / "tokenizer.json" if special else hugging_face
    run(tmp_path / "text", "--tokenizer-model", model, "--output", tmp_path / "data", *words)
    for includes in (True, False):
        tokenizer = megatrons_tokenizer(hugging_face, include_special_tokens=includes)
        made = megatrons_dataset(TEXTS, tokenizer, tmp_path / "megatrons")
        assert (files(tmp_path / "data") == made) == (includes == special)


def test_each_text_file_is_a_document_in_the_order_given(models: Path, tmp_path: Path) -> None:
    documents = {"b": "second\n", "a": " first", "c/a": "fourth", "c/b": ""}
    for name, content in documents.items():
        (tmp_path / "text" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "text" / name).write_text(content)
    (tmp_path / "zeroth.txt").write_text("zeroth")
    run(
        tmp_path / "zeroth.txt",
        tmp_path / "text",
        "--tokenizer-model",
        models / "sp.model",
        "--output",
        tmp_path / "data",
    )
    expected = ["zeroth", " first", "second\n", "fourth", ""]
    tokenizer = megatrons_tokenizer(models / "sp.model")
    assert files(tmp_path / "data") == megatrons_dataset(
        expected, tokenizer, tmp_path / "megatrons"
    )


def test_documents_are_held_out_by_their_text(models: Path, tmp_path: Path) -> None:
    write_corpus(tmp_path / "text", "lines")
    share = ("--held-out-share", "0.2", "--tokenizer-model", models / "sp.model")
    for count in (1, 2):
        run(tmp_path / "text", *share, "--output", tmp_path / f"{count}", "--workers", count)
    tokenizer = megatrons_tokenizer(models / "sp.model")
    held_out = [text for text in TEXTS if side_of(text, 0.2) == "held_out"]
    train = [text for text in TEXTS if side_of(text, 0.2) == "train"]
    assert 15 < len(held_out) < 75  # 40 expected; copies move together
    assert not set(held_out) & set(train)
    for output in (tmp_path / "1", tmp_path / "2"):
        assert files(output) == megatrons_dataset(train, tokenizer, tmp_path / "m")
        assert files(output, VALID) == megatrons_dataset(held_out, tokenizer, tmp_path / "m")
    # More is held out by a larger share, and nothing that a smaller one holds out is left.
    assert set(held_out) < {text for text in TEXTS if side_of(text, 0.5) == "held_out"}
    record = json.loads((tmp_path / "1" / "manifest.json").read_text())
    assert record["train"]["documents"] + record["held_out"]["documents"] == len(TEXTS)
    assert record["held_out"]["tokens"] == sum(
        IndexedDataset(str(tmp_path / "1" / VALID)).sequence_lengths
    )


# --- interruptions ---------------------------------------------------------------------------


def start(*words: object) -> Any:
    """Starts a command in a process of its own."""
    fork = multiprocessing.get_context("fork")
    process = fork.Process(target=lambda: sys.exit(main([str(word) for word in words])))
    process.start()
    return process


@pytest.mark.parametrize(
    "kind",
    ["lines", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("gz", "parquet"))],
)
def test_a_command_that_is_killed_goes_on(
    kind: str, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = parts.write

    def slow_write(*given: Any) -> None:
        time.sleep(0.02)
        write(*given)

    # Slowed down, so that a kill meets every stage; workers are forked and have this too.
    monkeypatch.setattr("megatron_fp4.mcore.data.corpus.encoding.write", slow_write)
    write_corpus(tmp_path / "text", kind)
    command = (
        tmp_path / "text",
        "--tokenizer-model",
        models / "sp.model",
        "--held-out-share",
        "0.2",
        "--workers",
        2,
    )
    run(*command, "--output", tmp_path / "whole")
    rng, kills, progress, timed = random.Random(kind), 0, set(), 5

    def finished_parts() -> int:
        return len(list((tmp_path / "data").glob(".parts/part-*")))

    while True:
        # Killed after one or two more parts, so that each try makes progress on a machine of any
        # speed; and some times after a while, which can be at the start or while parts are merged.
        goal = finished_parts() + rng.randint(1, 2)
        end = time.monotonic() + (rng.uniform(0.05, 0.4) if timed else 60)
        process = start(*command, "--output", tmp_path / "data")
        while process.is_alive() and finished_parts() < goal and time.monotonic() < end:
            time.sleep(0.002)
        if not process.is_alive():
            process.join()
            break
        timed -= timed > 0 and finished_parts() < goal
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        kills += 1
        progress.add(finished_parts())
        assert kills < 200
    assert process.exitcode == 0 and kills > 2 and len(progress) > 2
    for part in (TRAIN, VALID):
        assert files(tmp_path / "data", part) == files(tmp_path / "whole", part)
    assert sorted(os.listdir(tmp_path / "data")) == sorted(os.listdir(tmp_path / "whole"))


@pytest.mark.parametrize(("number", "status"), [(signal.SIGKILL, -9), (signal.SIGINT, 130)])
def test_workers_end_with_their_process(
    number: int, status: int, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never_ends(*_: Any) -> None:
        time.sleep(60)

    monkeypatch.setattr("megatron_fp4.mcore.data.corpus.encoding.write", never_ends)
    write_corpus(tmp_path / "text", "lines")
    model = ("--tokenizer-model", models / "sp.model")
    process = start(tmp_path / "text", *model, "--output", tmp_path / "data", "--workers", 2)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    deadline = time.monotonic() + 20
    while len(pids := children.read_text().split()) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.3)  # the workers sleep in the middle of a block
    assert len(pids) == 2
    os.kill(process.pid, number)
    process.join()
    assert process.exitcode == status
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, "a worker lives on"
        time.sleep(0.05)


def interrupted(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *words: object
) -> Path:
    """An output folder with some parts: the fourth block fails."""
    write = parts.write

    def fails(folder: Path, part: parts.Part) -> None:
        if part.header.number == 3:
            raise OSError(28, "No space left on device", str(folder))
        write(folder, part)

    with monkeypatch.context() as patch:
        patch.setattr("megatron_fp4.mcore.data.corpus.encoding.write", fails)
        assert (
            main(
                [
                    str(it)
                    for it in (
                        tmp_path / "text",
                        "--tokenizer-model",
                        models / "sp.model",
                        "--output",
                        tmp_path / "data",
                        *words,
                    )
                ]
            )
            == 1
        )
    assert len(list((tmp_path / "data" / ".parts").glob("part-*"))) >= 3
    return tmp_path / "data"


def test_a_full_disk_is_one_line_and_the_command_goes_on(
    models: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_corpus(tmp_path / "text", "lines")
    output = interrupted(models, tmp_path, monkeypatch)
    said = capsys.readouterr().err
    assert f"cannot write {output}/.parts: No space left on device; free space" in said
    run(tmp_path / "text", "--tokenizer-model", models / "sp.model", "--output", output)
    assert "Data: going on after " in capsys.readouterr().out
    tokenizer = megatrons_tokenizer(models / "sp.model")
    assert files(output) == megatrons_dataset(TEXTS, tokenizer, tmp_path / "megatrons")


def test_another_command_does_not_go_on_with_the_work(
    models: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    paths = write_corpus(tmp_path / "text", "lines")
    output = interrupted(models, tmp_path, monkeypatch)
    command = (tmp_path / "text", "--tokenizer-model", models / "sp.model", "--output", output)
    other = sentencepiece_model(tmp_path / "other.model")
    other.write_bytes((models / "sp.model").read_bytes() + b"\x12\x00")
    remedy = f"delete {output}/.parts to start anew"
    for words, changed in (
        ((*command, "--held-out-share", "0.1"), "options"),
        ((paths[0], *command[1:]), "text"),
        ((tmp_path / "text", "--tokenizer-model", other, "--output", output), "tokenizer"),
    ):
        said = failure(capsys, *words)
        assert f"of another command ({changed} was not the same)" in said and remedy in said
    os.utime(paths[1])
    assert "text was not the same" in failure(capsys, *command)


def test_text_that_changes_meanwhile_is_noticed(
    models: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    paths = write_corpus(tmp_path / "text", "lines")
    tokenize = preparing._tokenize

    def meanwhile(*given: Any) -> Any:
        made = tokenize(*given)
        os.utime(paths[0])
        return made

    monkeypatch.setattr(preparing, "_tokenize", meanwhile)
    said = failure(
        capsys,
        tmp_path / "text",
        "--tokenizer-model",
        models / "sp.model",
        "--output",
        tmp_path / "data",
    )
    assert f"{paths[0]} changed while it was read" in said
    assert not (tmp_path / "data" / "manifest.json").exists()


def test_a_killed_worker_is_one_line(
    models: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(
        "megatron_fp4.mcore.data.corpus.encoding.write",
        lambda *_: os.kill(os.getpid(), signal.SIGKILL),
    )
    write_corpus(tmp_path / "text", "lines")
    said = failure(
        capsys,
        tmp_path / "text",
        "--tokenizer-model",
        models / "sp.model",
        "--output",
        tmp_path / "data",
    )
    assert "a worker was killed" in said and "fewer --workers" in said


def test_two_processes_do_not_write_to_one_folder(
    models: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_corpus(tmp_path / "text", "lines")
    command = (
        tmp_path / "text",
        "--tokenizer-model",
        models / "sp.model",
        "--output",
        tmp_path / "data",
    )
    with monkeypatch.context() as patch:
        patch.setattr(workers, "_encode", lambda block: time.sleep(60))
        process = start(*command)
        while not (tmp_path / "data" / ".parts" / "job.json").exists():
            time.sleep(0.02)
    assert f"another process is writing to {tmp_path / 'data'}" in failure(capsys, *command)
    process.kill()
    process.join()
    run(*command)


# --- what is left alone ----------------------------------------------------------------------


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
    assert "picture.png: binary" in named and "broken.parquet: damaged" in named
    assert "caf\\xe9/a.jsonl:1: not a JSON object" in named


@pytest.mark.parametrize(
    ("content", "words", "says"),
    [
        (None, [], "text.jsonl: not readable: No such file or directory"),
        ("\n", [], "the text is empty"),
        ('{"text": ""}\n', [], "the text is empty"),
        (
            '{"text": "a"}\n',
            ["--held-out-share", "0.001"],
            "leaves one side of 1 documents without",
        ),
        ('{"text": "a"}\n', ["--held-out-share", "1"], "1.0 is not at least 0 and below 1"),
        ('{"text": "a"}\n', ["--workers", "0"], "--workers 0 is not positive"),
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
