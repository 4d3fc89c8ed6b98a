"""What metrics.jsonl of a small run must say: its operands as they were recorded, and numpy.

The runs are of testing/scripts/pretrain_recording_operands.py.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_fp4.metrics.weights import sample_rows

KEYS = ("exact", "decoded", "scale", "used", "rank")


def read(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def kinds(records: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [record for record in records if record["kind"] == kind]


class Whole:
    """The unsharded operands of a run, from the parts of all ranks.

    operands: by step, linear, GEMM and letter; float64 matrices as the model holds them: what was
    quantized ("exact"), "decoded", the "scale" of each element, whether a block is "used", and the
    "rank" that an element is from. X and dY of experts are in no order, since their tokens have no
    rows in the global batch.
    weights: by step and linear, fprop's operand of W of each expert, by its name; other linears
    have one.
    """

    def __init__(self, folder: Path) -> None:
        parts = defaultdict(list)
        for file in sorted(folder.glob("*.pt")):
            for part in torch.load(file):
                part["rank"] = torch.full_like(part["exact"], int(file.stem))
                parts[part["step"], part["name"], part["gemm"], part["letter"]].append(part)
        found: dict[Any, list[dict[str, np.ndarray]]] = defaultdict(list)
        self.weights: dict[tuple[int, str], dict[str, Any]] = defaultdict(dict)
        for (step, name, gemm, letter), own in parts.items():
            expert = "local_experts" in name and letter != "w"
            matrices = [_arrays(part) for part in own] if expert else [_joined(own)]
            found[step, merged(name), gemm, letter] += matrices
            if (gemm, letter) == ("fprop", "w"):
                self.weights[step, merged(name)][name] = matrices[0]
        self.operands = {key: _pooled(matrices) for key, matrices in found.items()}


def merged(name: str) -> str:
    """The name under which the metrics of all experts are."""
    return re.sub(r"local_experts\.\d+", "local_experts.*", name)


def _arrays(part: dict[str, Any]) -> dict[str, np.ndarray]:
    return {key: part[key].numpy() for key in KEYS}


def _pooled(matrices: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The matrix, or the elements of several in no order."""
    if len(matrices) == 1:
        return matrices[0]
    return {key: np.concatenate([each[key].ravel() for each in matrices]) for key in KEYS}


def _joined(parts: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    rows, columns = (1 + max(int(p[key].max()) for p in parts) for key in ("rows", "columns"))
    whole = {}
    for key in KEYS:
        whole[key] = np.full((rows, columns), np.nan)
        for part in parts:
            whole[key][np.ix_(part["rows"].numpy(), part["columns"].numpy())] = part[key].numpy()
    assert not np.isnan(whole["exact"]).any()  # the ranks have all of it
    return whole


def operand_by_numpy(whole: dict[str, np.ndarray]) -> dict[str, Any]:
    x, q, s = (whole[key] for key in ("exact", "decoded", "scale"))
    binades = np.log2(s[whole["used"] == 1]).astype(int)
    counts, noise = np.bincount(binades - binades.min()) // 32, ((q - x) ** 2).sum()
    return {
        "zeros": ((x != 0) & (q == 0)).sum() / (x != 0).sum(),
        "zeros_overall": (q == 0).mean(),
        "underflow": ((x != 0) & (abs(x) < s / 4)).sum() / (x != 0).sum(),
        "clipped": (abs(x) > 6 * s).mean(),
        "saturated": (abs(q) == 6 * s).mean(),
        "sqnr_db": 10 * math.log10((x**2).sum() / noise) if noise else None,
        "gain": (q * x).sum() / (x * x).sum(),
        "scales": {"first": binades.min(), "counts": counts.tolist()},
    }


def weight_by_numpy(whole: Whole, name: str, steps: list[int], last: int) -> dict[str, Any]:
    """steps: the consecutive steps whose weights are followed. last: that of the report."""
    w, q = (
        np.stack([_sampled(whole.weights[step, name], key) for step in steps])
        for key in ("exact", "decoded")
    )
    r_w = abs(np.diff(q, axis=0)).sum(0) / (abs(np.diff(w, axis=0)).sum(0) + 1e-8)
    at = whole.operands[last, name, "fprop", "w"]
    v = np.minimum(abs(at["exact"] / at["scale"]), 6)
    thresholds = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5])
    largest = np.array([0.25, 0.25, 0.25, 0.25, 0.375, 0.5, 0.75, 1])
    distance = abs(v[..., None] - np.concatenate((thresholds, -thresholds))).min(-1)
    confidence = distance / largest[np.searchsorted(thresholds, v)]
    counts = np.bincount(np.minimum(confidence * 10, 9).astype(int).ravel(), minlength=10)
    return {
        "r": _r(w),
        "r_quantized": _r(q),
        "confidence": confidence.mean(),
        "confidences": {"first": 0.0, "width": 0.1, "counts": counts.tolist()},
        "oscillation": r_w.mean(),
        "oscillating": (r_w > 16).mean(),
    }


def _sampled(weights: dict[str, np.ndarray], key: str) -> np.ndarray:
    """The rows that are followed, of a linear or of all its experts."""
    rows = [each[key][sample_rows(name, len(each[key]))] for name, each in sorted(weights.items())]
    return np.concatenate(rows)


def _r(x: np.ndarray) -> float:
    pairs = zip(x[1:], x[:-1], strict=True)
    return float(np.mean([np.linalg.norm(now - old) / np.linalg.norm(old) for now, old in pairs]))


def gradients_by_numpy(
    folder: Path, stages: int = 1, scale: float = 1.0
) -> dict[tuple[int, str], np.ndarray]:
    """The gradients that Megatron saved (--save-wgrads-interval), by step and linear: the parts of
    all tensor-parallel ranks, or of all experts, flattened.

    stages: pipeline stages, each with one layer in a model chunk. scale: of the loss.
    """
    found = defaultdict(list)
    for file in sorted(folder.glob("wgrads/iter_*/*.pth")):
        step = int(file.parent.name.removeprefix("iter_"))
        places = [int(number) for number in file.stem.split("_")[3:]]  # of its stage, its experts
        for chunk, gradients in enumerate(torch.load(file, weights_only=False).values()):
            for name, gradient in gradients.items():
                linear = merged(name.removeprefix("module.").removesuffix(".weight"))
                if stages > 1:  # which number their only layer from 0
                    linear = linear.replace("layers.0.", f"layers.{chunk * stages + places[0]}.")
                elif places and places[0] > 0 and "local_experts" not in linear:
                    continue  # the expert-parallel ranks have copies
                found[step, linear].append(gradient.double().numpy().ravel() / scale)
    return {key: np.concatenate(parts) for key, parts in found.items()}
