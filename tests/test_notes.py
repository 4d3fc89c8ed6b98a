"""Tables in docs/notes are the committed results."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_kernels_figures_are_the_committed_result() -> None:
    result = json.loads((ROOT / "benchmarks/results/quantize_kernels.json").read_text())
    note = (ROOT / "docs/notes/quantize-kernels.md").read_text()
    assert "\n".join(result["table"]) in note
