"""--fp4-metrics-interval: against numpy in float64 over all tensors of a small run, by layout."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_fp4.mcore.loop.metrics_log import append, log_record
from testing.worlds.checkpoints import EP2, MOE, PP2, SMALL, TP2_SP, same, told
from testing.worlds.launch import SCRIPTS, Result, result_of, spawn, tiny_on_mock_data, torchrun
from testing.worlds.metrics import (
    Whole,
    gradients_by_numpy,
    kinds,
    operand_by_numpy,
    read,
    weight_by_numpy,
)

RECORDING = SCRIPTS / "pretrain_recording_operands.py"
BF16, FP16 = "--bf16", "--fp16 --initial-loss-scale 1024"
FLAGS = f"{SMALL} {BF16} --fp4-recipe tetrajet"
PLAIN = f"{SMALL} {BF16}"  # no recipe
EVERY_2 = "--fp4-metrics-interval 2"
LAYOUTS = {
    "one": (1, ""),
    "tp2": (2, TP2_SP),
    "tp2-no-sp": (2, "--tensor-model-parallel-size 2"),
    "pp2": (2, PP2),
    "dp2": (2, ""),
    "dp2-sharded": (2, "--use-distributed-optimizer"),
    "tp2-pp2": (4, f"{TP2_SP} {PP2}"),
    "vpp": (2, f"{PP2} --num-layers 4 --num-layers-per-virtual-pipeline-stage 1"),
    "experts": (1, MOE),
    "experts-dp2": (2, MOE),
    "ep2": (2, f"{MOE} {EP2}"),
    "recomputed": (1, "--recompute-granularity full --recompute-method uniform"
                      " --recompute-num-layers 1"),
    "recomputed-mlp": (1, "--recompute-granularity selective --recompute-modules mlp"),
    "recomputed-pp2": (2, f"{PP2} --recompute-granularity full --recompute-method uniform"
                          " --recompute-num-layers 1"),
    "fp16": (1, FP16),
    "fp16-sharded": (2, f"{FP16} --use-distributed-optimizer"),
    "tied": (1, ""),
    "tied-pp2": (2, PP2),
}  # fmt: skip


def slow(*names: str) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.outside) for name in names]


# --- against numpy --------------------------------------------------------------------------------


def run(name: str, folder: Path, script: Path = RECORDING) -> Result:
    processes, flags = LAYOUTS[name]
    saving = f"--save {folder} --save-interval 1000 --eval-iters 1 --eval-interval 4"
    saving += " --save-wgrads-interval 2"
    common = FLAGS.replace(BF16, "") if "fp16" in name else FLAGS
    words = tiny_on_mock_data(*f"{common} {flags} {EVERY_2} {saving}".split())
    if "tied" in name:
        words.remove("--untie-embeddings-and-output-weights")
    return result_of(spawn(processes, script, str(folder / "operands"), *words))


@pytest.mark.parametrize("name", ["one", *slow(*list(LAYOUTS)[1:])])
def test_the_metrics_of_a_run_are_those_of_numpy(name: str, tmp_path: Path) -> None:
    result = run(name, tmp_path)
    assert result.status == 0, result.output[-4000:]
    whole, records = Whole(tmp_path / "operands"), read(tmp_path)
    operands = kinds(records, "operand")
    assert {(r["step"], r["layer"], r["gemm"], r["operand"]) for r in operands} == {
        key for key in whole.operands if key[0] in (2, 4)
    }
    for record in operands:
        key = (record["step"], record["layer"], record["gemm"], record["operand"])
        expected, found = operand_by_numpy(whole.operands[key]), record["metrics"]
        assert found.pop("scales") == expected.pop("scales"), key
        for metric in [name for name, value in expected.items() if value is None]:
            assert found.pop(metric) is expected.pop(metric), key
        assert found == pytest.approx(expected, rel=1e-9, abs=0), key
    for record in kinds(records, "weight"):
        step = record["step"]
        steps = [1, 2] if step == 2 else [1, 2, 3, 4]
        expected, found = (
            weight_by_numpy(whole, record["layer"], steps, step),
            record["metrics"],
        )
        assert found.pop("confidences") == expected.pop("confidences")
        assert found == pytest.approx(expected, rel=1e-9)
    stages, scale = 2 if PP2 in LAYOUTS[name][1] else 1, 1024 if "fp16" in name else 1
    gradients = gradients_by_numpy(tmp_path, stages, scale)
    for record in kinds(records, "gradient"):
        gradient, found = gradients[record["step"], record["layer"]], record["metrics"]
        dy = operand_by_numpy(whole.operands[record["step"], record["layer"], "wgrad", "dy"])
        expected = {"norm": np.linalg.norm(gradient), "zeros": (gradient == 0).mean()}
        assert found == pytest.approx(expected | {"underflow": dy["underflow"]}, rel=1e-9)
    linears = len({layer for _, layer, _, _ in whole.operands})
    assert linears == (16 if name == "vpp" else 8)
    assert len(kinds(records, "weight")) == len(kinds(records, "gradient")) == 2 * linears


@pytest.mark.parametrize("name", ["one", *slow("tp2", "dp2", "pp2")])
def test_of_large_operands_some_lines_are_counted(name: str, tmp_path: Path) -> None:
    """Every n-th line of the unsharded operand, whichever rank and microbatch has it."""
    result = run(name, tmp_path, SCRIPTS / "pretrain_recording_samples.py")
    assert result.status == 0, result.output[-4000:]
    whole, other = Whole(tmp_path / "operands"), 0
    for record in kinds(read(tmp_path), "operand"):
        key = (record["step"], record["layer"], record["gemm"], record["operand"])
        every, found = whole.operands[key], record["metrics"]
        sample = {name: _lines(matrix, *key[2:]) for name, matrix in every.items()}
        assert sample["exact"].size < every["exact"].size
        expected = operand_by_numpy(sample)
        assert found.pop("scales") == expected.pop("scales"), key
        known = {name: value for name, value in expected.items() if value is not None}
        assert {name: found[name] for name in known} == pytest.approx(known, rel=1e-9), key
        other += found["gain"] != pytest.approx(operand_by_numpy(every)["gain"], rel=1e-9)
    assert other > 50  # the control: all lines together have other numbers


def _lines(matrix: np.ndarray, gemm: str, letter: str) -> np.ndarray:
    blocked = 0 if gemm == "wgrad" or (gemm, letter) == ("dgrad", "w") else 1
    microbatches = 1 if letter == "w" else 2
    stride = -(-matrix.size // microbatches // 1024)
    return matrix.take(range(0, matrix.shape[1 - blocked], stride), axis=1 - blocked)


# --- layouts and other runs -----------------------------------------------------------------------


def by_place(folder: Path) -> dict[str, dict[str, Any]]:
    """The metrics of a run, by what they are of."""
    found = {}
    for record in read(folder):
        if "metrics" in record:
            metrics = record.pop("metrics")
            found[json.dumps(record)] = metrics
    return found


@pytest.mark.outside
@pytest.mark.parametrize("name", ["dp2", "dp2-sharded"])
def test_data_parallel_runs_have_the_numbers_of_one_process(name: str, tmp_path: Path) -> None:
    """Their losses are the same bit for bit, so everything is; the reduced gradients too, of which
    the ranks of the distributed optimizer have parts. But for dY: it is divided by the number of a
    rank's microbatches, here 2 in one process and 1 in two."""
    (processes, flags), one, other = LAYOUTS[name], tmp_path / "one", tmp_path / "other"
    losses = []
    for count, folder, own in ((1, one, ""), (processes, other, flags)):
        words = f"{FLAGS} {EVERY_2} --tensorboard-dir {folder} {own}".split()
        result = torchrun(count, *words)
        assert result.status == 0, result.output[-4000:]
        losses.append(result.losses)
    found, expected = by_place(other), by_place(one)
    assert losses[0] == losses[1] and found.keys() == expected.keys() and found
    for key, metrics in expected.items():
        if json.loads(key).get("operand") == "dy":
            metrics["scales"]["first"] += 1
        histograms = {name for name in metrics if name in ("scales", "confidences")}
        assert all(found[key].pop(name) == metrics.pop(name) for name in histograms)
        assert found[key] == pytest.approx(metrics, rel=1e-9)


