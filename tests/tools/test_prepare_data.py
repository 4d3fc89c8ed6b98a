"""Real text in, Megatron's indexed datasets out."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import sentencepiece
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import Split

from tools.prepare_data import (
    OUTPUTS,
    DataError,
    Document,
    Options,
    choose,
    documents_at,
    library_documents,
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
    assert "is up to date" in prepared([text], output)[0]
    assert (output / "tokenizer.model").stat().st_mtime_ns == before

    (text / "part0" / "text0.txt").write_text("something else")
    assert "is ready" in prepared([text], output)[-1]
    (output / "train_text_document.idx").unlink()
    assert "is ready" in prepared([text], output)[-1]
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


@pytest.mark.parametrize("name", ["text.jsonl", "text.json", "text.JSONL", "text.Json"])
def test_json_lines_go_by_their_extension(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_bytes(b'\xef\xbb\xbf\n{"text": "a"}\r\n{"text": "b"}')  # a mark at the start
    for path in (file, tmp_path):
        assert sorted(document.text for document in documents_at(path, "text")) == ["a", "b"]


def test_another_kind_of_json_is_text_in_a_directory_and_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "settings.json"
    for content in ('{\n  "text": "a"\n}\n', '[{"text": "a"}]\n', ""):
        file.write_text(content)
        assert list(documents_at(tmp_path, "text")) == [Document("settings.json", content)]
        with pytest.raises(DataError, match='settings.json is not JSON lines.*{"text": "..."}'):
            list(documents_at(file, "text"))


def test_half_a_surrogate_pair_is_replaced(tmp_path: Path) -> None:
    file = tmp_path / "text.jsonl"
    file.write_text('{"text": "a\\ud800b"}\n')
    assert [document.text for document in documents_at(file, "text")] == ["a?b"]


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


def test_the_default_text_is_the_standard_library_without_its_tests() -> None:
    keys = [document.key for document in library_documents()]
    assert "argparse.py" in keys and "json/decoder.py" in keys and len(keys) > 300
    assert not any("/test" in f"/{key}" or "site-packages" in key for key in keys)


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (None, [], "text.jsonl: no such file or directory"),
        ("\n", [], "the text is empty"),
        ('{"text": "a"}\n{"txt": "b"}\n', [], 'text.jsonl:2: no text under the key "text"'),
        ('{"text": 1}\n', [], 'text.jsonl:1: no text under the key "text"'),
        ('["text"]\n', [], 'text.jsonl:1: no text under the key "text"'),
        ('\n{"text": \n', [], "text.jsonl:2: not a JSON object"),
        (b'{"text": "\xff"}\n', [], "text.jsonl is not UTF-8 text"),
        ('{"text": "a"}\n', [], "the text is a single line"),
        ('{"text": "a"}\n' * 2, [], "all documents are the same text"),
        (
            '{"text": "a b"}\n{"text": "c d"}\n',
            [],
            "--vocab-size 2048 is too large for this text: 2",
        ),
        ('{"text": "a"}\n{"text": "b"}\n', ["--vocab-size", "99"], "--vocab-size 99 is too small"),
        ('{"text": "a"}\n', ["--held-out-share", "1"], "--held-out-share 1.0 is not between"),
        ('{"text": "a"}\n', ["--max-bytes", "0"], "--max-bytes 0 is not positive"),
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
    monkeypatch.setattr("tools.prepare_data.write_dataset", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        prepared([text], output)
    monkeypatch.undo()
    assert "is ready" in prepared([text], output)[-1]


def test_no_output_directory_without_data(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        prepared([tmp_path / "missing"], tmp_path / "data")
    assert not (tmp_path / "data").exists()
