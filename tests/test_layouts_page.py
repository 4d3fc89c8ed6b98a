"""The tables in docs/layouts.md are the committed results, and all of it holds."""

import json
from pathlib import Path

import pytest

from benchmarks.long_run import table
from testing.layouts.matrix import holds

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", ["layouts", "layouts-8", "layouts-8-gpu", "layouts-gpu"])
def test_the_page_is_the_committed_result(name: str) -> None:
    result = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())
    assert "\n".join(result["table"]) in (ROOT / "docs/layouts.md").read_text()
    assert result["rows"] and all(row["holds"] and holds(row) for row in result["rows"])


def test_two_ranks_again_gave_the_same_figures() -> None:
    first, again = (
        {(r["layout"], r["model"], r["recipe"], r["mode"]): r for r in json.loads(text)["rows"]}
        for text in (
            (ROOT / f"benchmarks/results/{name}.json").read_text()
            for name in ("layouts-gpu", "layouts-gpu-two")
        )
    )
    assert f"all {len(again)} rows hold" in (ROOT / "docs/layouts.md").read_text()
    assert all(row["holds"] and holds(row) for row in again.values())
    common = first.keys() & again.keys()
    assert len(common) > 100
    for who in common:
        figures = first[who]["figures"].keys() & again[who]["figures"].keys()
        assert {f: first[who]["figures"][f] for f in figures} == {
            f: again[who]["figures"][f] for f in figures
        }


def test_the_long_run_is_within_the_spread_of_its_seeds() -> None:
    result = json.loads((ROOT / "benchmarks/results/long_run.json").read_text())
    assert result["training"]["steps"] == 1000 and result["within the spread"]
    assert table(result) == result["table"]
    assert "\n".join(result["table"]) in (ROOT / "docs/layouts.md").read_text()