def test_a_run_is_the_same_with_and_without(tmp_path: Path) -> None:
    results = {}
    for steps in (1, 0):
        folder = tmp_path / str(steps)
        flags = f"{FLAGS} --fp4-metrics-interval {steps} --save {folder} --save-interval 4"
        results[steps] = torchrun(1, *flags.split())
        assert results[steps].status == 0, results[steps].output[-4000:]
    assert results[0].losses == results[1].losses and len(results[0].losses) == 4
    assert same(tmp_path / "0/iter_0000004", tmp_path / "1/iter_0000004")
    assert not (tmp_path / "0/metrics.jsonl").exists()
    records = read(tmp_path / "1")
    first, logged = records[0], kinds(records, "step")
    assert (first["kind"], first["version"], first["recipe"]) == ("run", 1, "tetrajet")
    assert first["lines"][0].startswith("megatron-fp4: recipe tetrajet")
    assert first["arguments"]["num_layers"] == 2 and first["environment"]["ranks"] == 1
    assert [r["loss"] for r in logged] == results[1].losses
    assert {(r["step"], r["tokens"]) for r in logged} == {(n, 4 * 64) for n in range(1, 5)}
    assert {r["step"] for r in kinds(records, "operand")} == {1, 2, 3, 4}


def test_nothing_is_written_without_a_folder() -> None:
    told_of = "--fp4-metrics-interval writes nothing: add --save or --tensorboard-dir"
    for flags, told_so in ((f"{FLAGS} {EVERY_2}", 1), (FLAGS, 0), (f"{PLAIN} {EVERY_2}", 1)):
        output = torchrun(1, *f"{flags} --train-iters 1".split()).output
        assert output.count(told_of) == told_so


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_without_a_recipe_steps_and_evaluations_are_written(processes: int, tmp_path: Path) -> None:
    """On two ranks, which are two stages, the last has the loss."""
    layout = PP2 if processes == 2 else ""
    flags = f"{PLAIN} {layout} --eval-iters 1 --eval-interval 2 --tensorboard-dir {tmp_path}"
    plain = torchrun(processes, *flags.split())
    assert plain.status == 0 and not (tmp_path / "metrics.jsonl").exists()
    result = torchrun(processes, *f"{flags} --fp4-metrics-interval 3".split())
    assert result.output.count("metrics.jsonl") == 1
    line = f"steps and evaluations go to {tmp_path}/metrics.jsonl; a recipe adds the metrics"
    assert f"megatron-fp4: {line} of linears\n" in result.output
    records = read(tmp_path)
    assert [r["kind"] for r in records[:2]] == ["run", "step"]
    first = records[0]
    assert first["recipe"] is None and first["arguments"]["fp4_metrics_interval"] == 3
    assert first["lines"] == ["megatron-fp4: no recipe (--fp4-recipe): linears run in BF16"]
    evaluations = [(r["step"], r["loss"]) for r in kinds(records, "evaluation")]
    steps = [(r["step"], r["loss"]) for r in kinds(records, "step")]
    assert len(records) == 1 + len(steps) + len(evaluations)
    assert result.losses == plain.losses and len(steps) == 4
    assert steps == list(enumerate(result.losses, 1))
    # The last evaluation of the log is of the test set.
    assert evaluations == list(zip((2, 4, 4), result.evaluations[:-1], strict=True))


