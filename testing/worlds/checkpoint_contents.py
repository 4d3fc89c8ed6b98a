"""Reads what a checkpoint contains, without Megatron."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed import checkpoint


def weights(path: Path) -> dict[str, Tensor]:
    """Every tensor of a torch_dist checkpoint: the model's and the optimizer's."""
    metadata = checkpoint.FileSystemReader(path).read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.items()
        if isinstance(entry, checkpoint.metadata.TensorStorageMetadata)
    }
    checkpoint.load(tensors, checkpoint_id=path, no_dist=True)
    return tensors


def contents(path: Path) -> dict[str, Any]:
    """All that a checkpoint in the format torch_dist or torch contains.

    torch_dist: tensors by name, and everything else as io.BytesIO by name. torch: what each .pt
    file contains, by the file's path in `path`.
    """
    if not (path / ".metadata").exists():
        files = sorted(path.rglob("*.pt"))
        return {str(f.relative_to(path)): torch.load(f, weights_only=False) for f in files}
    metadata = checkpoint.FileSystemReader(path).read_metadata().state_dict_metadata
    found: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        if isinstance(entry, checkpoint.metadata.TensorStorageMetadata)
        else io.BytesIO()
        for name, entry in metadata.items()
    }
    checkpoint.load(found, checkpoint_id=path, no_dist=True)
    return found


def flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """(path, value) of each leaf of nested dicts, lists and tuples; `name` begins each path.

    Keys that begin with args, rng_state or rerun_state are left out: they belong to a launch or a
    rank, and not to the model.
    """
    if isinstance(value, dict | list | tuple):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            if not str(key).startswith(("args", "rng_state", "rerun_state")):
                yield from flat(part, f"{name}/{key}")
    else:
        yield name, value


AVERAGE = "optimizer.state.fp4_average."


def averages(path: Path) -> dict[str, Tensor]:
    """The averages of a checkpoint, by their weights' names."""
    found = contents(path)
    return {name.removeprefix(AVERAGE): t for name, t in found.items() if name.startswith(AVERAGE)}


def main_weights(path: Path) -> dict[str, Tensor]:
    """The FP32 weights that the optimizer updates, by name.

    path: of a checkpoint whose optimizer state is saved under the names of the model's weights. In
    a run in FP32 the optimizer updates the model's own weights, which are then returned.
    """
    found = contents(path)
    for prefix in ("optimizer.state.fp32_param.", "optimizer.state.param."):
        if mains := {k.removeprefix(prefix): v for k, v in found.items() if k.startswith(prefix)}:
            return mains
    return {name: tensor for name, tensor in found.items() if torch.is_tensor(tensor)}


def is_blended(before: Path, after: Path, beta: float) -> bool:
    """Whether the averages of a checkpoint are those of the step before it, blended with the
    checkpoint's main weights, to the bit: numpy's beta * average + (1 - beta) * weight in float32.

    beta: a number whose float32 is exact.
    """
    was, now, mains = averages(before), averages(after), main_weights(after)
    assert was and was.keys() == now.keys()
    old, new = np.float32(beta), np.float32(1 - beta)
    for key, average in was.items():
        wanted = old * average.numpy() + new * mains[key].numpy()
        assert wanted.dtype == np.float32
        if not (now[key].numpy() == wanted).all():
            return False
    return True
