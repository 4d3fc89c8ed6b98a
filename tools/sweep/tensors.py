"""Tensors of a real run: what the linears of a small LLaMA multiply after some training."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from tools import installed_text, runs

MODEL = runs.Model(layers=4, hidden=256, ffn=512, sequence=128)
TRAINING = runs.Training(steps=200, batch=4, learning_rate=1e-3, evaluations=1, held_out_batches=4)
TEXT = installed_text.Text(megabytes=3, vocabulary=2048)
LAYERS = (0, 3)  # whose linears are read: the first and the last of the decoder


@dataclass(frozen=True)
class Recorded:
    """What one linear multiplied in one step, in BF16.

    x: [tokens, in]. weight: [out, in]. gradient: dY, [tokens, out].
    """

    name: str
    x: Tensor
    weight: Tensor
    gradient: Tensor

    def products(self) -> dict[str, Tensor]:
        """Y [tokens, out], dX [tokens, in] and dW [out, in] in float64, by "y", "dx" and "dw"."""
        x, weight, gradient = (t.double() for t in (self.x, self.weight, self.gradient))
        return {"y": x @ weight.t(), "dx": gradient @ weight, "dw": gradient.t() @ x}


def record(folder: Path) -> Path:
    """Trains the model on the CPU, and writes its tensors; the path of the file.

    folder: for text, log and file. A file that is there already is kept. Raises runs.RunFailed.
    """
    path, partial = folder / "tensors.pt", folder / "tensors.partial"
    if path.exists():
        return path
    data = folder / "text"
    installed_text.prepare(TEXT, data)
    command = runs.launch(1, [str(partial), *MODEL.flags(), *TRAINING.flags()])
    command[command.index("pretrain_gpt.py")] = "tools/sweep/recorder.py"
    runs.run([*command, *runs.data_flags(data)], folder / "recording.log")
    partial.replace(path)
    return path


@cache
def read(path: Path) -> list[Recorded]:
    """The tensors of the linears in LAYERS. Raises ValueError for another or a damaged file."""
    wanted = tuple(f"decoder.layers.{layer}." for layer in LAYERS)
    try:
        found = torch.load(path, weights_only=True)
        return [Recorded(**each) for each in found if each["name"].startswith(wanted)]
    except OSError:
        raise
    except Exception as error:  # what a damaged file raises depends on where the damage is
        what = f"{path} has no recorded tensors"
        raise ValueError(f"{what}: delete it, and they are recorded again") from error


@cache
def digest(path: Path) -> str:
    """The SHA-256 of all tensors of a file, which results record."""
    sha = hashlib.sha256()
    for each in read(path):
        for tensor in (each.x, each.weight, each.gradient):
            sha.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()
