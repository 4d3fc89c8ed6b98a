"""The walks of docs/: every command of a page, run one after the other with small sizes."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from megatron_fp4.mcore.data.text import library_documents
from testing.worlds.launch import ROOT

transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")

VOCABULARY = 512
# What a page says, and what is run for it. Each must be in the page.
SMALLER = {
    "--nproc-per-node 8": "--standalone --nproc-per-node 2",
    "--seq-length 4096": "--seq-length 64",
    "--eval-iters 10": "--eval-iters 1",
}
FINETUNE = SMALLER | {
    "--micro-batch-size 1": "--micro-batch-size 2",
    "--global-batch-size 128": "--global-batch-size 4",
    "--train-iters 1000": "--train-iters 4",
    "--lr-warmup-iters 100": "--lr-warmup-iters 1",
    "--save-interval 500": "--save-interval 4",
}
PRETRAIN = SMALLER | {
    "--micro-batch-size 8": "--micro-batch-size 2",
    "--vocab-size 32000": f"--vocab-size {VOCABULARY}",
    "--global-batch-size 256": "--global-batch-size 4",
    "--train-iters 20000": "--train-iters 4",
    "--lr-warmup-iters 500": "--lr-warmup-iters 1",
    "--save-interval 1000": "--save-interval 4",
    "--num-layers 24": "--num-layers 2",
    "--hidden-size 2048": "--hidden-size 64",
    "--ffn-hidden-size 5632": "--ffn-hidden-size 192",
    "--num-attention-heads 16": "--num-attention-heads 4",
    "--num-query-groups 4": "--num-query-groups 2",
    "--max-position-embeddings 4096": "--max-position-embeddings 64",
}


def commands(page: str, smaller: Mapping[str, str]) -> list[str]:
    """The commands of a page, in its order: its indented lines, and its Python."""
    text = (ROOT / "docs" / page).read_text()
    for given, small in smaller.items():
        assert given in text
        text = re.sub(re.escape(given) + r"(?!\d)", small, text)
    text = re.sub(r"\\\n\s*", "", text)  # lines that go on are joined
    found = re.findall(r"^    (\S[^\n]*)$|^```python\n(.*?)^```", text, re.M | re.DOTALL)
    return [shell or f"python -c {shlex.quote(python)}" for shell, python in found]


def run(command: str, folder: Path) -> str:
    """Runs a command in `folder`, as in a checkout; returns what it printed."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    own = {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    own |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=os.environ | own, capture_output=True, text=True,
        timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with the commands of a checkout, and text."""
    for name in ("tools", "pretrain_gpt.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "text").mkdir()
    size = 0
    for number, document in enumerate(library_documents()):
        (tmp_path / "text" / f"{number}.py").write_text(document.text)
        size += len(document.text)
        if size > 400_000:
            break
    return tmp_path


def release(folder: Path) -> None:
    """Makes folder/model: a small Mistral in BF16, and a SentencePiece tokenizer."""
    import torch

    run(f"python tools/prepare_data.py text/ --vocab-size {VOCABULARY} --output made", folder)
    config = transformers.MistralConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=192, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        sliding_window=None, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model.save_pretrained(folder / "model")
    (folder / "made" / "tokenizer.model").rename(folder / "model" / "tokenizer.model")
    made = transformers.LlamaTokenizer.from_pretrained(folder / "model", legacy=False)
    made.save_pretrained(folder / "model")


def is_in_fp4(folder: Path) -> None:
    from safetensors import safe_open

    with safe_open(folder / "fp4" / "model.safetensors", "pt") as opened:
        assert "model.layers.1.mlp.down_proj.weight_packed" in opened.keys()


@pytest.mark.outside
def test_from_a_released_model_to_fp4(checkout: Path) -> None:
    release(checkout)
    first, *rest, last = commands("finetune-to-fp4.md", FINETUNE)
    said = run(first, checkout)
    flags = re.sub(r"\s*\\\n\s*", " ", said.partition("Megatron's flags for this model:")[2])
    flags = flags.strip().splitlines()[0]
    assert flags.startswith("--num-layers 2") and len(rest) == 4
    assert last == "vllm serve fp4"
    for command in rest:
        printed = run(command.replace("FLAGS", flags), checkout)
    assert "def main" in printed
    is_in_fp4(checkout)


@pytest.mark.outside
def test_from_text_to_a_served_model(checkout: Path) -> None:
    *rest, last = commands("text-to-served.md", PRETRAIN)
    assert last == "vllm serve fp4" and len(rest) == 5
    for command in rest:
        printed = run(command, checkout)
    assert "def main" in printed
    is_in_fp4(checkout)


def test_every_command_of_a_page_is_found() -> None:
    for page, first in {
        "finetune-to-fp4.md": "python -m tools.checkpoint import-hf",
        "text-to-served.md": "python tools/prepare_data.py",
    }.items():
        found = commands(page, {})
        assert found[0].startswith(first)
        assert sum("pretrain_gpt.py" in command for command in found) == 1
        assert sum(command.startswith("python -c") for command in found) == 1
