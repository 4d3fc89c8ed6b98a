"""Recorded tensors for the tests of a sweep."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.tools.sweep.test_stages import recorded


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A file of recorded tensors."""
    (each,) = recorded(64, 64, 64)
    parts = {"x": each.x, "weight": each.weight, "gradient": each.gradient}
    found = [{"name": f"decoder.layers.{layer}.linear", **parts} for layer in (0, 1, 3)]
    torch.save(found, tmp_path / "tensors.pt")
    return tmp_path / "tensors.pt"
