"""StableSPAM against AdamW where both must be equal, and against its formulas in NumPy."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tools.sweep.stages import STAGES
from tools.sweep.stages.stable_spam import StableSPAM

OPTIONS: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def run(optimizer: type, gradients: list[np.ndarray], **options: object) -> np.ndarray:
    parameter = torch.nn.Parameter(torch.linspace(-1, 1, gradients[0].size, dtype=torch.float64))
    stepping = optimizer([parameter], **OPTIONS, **options)
    for gradient in gradients:
        parameter.grad = torch.from_numpy(gradient.copy())
        stepping.step()
    return parameter.detach().numpy()


def test_gradients_of_one_norm_and_one_maximum_are_adamw_s() -> None:
    """Nothing is clipped, and the smoothed norm is that of each gradient: 1."""
    source, base = np.random.default_rng(0), np.array([0.1, 0.3, 0.5, 0.8])
    base /= np.linalg.norm(base)
    gradients = [source.permutation(base) * source.choice((-1, 1), 4) for _ in range(40)]
    spam = run(StableSPAM, gradients)
    adam = run(torch.optim.AdamW, gradients)
    np.testing.assert_allclose(spam, adam, rtol=1e-6)
    assert np.abs(spam - run(torch.optim.AdamW, [2 * g for g in gradients])).max() < 1e-6
    spiked = [g * (20 if step == 20 else 1) for step, g in enumerate(gradients)]
    moved = np.abs(run(StableSPAM, spiked) - adam).max()
    assert moved < np.abs(run(torch.optim.AdamW, spiked) - adam).max() / 2  # what it is for


def test_its_steps_are_those_of_the_formulas() -> None:
    source = np.random.default_rng(1)
    gradients = [source.standard_normal(6) * (30 if step % 7 == 3 else 1) for step in range(25)]
    np.testing.assert_allclose(run(StableSPAM, gradients, reset=10), formulas(gradients, 10))
    assert not np.allclose(run(StableSPAM, gradients, reset=10), formulas(gradients, 1000))
    assert not np.allclose(run(StableSPAM, gradients, reset=10), formulas(gradients, 10, False))


def test_after_each_interval_the_moments_begin_at_zero() -> None:
    """The first gradient after a reset is all that Adam then knows, so that its step is lr times
    the gradient's sign. What clips and smooths gradients goes on."""
    gradients = [np.array([1.0, -2.0, 3.0]), np.array([-1.0, 2.0, -3.0])]
    for steps, begins in ((10, True), (9, False), (11, False)):
        before = run(StableSPAM, gradients[:1] * steps, reset=10)
        after = run(StableSPAM, [*gradients[:1] * steps, gradients[1]], reset=10)
        moved = after - before * (1 - OPTIONS["lr"] * OPTIONS["weight_decay"])
        assert np.allclose(moved, -OPTIONS["lr"] * np.sign(gradients[1])) is begins


def test_no_training_of_a_sweep_is_as_long_as_an_interval() -> None:
    """As docs/design-space.md says."""
    interval = inspect.signature(StableSPAM).parameters["reset"].default
    steps = {name: stage.settings["steps"] for name, stage in STAGES.items() if not stage.recorded}
    assert max(steps.values()) < interval
    assert set(steps) == {"regression", "digits", "diffusion"}
    sentence = (
        f"to zero after every {interval:,} steps, as in its paper. The trainings here have "
        f"{steps['regression']} steps (`regression`), {steps['digits']} (`digits`) and "
        f"{steps['diffusion']} (`diffusion`)"
    )
    page = Path(__file__).parents[3] / "docs/design-space.md"
    assert sentence in page.read_text()


def formulas(gradients: list[np.ndarray], reset: int, clips: bool = True) -> np.ndarray:
    lr, (b1, b2), eps, decay = OPTIONS["lr"], OPTIONS["betas"], 1e-8, OPTIONS["weight_decay"]
    w = np.linspace(-1, 1, gradients[0].size)
    m = v = np.zeros_like(w)
    top = first = second = 0.0
    for t, g in enumerate(gradients, start=1):
        peak = np.abs(g).max()
        top = 0.999 * top + 0.001 * peak
        limit = top / (1 - 0.999**t)
        if clips:
            g = np.where(np.abs(g) > limit, g * limit / peak, g)
        norm = np.sqrt((g**2).sum())
        first, second = 0.7 * first + 0.3 * norm, 0.9 * second + 0.1 * norm**2
        g = g / norm * (first / (1 - 0.7**t)) / np.sqrt(second / (1 - 0.9**t))
        since = (t - 1) % reset + 1
        if since == 1:
            m = v = np.zeros_like(w)
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        step = m / (1 - b1**since) / (np.sqrt(v / (1 - b2**since)) + eps)
        w = w - lr * decay * w - lr * step
    return w
