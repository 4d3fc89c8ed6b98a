"""Small torch_dist checkpoints that are written without Megatron."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_fp4.convert.metadata import TensorInfo
from megatron_fp4.convert.torch_dist import COMMON, TRACKER
from megatron_fp4.convert.torch_dist_writer import Chunk, saved, write

LAYERS, HIDDEN = 2, 16
SHAPES = {
    "embedding.word_embeddings.weight": (32, HIDDEN),
    "decoder.layers.self_attention.linear_qkv.weight": (LAYERS, 3 * HIDDEN, HIDDEN),
    "decoder.layers.mlp.linear_fc1.weight": (LAYERS, 8 * HIDDEN, HIDDEN),
    "decoder.layers.mlp.linear_fc2.weight": (LAYERS, HIDDEN, 4 * HIDDEN),
    "decoder.final_layernorm.weight": (HIDDEN,),
}


def arguments(**changed: Any) -> argparse.Namespace:
    """Arguments as a training would record them."""
    return argparse.Namespace(
        **{
            "num_layers": LAYERS,
            "hidden_size": HIDDEN,
            "swiglu": True,
            "num_experts": None,
            "consumed_train_samples": 8,
            "fp4_recipe": None,
            "fp4_recipe_content": None,
        }
        | changed
    )


def small(
    folder: Path,
    step: int = 3,
    dtype: torch.dtype = torch.bfloat16,
    shapes: dict[str, tuple[int, ...]] = SHAPES,
    values: Callable[[str, tuple[int, ...]], Tensor] = lambda key, shape: torch.randn(shape),
    args: argparse.Namespace | None = None,
) -> Path:
    """A folder for --load with a checkpoint of weights, moments and random state; returns it.

    values: returns the values of a tensor, or of one layer of it, which are converted to `dtype`.
    """
    chunks = []
    for key, shape in shapes.items():
        for name, kind in ((key, dtype), (f"optimizer.state.exp_avg.{key}", torch.float32)):
            chunks += list(_layers(name, TensorInfo(shape, kind), values))
    common = {"args": args or arguments(), "iteration": step, "optimizer": {"step": step}}
    objects = {COMMON: saved(common), "rng_state/shard_0_1": saved({"seed": 1})}
    write(folder / f"iter_{step:07d}", chunks, objects)
    (folder / TRACKER).write_text(str(step))
    return folder


def _layers(
    key: str, info: TensorInfo, values: Callable[[str, tuple[int, ...]], Tensor]
) -> list[Chunk]:
    """A chunk for each layer, in a file for each; one chunk of a tensor without layers."""
    first, *rest = info.shape
    count = first if "decoder.layers." in key else 1
    shape = (first // count, *rest)
    return [
        Chunk(
            key,
            info,
            (layer, *(0 for _ in rest)) if count > 1 else (0, *(0 for _ in rest)),
            shape,
            lambda: values(key, shape).to(info.dtype),
            layer,
        )
        for layer in range(count)
    ]


def without_manifest(path: Path) -> None:
    """Removes integrity.json from the folder of one checkpoint."""
    (path / "integrity.json").unlink()
