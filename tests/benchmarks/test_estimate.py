"""The rates and errors of estimates are those of the committed results."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import estimate_error
from benchmarks.estimate_fit import fit
from benchmarks.estimate_rows import LINEARS, RESULTS, kernels, linears, mlps, result, steps
from megatron_fp4.estimate.gpus import MEASURED
from megatron_fp4.estimate.layout import stages
from megatron_fp4.estimate.memory import calibration, memory
from megatron_fp4.estimate.rates import ASSUMED, RATES, UNITS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/choose-layout.md").read_text()
IN_OPTIMIZER = {
    (step.file, step.layout_name, step.name)
    for step in steps()
    if estimate_error.peaks_in_optimizer(step)
}


def test_the_rates_are_those_that_the_fit_finds() -> None:
    found = fit()
    assert found.seconds.keys() == RATES.seconds.keys()
    for unit, rate in found.seconds.items():
        assert RATES.seconds[unit] == pytest.approx(rate, rel=1e-3), unit
        assert rate > 0
    assert tuple(RATES.idle) == pytest.approx(tuple(found.idle), rel=0.01)
    assert RATES.exposed == pytest.approx(found.exposed, rel=0.01)
    assert RATES.alone == pytest.approx(found.alone, rel=0.01)


def test_every_unit_has_a_rate() -> None:
    assert UNITS.keys() - RATES.seconds.keys() == {"fp4 operation"}  # scaled from FP8's
    assert ASSUMED.keys() < RATES.seconds.keys()


def test_the_committed_errors_are_those_of_this_code() -> None:
    committed = result("estimate_error")["rows"]
    for row, now in zip(committed, estimate_error.rows(), strict=True):
        numbers = {key for key, value in row.items() if isinstance(value, float)}
        assert numbers >= {"fitted"}
        assert {key: now[key] for key in row if key not in numbers | {"bytes"}} == {
            key: row[key] for key in row if key not in numbers | {"bytes"}
        }
        for key in numbers:
            assert now[key] == pytest.approx(row[key], rel=1e-6)


def test_every_measured_step_is_compared() -> None:
    """A new result of steps that nothing estimates is noticed."""
    names = ("*[_-]step*", "few-bits-*", "parallel-*")
    files = {path.stem for name in names for path in RESULTS.glob(f"{name}.json")}
    # Whose optimizer, and in some rows linears, are Transformer Engine's.
    with_te = {"te-step", "parallel-te", "parallel-te-others", "few-bits-aware"}
    with_te |= {"parallel-four-te"}
    assert files - with_te == {step.file for step in steps()}


def test_every_result_of_an_h200_is_compared_or_named_as_not_compared() -> None:
    """A new result that nothing estimates is noticed."""
    measured = {path.stem for path in RESULTS.glob("*.json") if "H200" in _device(path)}
    timed = (*linears(), *mlps(), *kernels())
    compared = {step.file for step in steps()} | {each.file for each in timed}
    named = set(re.findall(r"`([\w-]+)`", PAGE.split("**Not compared.**")[1].split("\n## ")[0]))
    assert compared < measured
    assert measured - compared - named == set()
    assert named <= measured  # none is named that is gone
    assert named & compared == {"peers", "mlp", "linear-te"}  # of which a part is not compared


def _device(path: Path) -> str:
    return str(json.loads(path.read_text()).get("stamp", {}).get("device"))


def test_the_tables_are_in_the_page() -> None:
    rows = result("estimate_error")["rows"]
    for table in (*estimate_error.tables(rows), estimate_error.summary(rows)):
        assert "\n".join(table) in PAGE


def test_figures_in_running_text() -> None:
    rows = [row for row in result("estimate_error")["rows"] if "memory" in row]
    lowest, *eager = sorted(row["memory"] for row in rows if not _has_graphs(row))
    graphs = [1 - row["memory"] for row in rows if _has_graphs(row)]
    assert f"lie between {eager[0]:.3f} and {eager[-1]:.3f} of the measured peak" in PAGE
    [worst] = [row for row in rows if row["memory"] == lowest]
    assert (worst["file"], worst["layout"], worst["name"]) == ("parallel-fp8", "pp2", "fp8")
    missing = f"{lowest:.3f}: {worst['peak GiB'] * (1 - lowest):.1f} GiB of {worst['peak GiB']:.1f}"
    assert f"That of `fp8` under PP2 (`parallel-fp8`) is {missing} are missing" in PAGE
    lacking = [row["peak GiB"] * (1 - row["memory"]) for row in rows if _has_graphs(row)]
    amounts = f"{min(lacking):.1f} to {max(lacking):.1f} GiB"
    assert f"which is {min(graphs):.0%} to {max(graphs):.0%} below: {amounts}." in PAGE


def test_steps_that_wait_for_hosts_are_estimated_too_short() -> None:
    rows = [row for row in result("estimate_error")["rows"] if row["file"] == "parallel-four"]
    found = {(row["layout"], row["name"]): f"{row['fitted']:.2f} of its time" for row in rows}
    assert f"is estimated at {found['tp4-sp', 'fp8']} under TP4" in PAGE
    assert f"under TP2 with PP2 is estimated at {found['tp2-sp-pp2', 'tetrajet']}" in PAGE


def test_linears_of_tetrajet_are_estimated_too_short() -> None:
    found = [
        row["left out"]
        for row in result("estimate_error")["rows"]
        if row["file"] in LINEARS and row["name"].endswith(", tetrajet")
    ]
    assert f"linears of `tetrajet` are estimated up to {1 - min(found):.0%} too short" in PAGE


def test_steps_in_few_bits_are_predicted() -> None:
    rows = [row for row in result("estimate_error")["rows"] if row["file"].startswith("few-bits")]
    assert f"The {len(rows)} steps of the `few-bits` results" in PAGE
    times, peaks = ([row[key] for row in rows] for key in ("fitted", "memory"))
    assert f"at {min(times):.2f} to {max(times):.2f} of their time" in PAGE
    assert f"at {min(peaks):.3f} to {max(peaks):.3f} of their peak memory" in PAGE
    summed = [row["fitted"] for row in rows if row["name"].endswith("--grad-reduce-in-bf16")]
    least, most = min(summed), max(summed)
    assert f"`--grad-reduce-in-bf16` are estimated at {least:.2f} and {most:.2f}" in PAGE


def test_gradients_in_fp8_are_predicted_to_gain_where_they_did_not() -> None:
    rows = [row for row in result("estimate_error")["rows"] if row["file"] == "few-bits-four"]
    ms = {row["name"]: row["measured ms"] for row in rows}
    estimated = {row["name"]: row["fitted"] * row["measured ms"] for row in rows}
    few, plain = "tetrajet --fp4-grad-comm fp8", "tetrajet"
    shorter, longer = 1 - estimated[few] / estimated[plain], ms[few] / ms[plain] - 1
    assert f"make a step of `tetrajet` {shorter:.1%} shorter" in PAGE
    assert f"was measured to make it {longer:.1%} longer (`few-bits-four`)" in PAGE


def test_steps_beside_fp8_are_predicted() -> None:
    rows = result("estimate_error")["rows"]
    times = [row["fitted"] for row in rows if row["file"] == "parallel-fp8"]
    found = f"{min(times):.2f} to {max(times):.2f} of their time"
    assert f"The steps of `parallel-fp8`, on two GPUs, are estimated at {found}" in PAGE


def test_steps_of_each_recipe_are_predicted() -> None:
    rows = [row for row in result("estimate_error")["rows"] if row["file"] == "recipes-step"]
    times, peaks = {row["name"]: row["fitted"] for row in rows}, [row["memory"] for row in rows]
    gain, ue5m3 = times.pop("quartet-2"), times.pop("ue5m3")
    assert f"`quartet-2` is estimated at {gain:.2f} of its time" in PAGE
    others = f"`ue5m3` at {ue5m3:.2f}, since PyTorch decodes its codes before a transform, and "
    others += f"the others at {min(times.values()):.2f} to {max(times.values()):.2f}; all at "
    assert f"{others}{min(peaks):.3f} to {max(peaks):.3f} of their memory" in PAGE


def test_a_calibration_is_in_the_estimate_of_ramping_and_in_no_measured_step() -> None:
    [step] = [s for s in steps(("recipes-step",)) if s.name == "tetrajet-ramping"]
    [stage] = stages(step.model, step.layout)
    whole = memory(step.model, step.layout, step.recipe, MEASURED.target, stage).total
    more = calibration(step.model, step.layout, step.recipe, stage)
    assert estimate_error.peak(step) * 2**30 == whole - more
    assert (whole - more) / 2**30 == pytest.approx(step.row["peak_gib"], rel=0.001)
    assert whole / 2**30 > 1.5 * step.row["peak_gib"]  # the control


def test_gemms_of_one_step_differ_between_runs() -> None:
    ms = [
        result(name)["rows"][0]["gpu_ms"]["gemm"]
        for name in ("fused-step-beside", "fused-step", "fused-step-decoded")
    ]
    assert "took {:,.0f}, {:,.0f} and {:,.0f} ms in".format(*ms) in PAGE


def _has_graphs(row: dict[str, Any]) -> bool:
    """Whether the row is of a step whose peak is in the optimizer."""
    return (row["file"], row["layout"], row["name"]) in IN_OPTIMIZER
