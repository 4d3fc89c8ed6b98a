"""Real text in, Megatron's indexed datasets out."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import sentencepiece
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import Split

from megatron_fp4.mcore.data.manifest import OUTPUTS
from megatron_fp4.mcore.data.prepare_data import (
    DataError,
    Document,
    Options,
    choose,
    main,
    prepare,
    split,
)

SMALL = Options(vocab_size=320)
SENTENCES = [
    f"Tensor {i} of {i * i} blocks:\n\tit is – as ever – quantized.\r\n\n" for i in range(40)
]


def write_tree(root: Path) -> Path:
    for i, sentence in enumerate(SENTENCES):
        file = root / f"part{i % 3}" / f"text{i}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(sentence * 3, encoding="utf-8", newline="")
    (root / "picture.bin").write_bytes(b"\xff\xfe\x00\x80")
    (root / "blank.txt").write_text(" \n")
    (root / ".hidden.txt").write_text("hidden")
    return root


def prepared(paths: list[Path], output: Path, options: Options = SMALL) -> list[str]:
    said: list[str] = []
    prepare(paths, output, options, said.append)
    return said


def test_other_data_take_the_tokenizer_of_the_first(tmp_path: Path) -> None:
    """So that both can be blended; a change of the tokenizer prepares them again."""
    text, first, second = write_tree(tmp_path / "text"), tmp_path / "first", tmp_path / "second"
    one = prepare([text / "part0"], first, SMALL, lambda line: None)
    model = first / "tokenizer.model"
    for output in (first, second):
        other = prepare([text / "part1"], output, Options(), lambda line: None, tokenizer=model)
        assert other["tokenizer_sha256"] == one["tokenizer_sha256"]
        assert other["options"]["vocab_size"] == SMALL.vocab_size
    assert (second / "tokenizer.model").read_bytes() == model.read_bytes()
    assert sorted(decoded(second, "train")) == sorted(decoded(first, "train"))
    for file, says in ((tmp_path / "none", "not readable"), (text / "blank.txt", "is no Sent")):
        with pytest.raises(DataError, match=says):
            prepare([text], tmp_path / "third", SMALL, lambda line: None, tokenizer=file)


def test_of_a_single_line_the_end_is_held_out() -> None:
    document = Document("a", "twenty characters ab")
    assert split([document], 0.1) == (["twenty characters "], ["ab"])


def decoded(output: Path, part: str) -> list[str]:
    tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(output / "tokenizer.model"))
    dataset = IndexedDataset(str(output / f"{part}_text_document"))
    texts = []
    for ids in dataset:
        assert ids[-1] == tokenizer.eos_id()
        texts.append(tokenizer.decode(ids[:-1].tolist()))
    assert len(dataset.document_indices) == len(texts) + 1
    return texts


def test_every_file_comes_back_whole_on_one_side(tmp_path: Path) -> None:
    write_tree(tmp_path / "text")
    output = tmp_path / "data"
    prepared([tmp_path / "text"], output)
    train, held_out = decoded(output, "train"), decoded(output, "valid")
    assert sorted(train + held_out) == sorted(sentence * 3 for sentence in SENTENCES)
    assert len(held_out) == 2
    manifest = json.loads((output / "manifest.json").read_text())
    assert manifest["documents"] == 40
    assert manifest["held_out"]["documents"] == 2
    assert manifest["bytes"] == manifest["train"]["bytes"] + manifest["held_out"]["bytes"]
    dataset = IndexedDataset(str(output / "train_text_document"))
    assert manifest["train"]["tokens"] == sum(dataset.sequence_lengths)


def test_the_same_text_gives_the_same_bytes(tmp_path: Path) -> None:
    for copy in ("first", "second"):
        prepared([write_tree(tmp_path / copy / "text")], tmp_path / copy / "data")
    for name in OUTPUTS[1:]:
        first, second = (tmp_path / copy / "data" / name for copy in ("first", "second"))
        assert first.read_bytes() == second.read_bytes(), name


def test_prepared_data_is_kept_until_text_or_options_change(tmp_path: Path) -> None:
    text, output = write_tree(tmp_path / "text"), tmp_path / "data"
    prepared([text], output)
    before = (output / "tokenizer.model").stat().st_mtime_ns
    assert "is up to date" in prepared([text], output)[-1]
    assert (output / "tokenizer.model").stat().st_mtime_ns == before

    (text / "part0" / "text0.txt").write_text("something else")
    assert "is ready" in prepared([text], output)[-1]
    (output / "train_text_document.idx").unlink()
    assert "is ready" in prepared([text], output)[-1]
    data = output / "valid_text_document.bin"
    data.write_bytes(data.read_bytes()[:-2])
    assert "is ready" in prepared([text], output)[-1]
    model = (output / "tokenizer.model").read_bytes()
    (output / "tokenizer.model").write_bytes(model[:-1] + b"?")
    assert "is ready" in prepared([text], output)[-1]
    assert (output / "tokenizer.model").read_bytes() == model
    assert "is ready" in prepared([text], output, Options(vocab_size=330))[-1]


def samples(output: Path) -> list[list[int]]:
    """All samples of Megatron's own training dataset, which keeps its indices beside the data."""
    prefix = str(output / "train_text_document")
    tokenizer = SimpleNamespace(eod=2, pad=-1, vocab_size=320, unique_identifiers={})
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=32,
        blend=([prefix], None),
        split="1,0,0",
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    low_level = IndexedDataset(prefix)
    documents = np.arange(40 - 2, dtype=np.int32)  # the same names and counts before and after
    dataset = GPTDataset(low_level, prefix, documents, 20, Split.train, config)
    return [dataset[i]["tokens"].tolist() for i in range(len(dataset))]


