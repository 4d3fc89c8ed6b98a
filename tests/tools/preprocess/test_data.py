"""A corpus of any size in, the files that Megatron's own builder writes out."""

import json
import os
from pathlib import Path

import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_fp4.mcore.data.corpus.encoding import side_of
from testing.builders.corpus import (
    megatrons_dataset,
    megatrons_tokenizer,
)
from testing.builders.preprocessing import TEXTS, TRAIN, VALID, files, run, write_corpus


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
