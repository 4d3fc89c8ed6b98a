"""When runs in eight processes count as within the seeds' spread."""

import pytest

from benchmarks.long_run import ALONE, LAYOUT, verdict
from tools.runs import Log


@pytest.mark.parametrize(("shift", "within"), [(0.03, True), (-0.03, True), (0.05, False)])
def test_the_layouts_means_differ_by_no_more_than_two_seeds(shift: float, within: bool) -> None:
    losses = (3.0, 3.01, 2.97)
    alone = [Log(held_out=[(500, 9.0), (1000, loss)]) for loss in losses]
    parallel = [Log(held_out=[(500, 5.0), (1000, loss + shift)]) for loss in losses]
    found = verdict(parallel, alone)
    last = found["held out"][1]
    assert last[ALONE] == pytest.approx(0.04) == last[LAYOUT]
    assert last["means differ by"] == pytest.approx(abs(shift))
    assert found["within the spread"] is within
