"""The table of docs/data.md is the committed result of benchmarks/preprocess.py."""

import json
from pathlib import Path

from benchmarks.preprocess import table

ROOT = Path(__file__).parents[2]
RESULT = json.loads((ROOT / "benchmarks/results/preprocess.json").read_text())


def test_the_table_is_the_committed_result() -> None:
    assert "\n".join(table(RESULT["rows"])) in (ROOT / "docs/data.md").read_text()


def test_both_tools_wrote_the_same_files() -> None:
    assert len(RESULT["rows"]) == 8 and all(row["same_files"] for row in RESULT["rows"])
