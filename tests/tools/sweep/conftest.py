"""Recorded tensors and committed results for the tests of a sweep."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.tools.sweep.test_stages import recorded
from tools.rows import Row
from tools.sweep import __main__, llama, page
from tools.sweep.pareto import Point


@pytest.fixture(scope="session")
def committed() -> list[Row]:
    """The rows of all stages."""
    return __main__.all_rows(__main__.RESULTS, llama.RESULTS)


@pytest.fixture(scope="session")
def every_point(committed: list[Row]) -> list[Point]:
    """The recipes of the last stage."""
    return page.points_of(committed, llama.NAME)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A file of recorded tensors."""
    (each,) = recorded(64, 64, 64)
    parts = {"x": each.x, "weight": each.weight, "gradient": each.gradient}
    found = [{"name": f"decoder.layers.{layer}.linear", **parts} for layer in (0, 1, 3)]
    torch.save(found, tmp_path / "tensors.pt")
    return tmp_path / "tensors.pt"
