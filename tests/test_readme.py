"""Figures in the README are those of the committed results."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_loss_table_is_the_committed_result() -> None:
    result = json.loads((ROOT / "benchmarks/results/held_out_loss.json").read_text())
    assert "\n".join(result["table"]) in (ROOT / "README.md").read_text()
