"""Tables in docs/ are the committed results."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import linear, parallel_step, peers, quantize_kernels, training_step

ROOT = Path(__file__).parents[1]
PAGES: dict[str, tuple[str, Any]] = {
    "quantize_kernels": ("docs/notes/quantize-kernels.md", quantize_kernels),
    "linear": ("docs/hopper.md", linear),
    "training_step": ("docs/hopper.md", training_step),
    "training_step-four": ("docs/hopper.md", training_step),
    "parallel_step": ("docs/hopper.md", parallel_step),
    "parallel_step-before": ("docs/notes/host.md", parallel_step),
    "parallel_step-after": ("docs/notes/host.md", parallel_step),
    "parallel_step-apart": ("docs/notes/host.md", parallel_step),
    "parallel_step-graphs": ("docs/notes/host.md", parallel_step),
    "peers": ("docs/hopper.md", peers),
}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_s_figures_are_the_committed_result(name: str) -> None:
    page, benchmark = PAGES[name]
    result = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())
    stamp = result["stamp"]
    assert set(stamp["device"]) == {"NVIDIA H200"} and len(stamp["commit"]) == 40
    assert "\n".join(benchmark.table(result["rows"])) in (ROOT / page).read_text()
