"""metrics.jsonl files of runs that were never trained."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

Record = dict[str, Any]
LINEARS = ("self_attention.linear_proj", "self_attention.linear_qkv", "mlp.linear_fc1")
OPERANDS = ("fprop.x", "fprop.w", "dgrad.dy", "dgrad.w", "wgrad.dy", "wgrad.x")


def write(folder: Path, records: Iterable[Record], end: str = "") -> Path:
    """Writes the records to `folder`/metrics.jsonl, and `end` after them; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "metrics.jsonl").open("w") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
        file.write(end)
    return folder


def start(step: int = 0, recipe: str | None = "tetrajet", **arguments: Any) -> Record:
    """The line of a start of a run at this step, with these arguments."""
    return {
        "kind": "run",
        "version": 1,
        "time": f"2026-11-{23 + (step > 0)}T09:00:00Z",
        "step": step,
        "recipe": recipe,
        "lines": [f"megatron-fp4: recipe {recipe}", "  linear_qkv  6144 x 4096  hopper"],
        "environment": {"torch": "2.11.0", "device": "NVIDIA H200"},
        "arguments": {"lr": 0.001, "bf16": True, **arguments},
    }


def operand(step: int, layer: str, name: str = "fprop.w", **metrics: Any) -> Record:
    """The line of an operand; its name is "<gemm>.<operand>"."""
    gemm, _, letter = name.partition(".")
    return {
        "kind": "operand", "step": step, "layer": layer,
        "gemm": gemm, "operand": letter, "metrics": metrics,
    }  # fmt: skip


def whole_run(
    layers: int, points: int, seed: int = 0, recipe: str = "tetrajet"
) -> Iterator[Record]:
    """Every kind of line: `points` points of time, 100 steps apart, of a decoder of `layers`."""
    draw = random.Random(seed)
    names = [f"decoder.layers.{i}.{linear}" for i in range(layers) for linear in LINEARS]
    yield start(recipe=recipe, num_layers=layers, seed=seed)
    for point in range(1, points + 1):
        step, time = 100 * point, point / points
        loss = 2.4 + 8 * math.exp(-9 * time) + draw.gauss(0, 0.03)
        yield {
            "kind": "step", "step": step, "loss": loss,
            "grad_norm": math.exp(draw.gauss(-0.5, 0.25)), "learning_rate": 1e-3 * (1 - 0.9 * time),
            "seconds": 0.6 + 0.1 * seed + abs(draw.gauss(0, 0.02)), "tokens": 2**21,
        }  # fmt: skip
        if point % 10 == 0:
            yield {"kind": "evaluation", "step": step, "loss": loss + 0.08}
        for index, name in enumerate(names):
            yield from _layer(draw, step, name, time, index / len(names))
    yield {
        "kind": "warning", "step": 100 * points, "layer": names[-1], "operand": "fprop.w",
        "metric": "zeros", "value": 0.2, "usual": 0.05, "line": f"zeros of fprop.w in {names[-1]}",
    }  # fmt: skip


def _layer(
    draw: random.Random, step: int, name: str, time: float, depth: float
) -> Iterator[Record]:
    for place, letter in enumerate(OPERANDS):
        middle = 8 + 3 * depth
        yield operand(
            step, name, letter,
            zeros=0.03 + 0.05 * depth * time**2 + draw.gauss(0, 0.002),
            saturated=0.02 + 0.002 * place, clipped=0.0,
            sqnr_db=18.7 - 2 * time * depth + draw.gauss(0, 0.1), gain=draw.gauss(0.999, 0.0005),
            scales={
                "first": -20 - 14 * letter.endswith("dy"),
                "counts": [int(1e4 * math.exp(-(((i - middle) / 3) ** 2))) for i in range(18)],
            },
        )  # fmt: skip
    confidences = [int(1000 * (1.2 - time * abs(i - 4) / 6)) for i in range(10)]
    yield {
        "kind": "weight", "step": step, "layer": name,
        "metrics": {
            "r": 1e-3 * (1.1 - time), "r_quantized": 4e-3 * (1.1 - time) * math.exp(depth),
            "confidence": 0.6 - 0.1 * time, "oscillation": 3 + 10 * time * depth,
            "confidences": {"first": 0.0, "width": 0.1, "counts": confidences},
            "oscillating": 0.04 * time,
        },
    }  # fmt: skip
    norm = math.exp(-4 - 2 * depth + draw.gauss(0, 0.2))
    yield {
        "kind": "gradient", "step": step, "layer": name,
        "metrics": {"norm": norm, "underflow": 0.1 * depth},
    }  # fmt: skip
