"""docs/notes/technique-costs.md has the committed comparison, and that is the one of this code."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks import technique_costs
from benchmarks.estimate_rows import result
from megatron_fp4.estimate.rates import RATES
from megatron_fp4.estimate.work import SECOND_SCALE

PAGE = Path(__file__).parents[2] / "docs/notes/technique-costs.md"
Rows = list[dict[str, Any]]
FORMATS, FOLDER = "linears by format", "benchmarks/study/candidates/"
IN_BF16 = ("nvfp4-nvidia", "ue5m3", "four-over-six", "quartet-2")
# The least rank correlation of each kind. Of shuffled models less than one of 200 reaches it, and a
# model without transforms is at 0.69 for the kernels.
FLOORS = {"kernels": 0.7, "linears": 0.9, "older linears": 0.9, FORMATS: 0.85, "steps": 0.6}
_TIMES = ("measured", *technique_costs.FIGURES)


@pytest.fixture(scope="module")
def rows() -> Rows:
    found: Rows = result("technique_costs")["rows"]
    return found


def of(rows: Rows, word: str, kinds: str) -> str:
    """The least and the most of the model over the measured time, of rows that begin so."""
    ratios = [
        row["with kernels"] / row["measured"]
        for row in rows
        if row["name"].startswith(word) and row["kind"] == kinds
    ]
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def test_the_committed_rows_are_those_of_this_code(rows: Rows) -> None:
    for row, now in zip(rows, technique_costs.rows(), strict=True):
        assert row.keys() == now.keys()
        for key, value in row.items():
            assert value == (pytest.approx(now[key], rel=1e-6) if key in _TIMES else now[key])


def test_the_page_has_the_tables(rows: Rows) -> None:
    text = PAGE.read_text()
    assert "\n".join(technique_costs.table(rows)) in text
    assert "\n".join(technique_costs.recipes(rows)) in text


def test_the_page_says_where_the_model_is_wrong(rows: Rows) -> None:
    turned = [row for row in rows if row["name"].startswith("Hadamard")]
    both = [row for row in turned if ", both," in row["name"]]
    one = [row for row in turned if row not in both]
    text = " ".join(PAGE.read_text().split())
    for said in (
        f"(`fp8`): {of(rows, 'fp8,', 'linears')}.",
        f"{of(one, '', 'kernels')} in one direction, {of(both, '', 'kernels')} in both.",
        f"(`dge-occ`): {of(rows, 'dge-occ,', 'linears')}.",
        f"(`tetrajet-ema`): {of(rows, 'tetrajet-ema,', 'older linears')}, in the older linears.",
        *(f"{of(rows, f'{name},', FORMATS)} for `{name}`" for name in IN_BF16),
        f"(`fp8-scales.yaml`): {of(rows, f'{FOLDER}fp8-scales.yaml,', FORMATS)}.",
        f"{of(rows, f'{FOLDER}sweep-e8m0-dge.yaml,', FORMATS)} for E8M0 in blocks of 16 with DGE",
        f"UE5M3 is at {of(rows, f'{FOLDER}sweep-ue5m3-dge.yaml,', FORMATS)}, since",
        "{:.0f} instructions an element to round to nearest, {:.0f} with random numbers, {:.0f} "
        "with four-over-six and {:.0f} with a transform".format(
            *(row["instructions"] for row in result("kernel_instructions")["block scales"])
        ),
        f"E1M2 at {of(rows, f'{FOLDER}sweep-e1m2-dge.yaml,', FORMATS)}, since",
    ):
        assert said in text, said


def test_least_ratios_are_of_small_linears(rows: Rows) -> None:
    for recipe in ("mxfp4", "tetrajet", "fp8"):
        own = [r for r in rows if r["kind"] == "linears" and r["name"].startswith(f"{recipe},")]
        worst = sorted(own, key=lambda row: row["with kernels"] / row["measured"])[:2]
        assert {row["name"].rpartition(", ")[2] for row in worst} <= {"2048 × 5632", "4096 × 4096"}


def test_the_rank_correlations_are_those_of_the_rows(rows: Rows) -> None:
    """By hand: 1 - 6 sum(d^2) / (n (n^2 - 1)), for rows without ties."""
    few = [{"measured": a, "with kernels": b} for a, b in ((1, 2.0), (2, 1.0), (3, 3.0), (4, 4.0))]
    assert technique_costs.correlation(few, "with kernels") == pytest.approx(1 - 6 * 2 / 60)
    committed = result("technique_costs")["rank correlations"]
    for kind, own in technique_costs.of_kind(rows).items():
        for figure in technique_costs.figures(own):
            assert committed[kind][figure] == technique_costs.correlation(own, figure)


def test_a_wrong_count_lowers_the_rank_correlation(
    rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without transforms the kernels that transform are ranked as those that do not."""
    own = technique_costs.of_kind(rows)["kernels"]
    monkeypatch.setattr(technique_costs, "Hadamard", lambda group: None)
    wrong = list(technique_costs._kernels())
    ranks = [technique_costs.correlation(each, "with kernels") for each in (wrong, own)]
    assert ranks[0] < FLOORS["kernels"] <= ranks[1]


def test_the_model_ranks_measurements(rows: Rows) -> None:
    found = technique_costs.of_kind(rows)
    assert found.keys() == FLOORS.keys()
    for kind, own in found.items():
        for figure in technique_costs.figures(own):
            assert technique_costs.correlation(own, figure) >= FLOORS[kind], (kind, figure)


@pytest.mark.parametrize("kind", FLOORS)
def test_a_model_that_ranks_by_chance_is_below_the_floor(rows: Rows, kind: str) -> None:
    own, source = technique_costs.of_kind(rows)[kind], random.Random(1)
    times, reached = [row["with kernels"] for row in own], 0
    for _ in range(1000):
        source.shuffle(times)
        wrong = [row | {"with kernels": time} for row, time in zip(own, times, strict=True)]
        reached += technique_costs.correlation(wrong, "with kernels") >= FLOORS[kind]
    assert reached < 5


@pytest.mark.parametrize(("name", "directions"), [("nearest, along rows", 1), ("nearest, both", 2)])
def test_two_scales_take_what_they_were_measured_to_take(name: str, directions: int) -> None:
    us: dict[tuple[int, str], float] = {}
    for row in result("quantize_kernels-mse")["rows"]:
        us[math.prod(row["shape"]), row["kernel"]] = row["us"]
    for elements in {elements for elements, _ in us}:
        more = us[elements, f"{name}, rule mse"] - us[elements, name]
        model = SECOND_SCALE * RATES.seconds["element rounded to nearest"]
        assert more * 1e-6 / (directions * elements) == pytest.approx(model, rel=0.2)
