"""What metrics.jsonl of a small run must say: its operands as they were recorded, and numpy.

The runs are of testing/scripts/pretrain_recording_operands.py.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_fp4.metrics.weights import sample_rows


def read(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def kinds(records: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [record for record in records if record["kind"] == kind]


class Whole:
    """The unsharded operands of a run, from the parts of all ranks.

    operands: by step, linear, GEMM and letter; float64 matrices as the model holds them: what was
    quantized ("exact"), "decoded", the "scale" of each element, whether a block is "used", and the
    "rank" that an element is from.
    """

    def __init__(self, folder: Path) -> None:
        parts = defaultdict(list)
        for file in sorted(folder.glob("*.pt")):
            for part in torch.load(file):
                part["rank"] = torch.full_like(part["exact"], int(file.stem))
                parts[part["step"], part["name"], part["gemm"], part["letter"]].append(part)
        self.operands = {key: _joined(found) for key, found in parts.items()}


def _joined(parts: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    rows, columns = (1 + max(int(p[key].max()) for p in parts) for key in ("rows", "columns"))
    whole = {}
    for key in ("exact", "decoded", "scale", "used", "rank"):
        whole[key] = np.full((rows, columns), np.nan)
        for part in parts:
            whole[key][np.ix_(part["rows"].numpy(), part["columns"].numpy())] = part[key].numpy()
    assert not np.isnan(whole["exact"]).any()  # the ranks have all of it
    return whole


def operand_by_numpy(whole: dict[str, np.ndarray]) -> dict[str, Any]:
    x, q, s = (whole[key] for key in ("exact", "decoded", "scale"))
    binades = np.log2(s[whole["used"] == 1]).astype(int)
    counts = np.bincount(binades - binades.min()) // 32
    return {
        "zeros": ((x != 0) & (q == 0)).sum() / (x != 0).sum(),
        "zeros_overall": (q == 0).mean(),
        "underflow": ((x != 0) & (abs(x) < s / 4)).sum() / (x != 0).sum(),
        "clipped": (abs(x) > 6 * s).mean(),
        "saturated": (abs(q) == 6 * s).mean(),
        "sqnr_db": 10 * math.log10((x**2).sum() / ((q - x) ** 2).sum()),
        "gain": (q * x).sum() / (x * x).sum(),
        "scales": {"first": binades.min(), "counts": counts.tolist()},
    }


def weight_by_numpy(whole: Whole, name: str, steps: list[int], last: int) -> dict[str, Any]:
    """steps: the consecutive steps whose weights are followed. last: that of the report."""
    found = [whole.operands[step, name, "fprop", "w"] for step in steps]
    rows = sample_rows(name, len(found[0]["exact"]))
    w, q = (np.stack([each[key][rows] for each in found]) for key in ("exact", "decoded"))
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


def _r(x: np.ndarray) -> float:
    pairs = zip(x[1:], x[:-1], strict=True)
    return float(np.mean([np.linalg.norm(now - old) / np.linalg.norm(old) for now, old in pairs]))


def gradients_by_numpy(folder: Path) -> dict[tuple[int, str], np.ndarray]:
    """The gradients that Megatron saved (--save-wgrads-interval), by step and linear: the parts of
    all tensor-parallel ranks, flattened."""
    found = defaultdict(list)
    for file in sorted(folder.glob("wgrads/iter_*/*.pth")):
        step = int(file.parent.name.removeprefix("iter_"))
        _, _, _, *stage = file.stem.split("_")
        for chunk in torch.load(file, weights_only=False).values():
            for name, gradient in chunk.items():
                # A pipeline stage numbers its only layer from 0.
                linear = name.removeprefix("module.").removesuffix(".weight")
                if stage:
                    linear = linear.replace("layers.0.", f"layers.{int(stage[0])}.")
                found[step, linear].append(gradient.double().numpy().ravel())
    return {key: np.concatenate(parts) for key, parts in found.items()}
