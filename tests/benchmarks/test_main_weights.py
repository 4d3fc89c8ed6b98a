"""Main weights in FP16: what the benchmark stores and compares, and the page of its result."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import main_weights
from benchmarks.main_weights import SIZE, compared, moved, stored

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/notes/main-weights.md"
RESULT = json.loads((ROOT / "benchmarks/results/main_weights.json").read_text())


def draws() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def test_weights_are_stored_in_11_bits() -> None:
    """numpy's float16, of which blocks with power-of-two scales are multiples."""
    weights = SIZE * torch.randn(4096, generator=draws())
    exact = torch.from_numpy((weights.numpy() * 2**10).astype(np.float16).astype(np.float32))
    assert torch.equal(stored(weights, False, draws()), exact / 2**10)


def test_less_than_half_a_step_is_lost_and_stochastic_rounding_keeps_it_in_the_mean() -> None:
    weight = torch.full((2**16,), 1.25 * 2**-6)  # between 2^-6 and 2^-5 steps are 2^-16
    update = 0.3 * 2.0**-16
    assert torch.equal(stored(weight + update, False, draws()), weight)
    found = stored(weight + update, True, draws()) - weight
    error = float(found.double().mean()) - update
    assert abs(error) < 5 * 2**-16 * (0.3 * 0.7 / len(weight)) ** 0.5
    assert set(found.tolist()) == {0.0, 2.0**-16}


@pytest.mark.parametrize(("rounded", "holds"), [("nearest", False), ("stochastic", True)])
def test_the_drift_is_that_of_float32(rounded: str, holds: bool) -> None:
    """Within five standard errors, stochastically rounded; the control is rounding to nearest."""
    start = SIZE * torch.randn(4096, generator=draws())
    exact, nearest, noisy = moved(start, 1e-5, 100)
    found = nearest if rounded == "nearest" else noisy
    numbers = compared(start, exact, found)
    movement = (exact - start).double()
    error = float((found - exact).double().std() / len(start) ** 0.5 / movement.mean())
    assert (abs(numbers["drift"] - 1) < 5 * abs(error)) == holds
    assert compared(start, exact, exact) == {"drift": 1.0, "noise": 0.0}


def test_the_page_has_the_result() -> None:
    text = PAGE.read_text()
    assert "\n".join(main_weights.table(RESULT["rows"])) in text
    assert f"{RESULT['steps']:,} steps of {RESULT['elements']:,} weights" in text
    rows = {(row["rate"], row["rounding"]): row for row in RESULT["rows"]}
    low = rows[1e-5, "nearest"]["drift"]
    assert f"At 1e-5 weights rounded to nearest move {low:.2f} times as far" in text
    noise = [rows[rate, "stochastic"]["noise"] for rate in (1e-5, 1e-6)]
    assert "adds {:.2f} times that noise at 1e-5 and {:.2f} times at 1e-6".format(*noise) in text
