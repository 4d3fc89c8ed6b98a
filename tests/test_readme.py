"""Figures in the README are those of the committed results."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_the_loss_table_is_the_committed_result() -> None:
    result = json.loads((ROOT / "benchmarks/results/held_out_loss.json").read_text())
    assert "\n".join(result["table"]) in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("file", ["constraints.txt", "constraints-newest.txt"])
def test_the_versions_are_those_that_are_installed(file: str) -> None:
    pins = dict(re.findall(r"^(\S+)==(\S+)$", (ROOT / file).read_text(), re.M))
    versions = [pins[name] for name in ("torch", "triton", "megatron-core")]
    assert f"| `{file}` | {' | '.join(versions)} |" in (ROOT / "README.md").read_text()