def test_new_text_is_not_read_by_the_old_texts_indices(tmp_path: Path) -> None:
    text, output = write_tree(tmp_path / "text"), tmp_path / "data"
    prepared([text], output)
    samples(output)
    for file in text.rglob("text*.txt"):
        file.write_text(file.read_text()[: 60 + len(file.name)])
    prepared([text], output)
    kept = samples(output)
    prepared([text], tmp_path / "elsewhere")
    assert kept == samples(tmp_path / "elsewhere")


def test_jsonl_is_split_by_document_and_copies_stay_together(tmp_path: Path) -> None:
    file = tmp_path / "text.jsonl"
    file.write_text("".join(json.dumps({"body": text}) + "\n" for text in SENTENCES * 2) + "\n")
    prepared([file], tmp_path / "data", Options(vocab_size=320, json_key="body"))
    train, held_out = decoded(tmp_path / "data", "train"), decoded(tmp_path / "data", "valid")
    assert sorted(train + held_out) == sorted(SENTENCES * 2)
    assert len(held_out) == 4 and not set(train) & set(held_out)


def test_copies_stay_together_where_the_share_would_part_them() -> None:
    documents = choose([Document(f"{i}", f"text {i % 20}") for i in range(1000)], None)
    texts = [document.text for document in documents]
    assert set(texts[:70]) & set(texts[70:])  # a cut at the share itself parts them
    train, held_out = split(documents, 0.07)
    assert not set(train) & set(held_out) and sorted(train + held_out) == sorted(texts)
    assert len(held_out) == 100  # two texts: one is less than the share
    assert len(split(documents, 0.999)[0]) == 50  # and something is left to train on


def test_without_copies_the_first_documents_are_held_out() -> None:
    documents = choose([Document(f"{i}", f"text {i}") for i in range(100)], None)
    texts = [document.text for document in documents]
    assert split(documents, 0.07) == (texts[7:], texts[:7])


