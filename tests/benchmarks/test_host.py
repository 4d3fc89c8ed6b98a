"""The benchmark of Megatron's linears on the host: its rows, and a launch on a CPU."""

from __future__ import annotations

import pytest

from benchmarks import host
from benchmarks.host_worker import LINEARS


def row(name: str, us: float, of_torch: float) -> host.Row:
    times = {linear: us * (1 + i) for i, linear in enumerate(LINEARS)}
    return {"name": name, **times, **{f"torch {linear}": of_torch for linear in LINEARS}}


def test_ratios_are_to_the_faster_bf16() -> None:
    """Of processes of different speeds: the second ran at half the speed of the first."""
    rows = [row("upstream bf16", 300, 100), row("bf16", 500, 200), row("tetrajet", 800, 100)]
    host.compare(rows)
    assert [each["times linear_fc1"] for each in rows] == [1.2, 1.0, 3.2]
    assert [each["times linear_fc2"] for each in rows] == [1.2, 1.0, 3.2]
    assert host.table(rows)[-1] == "| tetrajet | 800 | 100 | 3.20 | 1,600 | 100 | 3.20 |"
    alone = [row("tetrajet", 800, 100)]
    host.compare(alone)
    assert host.table(alone)[-1] == "| tetrajet | 800 | 100 |  | 1,600 | 100 |  |"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["upstream bf16", "tetrajet"])
def test_a_launch_times_both_linears(name: str) -> None:
    found = host.measured(name, size=64, tp=1)
    assert found.keys() == {"name", *LINEARS, *(f"torch {linear}" for linear in LINEARS)}
    assert all(found[linear] > found[f"torch {linear}"] > 0 for linear in LINEARS)


@pytest.mark.slow
def test_a_launch_that_fails_has_no_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert not list(host.study(["no-such-recipe"], size=64, tp=1))
    assert "no-such-recipe" in capsys.readouterr().err
