"""The target of benchmarks/linear.py, which is a multiple of the floor of the same run."""

from __future__ import annotations

import pytest

from benchmarks import linear
from tests.test_notes import result


@pytest.mark.parametrize("name", ["linear-te", "linear-formats"])
def test_the_target_is_three_percent_above_the_floor(name: str) -> None:
    """It is a speedup: of the time of BF16, by 1.03 times the floor in milliseconds."""
    rows = result(name)["rows"]
    shapes = {(row["in"], row["out"]) for row in rows}
    lines = linear.table(rows)[2:]  # without head and rule
    found = 0
    for row, line in zip(rows, lines, strict=True):
        *_, reached, target, _ = (cell.strip() for cell in line.split("|"))
        assert bool(target) == (row["recipe"] == "tetrajet")
        if target:
            bf16 = row["ratio"] * row["ms"]
            assert target == f"{bf16 / (1.03 * row['floor ms']):.2f}"
            assert float(target) < float(reached)  # fixed targets were above it, such as 1.56
            found += 1
    assert found == len(shapes)
