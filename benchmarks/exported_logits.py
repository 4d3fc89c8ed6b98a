"""Measures how far the logits of an exported FP4 model are from those of training.

    python -m benchmarks.exported_logits

A small LLaMA trains on the demo's text by each recipe, on a CPU in BF16. It is exported for
compressed-tensors, with activations in MXFP4 and in BF16, and in BF16 altogether. transformers
evaluates each export on held-out text, and Megatron evaluates the checkpoint in a forward pass as
training runs it.

For each: the loss in nats a token, and the difference of its logits to those of that forward pass:
the norm of the difference relative to the norm of the logits, and the share of tokens whose most
likely next token is another one.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from megatron_fp4.convert import command
from megatron_fp4.mcore.data import prepare_data
from testing.worlds.launch import SCRIPTS, spawn
from tools import runs
from tools.stamp import stamp

MODEL = runs.Model(layers=4, hidden=128, ffn=384)
TRAINING = runs.Training(steps=80, learning_rate=4e-3, held_out_batches=2)
VOCABULARY, TEXT_BYTES = 2048, 2_000_000
SEQUENCES = 16  # of held-out text
NVFP4 = """
name: nvfp4
fprop: {a: nvfp4, b: nvfp4}
"""
EXPORTS = {
    "--format compressed-tensors": ["--format", "compressed-tensors"],
    "the same with --activations bf16": ["--format", "compressed-tensors", "--activations", "bf16"],
    "--format plain": [],
}


def held_out(data: Path) -> Tensor:
    """int64 [SEQUENCES, tokens + 1]: the first tokens of the validation data."""
    size = SEQUENCES * (MODEL.sequence + 1)
    found = numpy.fromfile(data / "valid_text_document.bin", dtype=numpy.uint16, count=size)
    return torch.from_numpy(found.astype(numpy.int64)).view(SEQUENCES, -1)


def of_training(folder: Path, tokens: Tensor, flags: list[str]) -> Tensor:
    """Megatron's logits of these tokens, in a forward pass of training."""
    torch.save(tokens, folder / "tokens.pt")
    files = [str(folder / name) for name in ("tokens.pt", "logits.pt")]
    done = spawn(1, SCRIPTS / "logits.py", *files, *flags, "--load", str(folder / "run"))
    if not (folder / "logits.pt").exists():
        raise SystemExit(done.stdout[-3000:])
    found: Tensor = torch.load(folder / "logits.pt")
    return found[..., :VOCABULARY]


def of_export(folder: Path, tokens: Tensor, flags: list[str]) -> Tensor:
    """The logits of these tokens that transformers computes with an export of folder/run."""
    from transformers import AutoModelForCausalLM

    words = ["export-hf", str(folder / "run"), "--output", str(folder / "out"), "--force", *flags]
    if command.main([*words, "--vocab-size", str(VOCABULARY)]):
        raise SystemExit(1)
    model = AutoModelForCausalLM.from_pretrained(folder / "out", dtype=torch.bfloat16).eval()
    with torch.no_grad():
        found: Tensor = model(tokens).logits.float()
    return found


def compared(name: str, logits: Tensor, wanted: Tensor, targets: Tensor) -> dict[str, Any]:
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    off = (logits.argmax(-1) != wanted.argmax(-1)).float().mean()
    return {
        "forward pass": name,
        "loss": round(float(loss), 4),
        "logits apart": round(float((logits - wanted).norm() / wanted.norm()), 4),
        "other first choice": round(float(off), 4),
    }


def measure(recipe: str, data: Path, folder: Path) -> list[dict[str, Any]]:
    flags = MODEL.flags() + TRAINING.flags() + runs.data_flags(data) + ["--fp4-recipe", recipe]
    save = ["--save", str(folder / "run"), "--save-interval", str(TRAINING.steps)]
    runs.run(runs.launch(1, flags + save), folder / "log")
    text = held_out(data)
    tokens, targets = text[:, :-1].contiguous(), text[:, 1:]
    wanted = of_training(folder, tokens, flags)
    rows = [compared("Megatron, as in training", wanted, wanted, targets)]
    for name, options in EXPORTS.items():
        rows.append(compared(name, of_export(folder, tokens, options), wanted, targets))
    return [{"recipe": Path(recipe).stem} | row for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/exported_logits.json"))
    out = parser.parse_args().out
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "nvfp4.yaml").write_text(NVFP4)
        options = prepare_data.Options(vocab_size=VOCABULARY, max_bytes=TEXT_BYTES)
        prepare_data.prepare([], folder / "data", options)
        for recipe in ("tetrajet", "mxfp4", str(folder / "nvfp4.yaml")):
            place = folder / Path(recipe).stem
            place.mkdir()
            rows += measure(recipe, folder / "data", place)
            print(json.dumps(rows[-4:], indent=1), flush=True)
    settings = {"model": vars(MODEL), "training": vars(TRAINING), "sequences": SEQUENCES}
    result = {"stamp": stamp(), **settings, "rows": rows}
    out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
