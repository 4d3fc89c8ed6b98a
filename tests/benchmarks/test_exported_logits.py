"""The table of exported models in docs/huggingface.md is the committed result."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_table_is_the_committed_result() -> None:
    result = json.loads((ROOT / "benchmarks/results/exported_logits.json").read_text())
    page = (ROOT / "docs/huggingface.md").read_text()
    for row in result["rows"]:
        cells = [row["recipe"], row["forward pass"], f"{row['loss']:.4f}"]
        cells += [f"{row['logits apart']:.3f}", f"{row['other first choice']:.1%}"]
        assert f"| {' | '.join(cells)} |" in page
    steps, layers = result["training"]["steps"], result["model"]["layers"]
    assert f"{layers} layers of width {result['model']['hidden']}" in page
    assert f"{steps} steps" in page
