"""Early warnings of a run: in its log, in metrics.jsonl and in the report, and over a resume."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_fp4.mcore.loop.metrics_log import append, reports
from megatron_fp4.report.reading import read as read_run
from testing.worlds.checkpoints import SMALL
from testing.worlds.launch import SCRIPTS, Result, result_of, spawn, tiny_on_mock_data, torchrun
from testing.worlds.metrics import kinds, read

LAYER = "decoder.layers.0.mlp.linear_fc1"  # of pretrain_with_outliers.py
FLAGS = f"{SMALL} --bf16 --fp4-recipe tetrajet --fp4-metrics-interval 1 --lr-decay-iters 10".split()
SIX = "--train-iters 6 --override-opt_param-scheduler".split()


def with_outliers(*flags: str) -> Result:
    words = tiny_on_mock_data(*FLAGS, "--train-iters", "8", *flags)
    result = result_of(spawn(1, SCRIPTS / "pretrain_with_outliers.py", *words))
    assert result.status == 0, result.output[-4000:]
    return result


def lines(result: Result) -> list[str]:
    return [line for line in result.output.splitlines() if "megatron-fp4: warning:" in line]


def zeros_of_w(folder: Path) -> list[tuple[int, str]]:
    """(step, layer) of the warnings about zeros of fprop's W."""
    found = kinds(read(folder), "warning")
    return [
        (each["step"], each["layer"])
        for each in found
        if (each["operand"], each["metric"]) == ("fprop.w", "zeros")
    ]


def test_a_weight_with_outliers_is_told_of(tmp_path: Path) -> None:
    result = with_outliers("--tensorboard-dir", str(tmp_path))
    assert zeros_of_w(tmp_path) == [(7, LAYER)]
    records = read(tmp_path)
    [warning] = [
        each
        for each in kinds(records, "warning")
        if (each["operand"], each["metric"]) == ("fprop.w", "zeros")
    ]
    [seen] = [
        each["metrics"]["zeros"]
        for each in kinds(records, "operand")
        if (each["step"], each["layer"], each["gemm"], each["operand"]) == (7, LAYER, "fprop", "w")
    ]
    assert warning["value"] == seen > 2 * warning["usual"]
    assert f"megatron-fp4: warning: {warning['line']}" in lines(result)
    shown = read_run(tmp_path).warnings[7, LAYER, "fprop.w", "zeros"]
    assert shown["line"] == warning["line"]


@pytest.mark.outside
def test_a_resumed_run_knows_what_was_usual(tmp_path: Path) -> None:
    saving = ["--save", str(tmp_path), "--save-interval", "6"]
    first = torchrun(1, *FLAGS, *SIX, *saving)
    assert first.status == 0 and lines(first) == []  # the control: nothing is unusual
    before = (tmp_path / "metrics.jsonl").read_text()
    with_outliers("--load", str(tmp_path), *saving, "--override-opt_param-scheduler")
    assert zeros_of_w(tmp_path) == [(7, LAYER)]
    # The control: a run that reads nothing has no band yet.
    other = tmp_path / "other"
    with_outliers("--load", str(tmp_path), "--ckpt-step", "6", "--tensorboard-dir", str(other),
                  "--override-opt_param-scheduler")  # fmt: skip
    assert before and zeros_of_w(other) == []


def test_reports_that_were_written_again_count_once(tmp_path: Path) -> None:
    def record(step: int, zeros: float) -> dict[str, object]:
        place = {"layer": "fc1", "gemm": "fprop", "operand": "w"}
        return {"kind": "operand", "step": step, **place, "metrics": {"zeros": zeros}}

    warning = {"kind": "warning", "step": 3, "layer": "fc1", "operand": "fprop.w"}
    path = tmp_path / "metrics.jsonl"
    append(path, [{"kind": "run", "step": 0}, *(record(step, 0.1) for step in range(1, 6))])
    append(path, [{"kind": "run", "step": 2}, record(3, 0.3), warning, {"kind": "step", "step": 3}])
    with path.open("a") as file:
        file.write(json.dumps(record(4, 0.5))[:-9])  # cut off
    found = [(each["kind"], each["step"], each.get("metrics")) for each in reports(path, 2, 4)]
    assert found == [
        ("operand", 2, {"zeros": 0.1}),
        ("warning", 3, None),
        ("operand", 3, {"zeros": 0.3}),
        ("operand", 4, {"zeros": 0.1}),
    ]
