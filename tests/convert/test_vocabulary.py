"""The vocabulary of an export without --like: the run's tokenizer, without rows of padding."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_fp4.convert import command
from megatron_fp4.mcore.data.prepare_data import train_tokenizer
from testing.builders.corpus import hugging_face_tokenizer, texts
from testing.builders.fp4_checkpoint import checkpoint, run
from testing.builders.small_hf import save

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

ROWS = 512  # of the embedding
EMBEDDINGS = {"llama": "model.embed_tokens.weight", "gpt2": "transformer.wte.weight"}


def trained(folder: Path, model: str = "llama", **tokenizer: Any) -> Path:
    """A checkpoint of a run with a tokenizer, in a folder without an imported model's files."""
    args = {"padded_vocab_size": ROWS, **tokenizer}
    made = checkpoint(folder, model, args, vocab_size=ROWS)
    shutil.rmtree(made / "huggingface")
    return made


def sentencepiece(folder: Path) -> dict[str, str]:
    folder.mkdir()
    (folder / "tokenizer.model").write_bytes(train_tokenizer(texts(60), 310))
    return {
        "tokenizer_type": "SentencePieceTokenizer",
        "tokenizer_model": str(folder / "tokenizer.model"),
    }


def hugging_face(folder: Path) -> dict[str, str]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(hugging_face_tokenizer(folder))
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    tokenizer.save_pretrained(folder)
    return {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(folder)}


def config(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def embedding(folder: Path, model: str = "llama") -> torch.Tensor:
    found: torch.Tensor = safetensors.load_file(folder / "model.safetensors")[EMBEDDINGS[model]]
    return found


# The ids differ from the defaults of the configuration's class: 1 and 2 (LLaMA), 50256 (GPT-2).
@pytest.mark.parametrize(
    ("model", "tokenizer", "ids"),
    [("llama", hugging_face, (0, 1, -1)), ("gpt2", sentencepiece, (1, 2, None))],
)
def test_the_tokenizer_settles_vocabulary_and_ids(
    model: str, tokenizer: Any, ids: tuple[int, int, int | None], tmp_path: Path
) -> None:
    made = trained(tmp_path, model, **tokenizer(tmp_path / "tokenizer"))
    run("export-hf", made, "--output", tmp_path / "out")
    own = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    size = len(own)
    assert 300 < size < ROWS
    bos, eos, pad = ids
    found = config(tmp_path / "out")
    assert found["vocab_size"] == size
    assert (found["bos_token_id"], found["eos_token_id"]) == (bos, eos)
    assert found["pad_token_id"] == (None if pad is None else size + pad)
    assert own.eos_token_id == eos
    assert torch.equal(embedding(tmp_path / "out", model), embedding(tmp_path / "hf", model)[:size])
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.generation_config.eos_token_id == eos


def test_a_tokenizer_that_is_not_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No ids are made up, all rows are exported, and both are said."""
    made = trained(tmp_path, tokenizer_type="HuggingFaceTokenizer", tokenizer_model="owner/name")
    run("export-hf", made, "--output", tmp_path / "out")
    said = capsys.readouterr().out
    assert "tokenizer: none, since the run names HuggingFaceTokenizer owner/name, which is" in said
    assert f"vocabulary: {ROWS}, all rows of the embedding" in said and "--vocab-size" in said
    found = config(tmp_path / "out")
    assert found["vocab_size"] == ROWS
    assert all(found.get(f"{word}_token_id") is None for word in ("bos", "eos", "pad"))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.generation_config.eos_token_id is None
    run("export-hf", made, "--output", tmp_path / "out", "--force", "--vocab-size", 300)
    assert "vocabulary:" not in capsys.readouterr().out
    assert config(tmp_path / "out")["vocab_size"] == len(embedding(tmp_path / "out")) == 300


def test_tokens_that_a_run_adds_are_not_cut_off(tmp_path: Path) -> None:
    own = hugging_face(tmp_path / "tokenizer")
    made = trained(tmp_path, **own, special_tokens=["<tool>"])
    run("export-hf", made, "--output", tmp_path / "out")
    assert len(embedding(tmp_path / "out")) == ROWS


def test_numbers_without_text_have_their_vocabulary(tmp_path: Path) -> None:
    made = trained(tmp_path, tokenizer_type="NullTokenizer", vocab_size=333)
    run("export-hf", made, "--output", tmp_path / "out")
    assert config(tmp_path / "out")["vocab_size"] == len(embedding(tmp_path / "out")) == 333


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert command.main(["export-hf", *map(str, words)]) == 1
    return capsys.readouterr().err.strip().splitlines()[-1]


def test_sizes_that_the_embedding_cannot_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = trained(tmp_path, **hugging_face(tmp_path / "tokenizer"))
    size = len(transformers.AutoTokenizer.from_pretrained(tmp_path / "tokenizer"))
    out = ("--output", tmp_path / "out")
    for given in (100000, ROWS + 1, size - 1, 0, -5):
        said = refused(capsys, made, *out, "--vocab-size", given)
        assert f"{size} (the tokens of the run's tokenizer) to {ROWS}" in said
        assert f"not {given}" in said
    save("llama", tmp_path / "like", vocab_size=ROWS + 1)
    said = refused(capsys, made, *out, "--like", tmp_path / "like")
    assert f"has {ROWS + 1} tokens, more than the embedding's {ROWS} rows" in said
    assert not (tmp_path / "out").exists()


def test_the_size_of_like_can_be_raised(tmp_path: Path) -> None:
    """To that of the model, where its tokenizer has more tokens than that of --like."""
    made = trained(tmp_path)
    save("llama", tmp_path / "like", vocab_size=400)
    words = ("export-hf", made, "--output", tmp_path / "out", "--like", tmp_path / "like")
    run(*words)
    assert config(tmp_path / "out")["vocab_size"] == len(embedding(tmp_path / "out")) == 400
    run(*words, "--vocab-size", 450, "--force")
    assert config(tmp_path / "out")["vocab_size"] == len(embedding(tmp_path / "out")) == 450
