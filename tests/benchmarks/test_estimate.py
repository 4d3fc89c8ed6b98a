"""The rates and errors of estimates are those of the committed results."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import estimate_error
from benchmarks.estimate_fit import fit
from benchmarks.estimate_rows import RESULTS, kernels, linears, result, steps
from megatron_fp4.estimate.rates import ASSUMED, RATES, UNITS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/choose-layout.md").read_text()


def test_the_rates_are_those_that_the_fit_finds() -> None:
    found = fit()
    assert found.seconds.keys() == RATES.seconds.keys()
    for unit, rate in found.seconds.items():
        assert RATES.seconds[unit] == pytest.approx(rate, rel=1e-3), unit
        assert rate > 0
    assert RATES.idle == pytest.approx(found.idle, rel=0.01)
    assert RATES.exposed == pytest.approx(found.exposed, rel=0.01)


def test_every_unit_has_a_rate() -> None:
    assert UNITS.keys() - RATES.seconds.keys() == {"fp4 operation"}  # scaled from FP8's
    assert ASSUMED.keys() < RATES.seconds.keys()


def test_the_committed_errors_are_those_of_this_code() -> None:
    committed = result("estimate_error")["rows"]
    for row, now in zip(committed, estimate_error.rows(), strict=True):
        numbers = {key for key, value in row.items() if isinstance(value, float)}
        assert numbers >= {"fitted"}
        assert {key: now[key] for key in row if key not in numbers | {"bytes"}} == {
            key: row[key] for key in row if key not in numbers | {"bytes"}
        }
        for key in numbers:
            assert now[key] == pytest.approx(row[key], rel=1e-6)


def test_every_measured_step_is_compared() -> None:
    """A new result of steps that nothing estimates is noticed."""
    files = {path.stem for path in RESULTS.glob("*_step*.json")}
    assert files == {step.file for step in steps()}


def test_every_result_of_an_h200_is_compared_or_named_as_not_compared() -> None:
    """A new result that nothing estimates is noticed."""
    measured = {path.stem for path in RESULTS.glob("*.json") if "H200" in _device(path)}
    compared = {step.file for step in steps()} | {x.file for x in (*linears(), *kernels())}
    named = set(re.findall(r"`([\w-]+)`", PAGE.split("**Not compared.**")[1].split("\n## ")[0]))
    assert compared < measured
    assert measured - compared - named == set()
    assert named <= measured  # none is named that is gone
    assert named & compared == {"peers"}  # a part of it is not compared


def _device(path: Path) -> str:
    return str(json.loads(path.read_text()).get("stamp", {}).get("device"))


@pytest.mark.parametrize("table", [estimate_error.table, estimate_error.summary])
def test_the_tables_are_in_the_page(table: Any) -> None:
    assert "\n".join(table(result("estimate_error")["rows"])) in PAGE


def test_figures_in_running_text() -> None:
    rows = [row for row in result("estimate_error")["rows"] if "layout" in row]
    eager = [row["memory"] for row in rows if not _has_graphs(row)]
    graphs = [1 - row["memory"] for row in rows if _has_graphs(row)]
    assert f"lie between {min(eager):.3f} and {max(eager):.3f} of the measured peak" in PAGE
    assert f"which is {min(graphs):.0%} to {max(graphs):.0%} below" in PAGE


def _has_graphs(row: dict[str, Any]) -> bool:
    return "graph" in row["name"]
