"""Early warnings, of made-up series of reports."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from megatron_fp4.metrics.bands import ENOUGH, WATCHED, Bands, summary

LAYER = "decoder.layers.3.mlp.linear_fc1"


def report(step: int, zeros: float | None, layer: str = LAYER, **others: Any) -> dict[str, Any]:
    return {
        "kind": "operand", "step": step, "layer": layer, "gemm": "fprop", "operand": "w",
        "metrics": {"zeros": zeros, "gain": 1.0, **others},
    }  # fmt: skip


def told(series: Sequence[float | None], bands: Bands | None = None) -> list[dict[str, Any]]:
    """The warnings about a series of zero rates, one a step from 1 on."""
    bands = bands or Bands()
    return [
        found for i, value in enumerate(series) for found in bands.judge([report(i + 1, value)])
    ]


def test_a_rate_that_doubles_is_told_of_once() -> None:
    [found] = told([0.05] * 8 + [0.11] * 20)
    line = found.pop("line")
    assert found == {
        "kind": "warning", "step": 9, "layer": LAYER, "operand": "fprop.w", "metric": "zeros",
        "value": 0.11, "usual": 0.05,
    }  # fmt: skip
    assert line.startswith(
        f"step 9: elements that became zero in fprop.w of {LAYER}: 0.11, usually"
    )
    assert f"or --fp4-module-recipe '{LAYER}=bf16' (resume with" in line and "\n" not in line
    # Controls: a little less than double, and a band that did not begin anew.
    assert told([0.05] * 8 + [0.099] * 20) == []
    bands = Bands()
    bands.remember([report(i, 0.05) for i in range(8)])
    again = [bands.judge([report(9, 0.11)]), bands.judge([report(10, 0.11)])]
    bands.remember([report(i, 0.05) for i in range(8)])
    assert [len(each) for each in (*again, bands.judge([report(11, 0.11)]))] == [1, 0, 1]


def test_each_doubling_of_a_slow_rise_is_told_of() -> None:
    found = told([0.05] * 8 + [0.12] * 8 + [0.3] * 8)
    assert [(each["step"], each["usual"]) for each in found] == [(9, 0.05), (17, 0.12)]


def test_noise_and_falls_are_in_the_band() -> None:
    draw = random.Random(1)
    assert told([0.05 * draw.uniform(0.7, 1.3) for _ in range(300)]) == []
    assert told([0.05] * 8 + [0.001] * 20) == []
    # Small rises are not told of, though they are many times what is usual.
    assert told([0.0] * 8 + [0.009] * 8) == [] and len(told([0.0] * 8 + [0.011] * 8)) == 1
    # The median bears an outlier among few reports: 0.09 is not twice 0.05.
    assert told([0.05, 0.05, 0.0, 0.05, 0.05, 0.09]) == []


def test_there_is_no_band_before_enough_reports() -> None:
    assert told([0.05] * (ENOUGH - 1) + [0.5]) == []
    assert len(told([0.05] * ENOUGH + [0.5])) == 1
    # Missing values are no reports.
    assert told([0.05] * (ENOUGH - 1) + [None] * 5 + [0.5]) == []


def test_a_carrier_window_that_overflows_from_the_start_is_told_of_once() -> None:
    bands, found = Bands(), []
    for step, value in enumerate([0.009, 0.05, 0.05, 0.06, 0.05, 0.05, 0.05, 0.05, 0.05, 0.11]):
        record = report(step, None, outside_carrier=value)
        found += bands.judge([record | {"gemm": "dgrad", "operand": "dy"}])
    assert [each["step"] for each in found] == [1, 9]  # then twice what had become usual
    assert "0.05, more than 0.01; the scales of a row" in found[0]["line"]
    assert found[0]["usual"] == 0.01
    resumed = Bands()
    resumed.remember(found[:1])
    again = report(2, None, outside_carrier=0.05) | {"gemm": "dgrad", "operand": "dy"}
    assert resumed.judge([again]) == [] and len(Bands().judge([again])) == 1  # the control


@pytest.mark.parametrize(("kind", "metric"), WATCHED)
def test_every_watched_rate_is_told_of_in_a_line(kind: str, metric: str) -> None:
    bands, place = Bands(), {"gemm": "wgrad", "operand": "dy"} if kind == "operand" else {}
    record: dict[str, Any] = {"kind": kind, "layer": LAYER, **place}
    for step in range(1, 10):
        value = 0.4 if step == 9 else 0.001
        found = bands.judge([record | {"step": step, "metrics": {metric: value}}])
        assert len(found) == (step == 9)
    operand = "wgrad.dy" if kind == "operand" else kind
    assert (found[0]["operand"], found[0]["metric"]) == (operand, metric)
    assert operand in found[0]["line"] and "{" not in found[0]["line"]


def test_remembered_reports_make_the_same_band() -> None:
    series: Sequence[float | None] = [0.05] * 8 + [0.12, 0.12]
    judged, remembered = Bands(), Bands()
    warnings = told(series, judged)
    records = [report(i + 1, value) for i, value in enumerate(series)]
    remembered.remember([*records[:8], *warnings, *records[8:]])
    for bands in (judged, remembered):
        assert told([0.12, 0.12, 0.12, 0.3], bands)[0]["usual"] == 0.12
    # Control: without the warning, the reports before it are in the band.
    forgetful = Bands()
    forgetful.remember(records)
    assert told([0.12, 0.12, 0.12, 0.3], forgetful)[0]["usual"] == 0.05


def test_the_log_has_one_line_for_what_many_layers_do() -> None:
    bands = Bands()
    for step in range(1, 10):
        last = step == 9
        records = [report(step, 0.1 + 0.2 * last * (i + 1), f"layer {i}") for i in range(3)]
        found = bands.judge([*records, report(step, 0.05 + last, "other") | {"operand": "x"}])
    assert len(found) == 4
    first, second = summary(found)
    assert "of layer 2: 0.7, usually 0.1;" in first and first.endswith("(and 2 other layers)")
    assert second == found[-1]["line"] and summary([]) == []
