"""benchmarks/kernel_counters.py: how ncu's table is read."""

import csv
import io

import pytest

from benchmarks import kernel_counters
from benchmarks.kernel_counters import CASES, DURATION, SHARES, by_case, read, table

WAIT = "smsp__average_warps_issue_stalled_wait_per_issue_active.ratio"
LONG = "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio"
COLUMNS = ["ID", "Kernel Name", DURATION, *SHARES.values(), WAIT, LONG]
UNITS = ["", "", "ns", *["%"] * len(SHARES), "inst", "inst"]


def log(*kernels: tuple[str, str]) -> list[str]:
    """The lines that ncu writes, for kernels with these names and durations."""
    text = io.StringIO()
    writer = csv.writer(text, quoting=csv.QUOTE_ALL)
    writer.writerows([COLUMNS, UNITS])
    for place, (name, duration) in enumerate(kernels):
        writer.writerow([place, name, duration, *["50.5"] * len(SHARES), "0.5", "1.25"])
    return ["==PROF== Connected", *text.getvalue().splitlines()]


def test_a_kernel_is_read_with_its_units() -> None:
    (found,) = read(log(("a kernel, of two", "61,500")))
    assert found["kernel"] == "a kernel, of two" and found["us"] == 61.5
    assert found["shares"] == dict.fromkeys(SHARES, 50.5)
    assert found["stalls"] == {"wait": 0.5, "long_scoreboard": 1.25}


def test_kernels_belong_to_the_case_before_which_a_mark_is() -> None:
    mark = ("vectorized_elementwise_kernel<4, FillFunctor<float>>", "900")
    those = [mark, ("quantize", "50,000"), ("small", "1,000")] * len(CASES)
    rows = by_case(read(log(*those)))
    assert [(row["case"], row["kernel"]) for row in rows] == [(name, "quantize") for name in CASES]
    assert "long scoreboard 1.2, wait 0.5" in table(rows)[-1]


def test_a_case_without_a_mark_is_noticed() -> None:
    with pytest.raises(ValueError, match="shorter"):
        by_case(read(log(("FillFunctor", "900"), ("quantize", "50,000"))))


def test_its_cases_are_kernels_of_the_benchmark() -> None:
    assert set(CASES) <= set(kernel_counters.KERNELS)
