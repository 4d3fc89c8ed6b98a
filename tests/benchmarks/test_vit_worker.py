"""R_w and r(X) of a training of the ViT are what numpy computes in float64."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from testing.worlds.checkpoint_contents import contents
from testing.worlds.vit import PRETRAIN_VIT, WORKER, train

GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def ratios(weights: np.ndarray, quantized: np.ndarray) -> np.ndarray:
    """R_w by its definition. weights, quantized: float64 [steps, ...]."""
    moved = np.abs(np.diff(quantized, axis=0)).sum(axis=0)
    return moved / (np.abs(np.diff(weights, axis=0)).sum(axis=0) + 1e-8)


def rate(x: np.ndarray) -> float:
    """r(X) by its definition. x: float64 [steps, ...]."""
    pairs = zip(x[1:], x[:-1], strict=True)
    return float(np.mean([np.linalg.norm(new - old) / np.linalg.norm(old) for new, old in pairs]))


def quantize(weight: np.ndarray, average: np.ndarray | None) -> np.ndarray:
    """TetraJet's Q2 (arXiv 2502.20853, section 3.2): E2M1 in blocks of 32 of a row, with the scale
    2^ceil(log2(max / 6)). average: Q-EMA takes the neighbour that is nearer to it."""
    blocks = weight.astype(np.float64).reshape(-1, 32)
    scale = 2.0 ** np.ceil(np.log2(np.abs(blocks).max(axis=1, keepdims=True) / 6))
    size = np.abs(blocks) / scale
    below = np.clip(np.searchsorted(GRID, size, side="right") - 1, 0, 6)
    low, high = GRID[below], GRID[below + 1]
    wanted = size
    if average is not None:
        wanted = average.astype(np.float64).reshape(-1, 32) / scale * np.sign(blocks)
    nearest = np.where(wanted - low < high - wanted, low, high)
    return (nearest * scale * np.sign(blocks)).reshape(weight.shape)


@pytest.mark.outside
@pytest.mark.parametrize("recipe", ["tetrajet", "tetrajet-ema"])
def test_a_training_is_measured_from_its_main_weights(recipe: str, tmp_path: Path) -> None:
    """The steps 1 to 3 of a run against the weights and averages in its checkpoints."""
    flags = ["--fp4-recipe", recipe, "--train-iters", "4", "--lr-warmup-fraction", "0"]
    if recipe == "tetrajet-ema":
        flags += ["--fp4-recipe-option", "ema_beta=0.5", "--fp4-recipe-option", "ema_delay=0"]
    saved = train(PRETRAIN_VIT, *flags, "--save", str(tmp_path), "--save-interval", "1")
    assert saved.status == 0, saved.output[-3000:]
    out = tmp_path / "oscillation.json"
    load = ["--load", str(tmp_path), "--ckpt-step", "1", "--oscillation", str(out)]
    measured = train(WORKER, *flags, *load)
    assert measured.status == 0, measured.output[-3000:]
    assert measured.losses == saved.losses[1:]  # the example resumes where it was
    steps = [contents(tmp_path / f"iter_{step:07d}") for step in (1, 2, 3)]
    prefix, suffixes = "optimizer.state.fp32_param.", ("qkv", "proj", "fc1", "fc2")
    names = [name.removeprefix(prefix) for name in steps[0] if name.startswith(prefix)]
    names = [n for n in names if n.removesuffix(".weight").endswith(suffixes)]
    assert len(names) == 4
    mains = {name: np.stack([step[prefix + name].numpy() for step in steps]) for name in names}

    def figures(averages: dict[str, np.ndarray] | None) -> dict[str, float]:
        rates, quantized_rates, shares = [], [], []
        for name, stacked in mains.items():
            for layer in range(2):
                w = stacked[:, layer]
                kept = averages[name][:, layer] if averages else [None] * 3
                q = np.stack([quantize(one, other) for one, other in zip(w, kept, strict=True)])
                rates.append(rate(w.astype(np.float64)))
                quantized_rates.append(rate(q))
                shares.append(ratios(w.astype(np.float64), q).ravel())
        every = np.concatenate(shares)
        return {
            "r(W)": float(np.mean(rates)),
            "r(W_Q)": float(np.mean(quantized_rates)),
            "R_w, mean": float(every.mean()),
            "oscillating": float((every > 16).mean()),
        }

    of_state = "optimizer.state.fp4_average."
    averages = None
    if recipe == "tetrajet-ema":
        averages = {n: np.stack([step[of_state + n].numpy() for step in steps]) for n in names}
    found = json.loads(out.read_text())
    assert found.pop("steps") == 2
    assert found == pytest.approx(figures(averages), rel=1e-6)
    if averages:  # the control: nearest rounding
        assert found != pytest.approx(figures(None), rel=1e-3)
