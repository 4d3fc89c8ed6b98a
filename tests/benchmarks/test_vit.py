"""The study of the ViT: its tables are the committed result, and the README shows them."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.vit import FIRST_SEED, RECIPES, by_seed, evaluated, jobs, table
from examples.vit.vit_data import divide
from megatron_fp4.metrics.weights import WINDOW

ROOT = Path(__file__).parents[2]
RESULT: dict[str, Any] = json.loads((ROOT / "benchmarks/results/vit.json").read_text())
PAGE = (ROOT / "examples/vit/README.md").read_text()


def test_the_page_is_the_committed_result() -> None:
    for name, made in (("table", table(RESULT["rows"])), ("by_seed", by_seed(RESULT["rows"]))):
        assert made == RESULT[name] and "\n".join(made) in PAGE
    changed = [row | {"accuracy": row["accuracy"] - 0.01} for row in RESULT["rows"]]
    assert table(changed) != RESULT["table"]  # the control


def test_the_result_has_every_run_once_and_every_fold() -> None:
    found = [(row["recipe"], row["seed"], row["fold"]) for row in RESULT["rows"]]
    seeds = len(found) // len(RECIPES)
    assert seeds >= 5 and found == [
        (job.recipe, job.seed, job.fold) for job in jobs(RECIPES, seeds)
    ]
    assert {fold for _, _, fold in found} == set(range(seeds))
    for row in RESULT["rows"]:
        assert row["steps"] == WINDOW
        right = row["accuracy"] * len(divide(1797, seeds, row["fold"])[1])
        assert right == pytest.approx(round(right), abs=1e-3)  # a whole number of digits


def test_a_cell_is_the_mean_and_its_standard_error() -> None:
    """Of differences, seed by seed: numpy's, of rows in another order."""
    generator = np.random.default_rng(2)
    accuracy = {"bf16": generator.random(6), "tetrajet": generator.random(6)}
    rows = [
        {"recipe": recipe, "seed": FIRST_SEED + i, "fold": i, "accuracy": float(value),
         "loss": 1.0, "r(W_Q)": 0.5, "oscillating": 0.25}
        for recipe, values in accuracy.items()
        for i, value in (enumerate(values) if recipe == "bf16" else reversed([*enumerate(values)]))
    ]  # fmt: skip
    gaps = 100 * (accuracy["tetrajet"] - accuracy["bf16"])
    cells = [cell.strip() for cell in table(rows)[3].split("|")[1:-1]]
    assert cells[2] == f"{gaps.mean():+.2f} ± {gaps.std(ddof=1) / 6**0.5:.2f}"
    assert cells[1].startswith(f"{100 * accuracy['tetrajet'].mean():.2f} ± ")
    assert cells[4:] == ["0.50000 ± 0.00000", "25.00 ± 0.00"]
    apart = 100 * sum(values.var(ddof=1) / 6 for values in accuracy.values()) ** 0.5
    assert f"{apart:.2f}" != cells[2].split()[-1]  # the control: not paired by seed


def test_the_last_evaluation_counts() -> None:
    line = " validation loss at iteration {} | loss value: {:.6E} | loss PPL: 1.0E+00 | "
    line += "accuracy value: {:.6E} | accuracy PPL: 1.0E+00 | "
    log = "\n".join([line.format(1, 2.0, 0.25), line.format(2, 0.5, 0.75), "done"])
    assert evaluated(log) == {"loss": 0.5, "accuracy": 0.75}


def test_the_page_says_what_was_run() -> None:
    flags = RESULT["flags"]
    steps, rate = (flags[flags.index(flag) + 1] for flag in ("--train-iters", "--lr"))
    assert re.search(rf"{steps} steps .* learning rate of {rate}", PAGE)
    assert f"commit {RESULT['stamp']['commit']}" in PAGE
