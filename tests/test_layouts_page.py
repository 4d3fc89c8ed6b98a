"""The table in docs/layouts.md is the committed result, and all of it holds."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULT = json.loads((ROOT / "benchmarks/results/layouts.json").read_text())


def test_the_table_is_the_committed_result() -> None:
    assert "\n".join(RESULT["table"]) in (ROOT / "docs/layouts.md").read_text()


def test_every_line_holds() -> None:
    assert RESULT["rows"] and all(row["holds"] for row in RESULT["rows"])