def test_a_resumed_run_without_a_recipe_goes_on_in_the_file(tmp_path: Path) -> None:
    flags = f"{PLAIN} --save {tmp_path} --save-interval 2 {EVERY_2}"
    assert torchrun(1, *f"{flags} --exit-interval 2".split()).status == 0
    resumed = torchrun(1, *f"{flags} --load {tmp_path}".split())
    assert resumed.status == 0, resumed.output[-4000:]
    found = [(r["kind"], r["step"]) for r in read(tmp_path)]
    steps = [[("step", number) for number in numbers] for numbers in ((1, 2), (3, 4))]
    assert found == [("run", 0), *steps[0], ("run", 2), *steps[1]]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (f"{SMALL} --bf16 --fp4-metrics-interval -1", "give a number of at least 0"),
        (f"{FLAGS} --fp4-metrics-interval -1", "give a number of at least 0"),
        (f"{FLAGS} {EVERY_2} --cuda-graph-impl local", "does not go with --fp4-metrics-interval 2"),
    ],
)
def test_what_cannot_be_measured_is_refused(flags: str, says: str) -> None:
    assert says in told(torchrun(1, *flags.split()))


# --- lines and files ------------------------------------------------------------------------------

LINE = (
    " [2026-01-01 00:00:00.000000] iteration       10/   50010 | consumed samples:           40 | "
    "elapsed time per iteration (ms): 1500.0 | learning rate: 1.000000E-04 | global batch size:"
    "     4 | lm loss: 6.000000E+00 | loss scale: 1.0 | grad norm: 0.778 | "
)


def test_lines_of_the_log() -> None:
    assert log_record(LINE, 64) == {
        "kind": "step",
        "step": 10,
        "loss": 6.0,
        "grad_norm": 0.778,
        "learning_rate": 1e-4,
        "seconds": 1.5,
        "tokens": 256,
    }
    first_stage = log_record(LINE.replace(" lm loss: 6.000000E+00 |", ""), 64)
    assert first_stage is not None and first_stage["loss"] is None
    validation = (
        " validation loss at iteration 8{} | lm loss value: 5.5E+00 | lm loss PPL: 2E+02 | "
    )
    for where in ("", " on validation set"):
        record = log_record(validation.format(where), 64)
        assert record == {"kind": "evaluation", "step": 8, "loss": 5.5}
    for other in (validation.format(" on test set"), "-" * 40, "(min, max) time across ranks"):
        assert log_record(other, 64) is None


def test_a_line_that_was_cut_off_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "new" / "metrics.jsonl"
    append(path, [{"kind": "step", "loss": math.nan, "path": Path("x")}])
    whole = path.read_text()
    assert json.loads(whole) == {"kind": "step", "loss": None, "path": "x"}
    path.write_text(whole + '{"kind": "st')
    append(path, [{"kind": "evaluation"}])
    assert path.read_text() == whole + '{"kind": "evaluation"}\n'
    path.write_text('{"kind"')
    append(path, [{"kind": "run"}])
    assert path.read_text() == '{"kind": "run"}\n'
