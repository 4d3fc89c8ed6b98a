"""When a run in eight processes counts as one of the seeds' spread."""

import pytest

from benchmarks.long_run import verdict
from tools.runs import Log


@pytest.mark.parametrize(("loss", "within"), [(3.03, True), (2.97, True), (3.05, False)])
def test_the_layouts_differ_by_no_more_than_two_seeds(loss: float, within: bool) -> None:
    alone = [Log(held_out=[(500, 9.0), (1000, last)]) for last in (3.0, 3.01, 2.97)]
    found = verdict(Log(held_out=[(500, 5.0), (1000, loss)]), alone)
    assert found["held out"][1]["seeds differ by at most"] == pytest.approx(0.04)
    assert found["within the spread"] is within