def test_a_lone_text_file_gives_its_end(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("".join(SENTENCES), newline="")
    prepared([file], tmp_path / "data")
    texts = decoded(tmp_path / "data", "train") + decoded(tmp_path / "data", "valid")
    assert "".join(texts) == "".join(SENTENCES) and len(texts) == 2


def test_the_budget_takes_a_part_and_at_least_one_is_held_out() -> None:
    documents = [Document(f"{i}", f"{i:100}") for i in range(50)]
    kept = choose(documents, max_bytes=950)
    assert len(kept) == 10
    assert kept == choose(reversed(documents), max_bytes=950)
    assert [len(side) for side in split(kept, 0.001)] == [9, 1]
    assert [len(side) for side in split(kept, 0.999)] == [1, 9]


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (None, [], "text.jsonl: not readable: No such file or directory"),
        ("\n", [], "the text is empty"),
        ('{"text": "a"}\n{"txt": "b"}\n', [], 'text.jsonl:2: no text under the key "text"'),
        ('{"text": 1}\n', [], 'text.jsonl:1: what the key "text" has is no string'),
        ('["text"]\n', [], 'text.jsonl:1: no text under the key "text"'),
        ('\n{"text": \n', [], "text.jsonl:2: not a JSON object"),
        (b'{"text": "a"}\n{"text": "b\xff"}\n', [], "text.jsonl:2: not UTF-8: byte 0xff after 11"),
        ("[" * 100_000, [], "text.jsonl:1: not a JSON object"),
        ('{"text": "a"}\n', [], "the text is a single character"),
        ('{"text": "a"}\n' * 2, [], "all documents are the same text"),
        (
            '{"text": "a b"}\n{"text": "c d"}\n',
            [],
            "--vocab-size 2048 is too large for this text: 2",
        ),
        (
            '{"text": "ab"}\n{"text": "ba"}\n',
            ["--vocab-size", "260"],
            "--vocab-size 260 is too small",
        ),
        (
            '{"text": "a"}\n',
            ["--held-out-share", "1"],
            "share 1.0 is not above 0 and below 1",
        ),
        ('{"text": "a"}\n', ["--max-bytes", "0"], "--max-bytes 0: give 1 or more"),
        ('{"text": "a"}\n', ["--vocab-size", "0"], "--vocab-size 0: give a number from 260 to"),
        ('{"text": "a"}\n', ["--vocab-size", "-1"], "--vocab-size -1: give a number from"),
        ('{"text": "a"}\n', ["--vocab-size", "99999999999"], "--vocab-size 99999999999: give"),
        (
            '{"text": "a"}\n',
            ["--vocab-size", "2048", "--tokenizer-model", "m"],
            "--vocab-size is that of a tokenizer to train: leave it out, or --tokenizer-model",
        ),
        ('{"text": "a"}\n', ["--vocab-size", "x"], "invalid int value: 'x'"),
        ('{"text": "a"}\n', ["--json-key"], "--json-key: expected one argument"),
        ('{"text": "a"}\n', ["--no-such-option"], "unrecognized arguments: --no-such-option"),
    ],
)
def test_bad_input_is_one_line(
    content: str | bytes | None,
    options: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "text.jsonl"
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert main([str(file), "--output", str(tmp_path / "data"), *options]) == 1
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1
    assert not (tmp_path / "data" / "manifest.json").exists()


def test_an_interruption_is_not_taken_for_prepared_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, output = write_tree(tmp_path / "text"), tmp_path / "data"
    prepared([text], output)
    (text / "part0" / "text0.txt").write_text("something else")
    monkeypatch.setattr("megatron_fp4.mcore.data.prepare_data.write_dataset", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        prepared([text], output)
    monkeypatch.undo()
    assert "is ready" in prepared([text], output)[-1]


def test_no_output_directory_without_data(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        prepared([tmp_path / "missing"], tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_its_own_output_is_no_input(tmp_path: Path) -> None:
    """Neither where it lies under the text nor where it lies beside it."""
    for text, output in ((tmp_path / "a", tmp_path / "a" / "data"), (tmp_path / "b",) * 2):
        prepared([write_tree(text)], output)
        (output / "train_text_document").mkdir()  # as Megatron makes it while it trains
        (output / "train_text_document" / "indices.txt").write_text("not text")
        said = prepared([text], output)
        assert "is up to date" in said[-1]
        assert any("left out 7, written by prepare_data: " in line for line in said)
        assert json.loads((output / "manifest.json").read_text())["documents"] == 40


def test_the_output_of_another_run_is_no_input(tmp_path: Path) -> None:
    text = write_tree(tmp_path / "text")
    prepared([text], text / "first")
    prepared([text], text / "second", Options(vocab_size=330))
    assert json.loads((text / "second" / "manifest.json").read_text())["documents"] == 40


def test_somebody_elses_manifest_is_text_and_is_never_overwritten(tmp_path: Path) -> None:
    text = write_tree(tmp_path / "text")
    (text / "manifest.json").write_text('{\n"name": "an application"}')
    with pytest.raises(DataError, match="text/manifest.json was not written by this tool"):
        prepared([text], text)
    prepared([text], tmp_path / "data")
    assert json.loads((tmp_path / "data" / "manifest.json").read_text())["documents"] == 41


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("file", "file is not a folder; give another"),
        ("file/data", "file is not a folder; give another"),
        ("nowhere", "nowhere is not a folder; give another"),
        ("/proc/data", "cannot write /proc/data: No such file or directory"),
    ],
)
def test_an_output_that_cannot_be_is_one_line(
    output: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "nowhere").symlink_to("missing")
    text = write_tree(tmp_path / "text")
    assert main([str(text), "--output", str(tmp_path / output), "--vocab-size", "320"]) == 1
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


def test_an_output_without_permission_is_told_before_the_text_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)  # root may write everywhere
    monkeypatch.setattr("megatron_fp4.mcore.data.prepare_data.documents_at", lambda *_: 1 / 0)
    with pytest.raises(DataError, match="no permission to write in"):
        prepared([tmp_path], tmp_path / "data")


@pytest.mark.parametrize("name", OUTPUTS)
def test_a_full_disk_is_one_line_and_leaves_no_manifest(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, output = write_tree(tmp_path / "text"), tmp_path / "data"
    prepared([text], output)
    (text / "more.txt").write_text("more")
    (output / name).unlink()
    (output / (f".{name}" if name == "manifest.json" else name)).symlink_to("/dev/full")
    assert main([str(text), "--output", str(output), "--vocab-size", "320"]) == 1
    said = capsys.readouterr().err
    assert "cannot write" in said and "No space left on device" in said and said.count("\n") == 1
    assert not (output / "manifest.json").exists()


def test_a_name_that_is_not_utf8(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = write_tree(tmp_path / "text")
    os.rename(text / "part0", os.fsencode(text) + b"/\xff")
    prepared([text], tmp_path / "data")
    assert json.loads((tmp_path / "data" / "manifest.json").read_text())["documents"] == 40


def test_it_runs_as_a_file_from_anywhere(tmp_path: Path) -> None:
    script = Path(__file__).resolve().parents[2] / "tools" / "prepare_data.py"
    for command in ([script], ["-m", "tools.prepare_data"]):
        run = subprocess.run(
            [sys.executable, *command, "missing"],
            cwd=tmp_path if command == [script] else script.parents[1],
            capture_output=True,
            text=True,
        )
        line = "prepare_data: missing: not readable: No such file or directory\n"
        assert (run.returncode, run.stderr) == (1, line)
