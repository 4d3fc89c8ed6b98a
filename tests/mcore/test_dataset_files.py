"""Data that was made with another tokenizer than the launch's is refused."""

import argparse
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron_fp4.errors import ConfigError
from megatron_fp4.mcore.data import preprocess
from megatron_fp4.mcore.data.prepare_data import Options, prepare
from megatron_fp4.mcore.launch.refusals import dataset
from megatron_fp4.mcore.launch.refusals.dataset import files, tokens
from megatron_fp4.mcore.launch.refusals.table import refuse
from testing.builders.corpus import hugging_face_tokenizer, texts, write_lines
from testing.worlds.launch import torchrun

TRAIN, VALID = "train_text_document", "valid_text_document"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same text, prepared with a small vocabulary and with a larger one."""
    root = tmp_path_factory.mktemp("prepared")
    text = root / "text.txt"
    text.write_text("".join(f"line {n}: a fox counts {n * n} lazy dogs\n" for n in range(2000)))
    for name, size in (("small", 300), ("large", 330)):
        prepare([text], root / name, Options(vocab_size=size))
    return root


@pytest.fixture
def data(prepared: Path, tmp_path: Path) -> Path:
    """A copy, to be damaged."""
    return Path(shutil.copytree(prepared, tmp_path / "data"))


def launch(
    *prefixes: Path, tokenizer: Path | None = None, kind: str = "SentencePieceTokenizer"
) -> argparse.Namespace:
    """The arguments of a launch on these datasets, as its refusals read them."""
    blend = [word for prefix in prefixes for word in ("1", str(prefix))]
    return argparse.Namespace(
        data_path=blend,
        data_args_path=None,
        per_split_data_args_path=None,
        train_data_path=None,
        valid_data_path=None,
        test_data_path=None,
        tokenizer_type=kind,
        tokenizer_model=None if tokenizer is None else str(tokenizer / "tokenizer.model"),
        padded_vocab_size=1024,
    )


def refused(args: argparse.Namespace, remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy) as raised:
        refuse(tokens(args))
    assert "\n" not in str(raised.value)


def test_a_launch_with_another_tokenizer_ends_in_one_line(prepared: Path) -> None:
    small, large = prepared / "small", prepared / "large"
    flags = ["--train-data-path", str(small / TRAIN), "--valid-data-path", str(small / VALID)]
    flags += ["--tokenizer-type", "SentencePieceTokenizer"]
    result = torchrun(1, *flags, "--tokenizer-model", str(large / "tokenizer.model"))
    told = [line for line in result.output.splitlines() if line.startswith("megatron-fp4: error:")]
    assert len(told) == 1 and result.status != 0 and not result.has_traceback
    assert f"give --tokenizer-type SentencePieceTokenizer --tokenizer-model {small}" in told[0]
    assert not result.losses


def test_the_tokenizer_that_made_the_data_is_taken(data: Path) -> None:
    small, large = data / "small", data / "large"
    refuse(tokens(launch(small / TRAIN, small / VALID, tokenizer=small)))
    shutil.copy(small / "tokenizer.model", large / "tokenizer.model")  # by content, not by place
    refuse(tokens(launch(small / TRAIN, tokenizer=large)))
    refused(launch(large / TRAIN, tokenizer=large), "give the one it was made with, or prepare")


def test_every_dataset_is_compared(data: Path) -> None:
    small, large = data / "small", data / "large"
    refused(launch(small / TRAIN, tokenizer=large), "small/tokenizer.model")
    refused(launch(small / VALID, tokenizer=large), "small/tokenizer.model")
    other = launch(small / TRAIN, large / VALID, tokenizer=small)
    refused(other, "were made with different tokenizers: prepare one of the texts again")


@pytest.mark.slow
def test_a_launch_reads_a_corpus_of_a_hugging_face_tokenizer(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    own = hugging_face_tokenizer(tmp_path / "own")
    other = hugging_face_tokenizer(tmp_path / "other", vocab_size=262)
    write_lines(tmp_path / "text.jsonl", texts(200))
    words = [tmp_path / "text.jsonl", "--tokenizer-model", own, "--output", tmp_path / "data"]
    assert preprocess.main([*map(str, words), "--held-out-share", "0.2"]) == 0
    flags = ["--train-data-path", str(tmp_path / "data" / TRAIN)]
    flags += ["--valid-data-path", str(tmp_path / "data" / VALID)]
    flags += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model"]
    result = torchrun(1, *flags, str(own))
    assert result.status == 0 and len(result.losses) == 4, result.output
    result = torchrun(1, *flags, str(other))
    told = [line for line in result.output.splitlines() if line.startswith("megatron-fp4: error:")]
    assert len(told) == 1 and result.status != 0 and not result.has_traceback
    assert f"give --tokenizer-type HuggingFaceTokenizer --tokenizer-model {own}" in told[0]
    result = torchrun(1, *flags, str(own / "tokenizer.json"))
    assert f"own/tokenizer.json is a file: give --tokenizer-model {own}" in result.output


def test_another_kind_of_tokenizer_is_refused_and_numbers_are_numbers(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = data / "small" / TRAIN
    opened = SimpleNamespace(inv_vocab={0: "a"}, eod=0)
    monkeypatch.setattr(dataset, "get_tokenizer", lambda: opened)
    refused(launch(train, kind="HuggingFaceTokenizer"), "than HuggingFaceTokenizer: give")
    refused(launch(train, tokenizer=data / "small", kind="TikTokenizer"), "give --tokenizer-type S")
    refuse(tokens(launch(train, tokenizer=data / "small", kind="Llama2Tokenizer")))
    refuse(tokens(launch(train, kind="NullTokenizer")))


def test_data_without_a_manifest_of_their_own_stay_as_they_are(data: Path) -> None:
    small, large = data / "small", data / "large"
    for ext in ("bin", "idx"):  # a dataset of another name, beside the manifest of others
        shutil.copy(small / f"{TRAIN}.{ext}", small / f"corpus.{ext}")
    refuse(tokens(launch(small / "corpus", tokenizer=large)))
    (small / "manifest.json").write_text('{"name": "an application"}')
    refuse(tokens(launch(small / TRAIN, tokenizer=large)))
    (small / "manifest.json").unlink()
    refuse(tokens(launch(small / TRAIN, tokenizer=large)))


@pytest.mark.parametrize(
    "damage",
    [
        lambda manifest: "",
        lambda manifest: json.dumps(manifest)[:-20],
        lambda manifest: json.dumps(manifest | {"train": None}),
        lambda manifest: json.dumps({"tokenizer_sha256": manifest["tokenizer_sha256"]}),
        lambda manifest: "[" * 100_000,
    ],
)
def test_a_damaged_manifest(damage: Callable[[dict[str, Any]], str], data: Path) -> None:
    path = data / "small" / "manifest.json"
    path.write_text(damage(json.loads(path.read_text())))
    remedy = "manifest.json cannot be read.*prepare the data again, or delete that file"
    refused(launch(data / "small" / TRAIN, tokenizer=data / "small"), remedy)


def test_a_manifest_of_other_data(data: Path) -> None:
    prefix = data / "small" / TRAIN
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.uint16)
    builder.add_document(numpy.arange(100, dtype=numpy.uint16), [100])
    builder.finalize(f"{prefix}.idx")
    remedy = "tells of other data, of [0-9]+ tokens where .* has 100: prepare the data again"
    refused(launch(prefix, tokenizer=data / "small"), remedy)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"train": 1, "valid": [], "test": []}'])
def test_a_list_of_splits_that_is_none(content: str, tmp_path: Path) -> None:
    args = launch()
    args.per_split_data_args_path = str(tmp_path / "splits.json")
    (tmp_path / "splits.json").write_text(content)
    with pytest.raises(ConfigError, match="splits.json cannot be used: it should be a JSON object"):
        refuse(files(args))
