"""docs/notes/estimators.md says what the committed results of DGE and of learning rates have."""

from __future__ import annotations

import statistics

import torch

from benchmarks.study import tables
from benchmarks.study.gaps import Gap, gap
from megatron_fp4.arithmetic.estimators import Estimator
from tests.benchmarks.study.prose import ROOT, rows_of
from tools.sweep import llama

ESTIMATORS = (ROOT / "docs/notes/estimators.md").read_text()
APART = " --decoupled-lr 1.6e-2"


def test_figures_in_running_text_of_estimators() -> None:
    rows = rows_of("estimators")
    dge = next(row["configuration"]["recipe"] for row in rows if "dge" in str(row)).split()[0]
    cells = {cell.learning_rate: cell for cell in tables.cells(rows)}

    def mean(recipe: str, rate: float) -> str:
        wanted = [
            row["held_out"][-1][1]
            for row in rows
            if (row["configuration"]["recipe"], row["configuration"]["learning_rate"])
            == (recipe, rate)
        ]
        assert len(wanted) == 3
        return f"{statistics.mean(wanted):.4f}"

    def beside(recipe: str, rate: float, plain: str) -> Gap:
        found = gap(rows, cells[rate], recipe, plain)
        assert found is not None
        return found

    bf16 = mean("bf16", 4e-3)
    ends = f"ends at {mean(dge, 4e-3)}, `tetrajet` at {mean('tetrajet', 4e-3)} and BF16 at {bf16}"
    assert f"at 0.004, `tetrajet` with DGE on W {ends}." in ESTIMATORS
    assert f"from {bf16} to {mean('bf16' + APART, 4e-3)} at 0.004" in ESTIMATORS
    for recipe in (dge, "tetrajet"):
        found = beside(recipe + APART, 4e-3, "bf16" + APART)
        assert found.verdict == "within the spread"
    above = [beside(name + APART, 2e-3, "bf16" + APART) for name in (dge, "tetrajet")]
    assert {each.verdict for each in above} == {"higher"}
    words = f"it is {above[0].mean:.4f} above BF16, and `tetrajet` {above[1].mean:.4f}"
    assert words in ESTIMATORS
    assert beside(dge + APART, 8e-3, "bf16" + APART).verdict == "lower"
    small = rows_of("rates-3M")
    named = next(row["configuration"]["recipe"] for row in small if "dge" in str(row))
    gaps = [gap(small, cell, named, "bf16") for cell in tables.cells(small)]
    below = [f"{-each.mean:.4f}" for each in gaps if each is not None]
    assert f"is {below[0]} below BF16 at 0.002 and {below[1]} below it at 0.004" in ESTIMATORS


def test_the_rates_of_the_last_stage_of_the_sweep_are_the_best_of_a_study() -> None:
    losses: dict[tuple[str, float], list[float]] = {}
    for row in rows_of("two-rates-3M"):
        run = row["configuration"]
        losses.setdefault((run["recipe"], run["learning_rate"]), []).append(row["held_out"][-1][1])
    means = {run: statistics.mean(each) for run, each in losses.items()}
    best = min(means, key=means.__getitem__)
    single = min((run for run in means if run[0] == "bf16"), key=means.__getitem__)
    [rate], (flag, other) = llama.BLOCK["learning_rates"], llama.FLAGS
    assert best == (f"bf16 {flag} {float(other) * 100:g}e-2", rate)
    ends = f"ends at {means[best]:.4f} with {rate} for the linears and {other} for embedding"
    assert ends in ESTIMATORS
    assert f"and at {means[single]:.4f} with its best single rate" in ESTIMATORS


def test_lower_rates_of_linears_do_not_lower_the_loss_of_bf16() -> None:
    rows, dge = rows_of("low-rates-3M"), "benchmarks/study/candidates/sweep-e8m0-dge.yaml"
    losses: dict[float, list[float]] = {}
    for row in rows:
        if row["configuration"]["recipe"] == "bf16":
            rate = row["configuration"]["learning_rate"]
            losses.setdefault(rate, []).append(row["held_out"][-1][1])
    means = [statistics.mean(losses[rate]) for rate in sorted(losses, reverse=True)]
    assert means == sorted(means)
    first, *lower = (f"{each:.4f}" for each in means)
    assert f"ends at {first} with 0.0015 for the linears" in ESTIMATORS
    assert f"each lower rate: {lower[0]}, {lower[1]} and {lower[2]}." in ESTIMATORS
    gaps = {cell.learning_rate: gap(rows, cell, dge, "bf16") for cell in tables.cells(rows)}
    found = {rate: each for rate, each in gaps.items() if each is not None}
    assert found.pop(0.0015).verdict == "within the spread"
    above = sorted(each.mean for each in found.values())
    assert f"{above[0]:.4f} to {above[-1]:.4f} above it at lower rates" in ESTIMATORS
    best = rows_of("sweep-best")
    [cell] = tables.cells(best)
    names = dict.fromkeys(row["configuration"]["recipe"] for row in best)
    below = [each for name in names if (each := gap(best, cell, name, "bf16"))]
    ends = sorted(-each.mean for each in below if each.verdict == "lower")
    assert len(ends) == 3 and f"end {ends[0]:.4f} to {ends[-1]:.4f} below BF16" in ESTIMATORS


def test_the_factor_of_dge_over_a_step_of_the_grid() -> None:
    """Its mean, its root mean square, and their ratio, by the midpoint rule."""
    factors = Estimator().factor((torch.arange(2**20).double() + 0.5) / 2**21)  # of [0, 1/2]
    mean, root = factors.mean(), factors.square().mean().sqrt()
    words = f"the mean {mean:.3f} and the root mean square {root:.3f}"
    assert words in ESTIMATORS and f"moves {mean / root:.2f} times as far" in ESTIMATORS
