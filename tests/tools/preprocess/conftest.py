"""Tokenizers and small blocks for the tests of preprocessing."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_fp4.mcore.data.corpus import blocks, preparing
from testing.builders.corpus import hugging_face_tokenizer, sentencepiece_model


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


@pytest.fixture(autouse=True)
def ctrl_c() -> Iterator[None]:
    """Python's handler of SIGINT, which a shell ignores in commands that it runs in background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
