"""What a run launches: its commands, environments and logs; what it keeps of them."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from benchmarks.study.configuration import configuration
from benchmarks.study.launching import Launch, curves
from benchmarks.study.matrix import Matrix, Point
from megatron_fp4.metrics.weights import window
from tools import runs
from tools.installed_text import Text

TEXT = {"sha256": "5e4f", "held_out": {"tokens": 30_000}}
MATRIX = Matrix("test", "a test", Text(2, 1024), [], metrics_interval=60)
EVALUATED = Matrix("test", "a test", Text(2, 1024), [], evaluate_in=["bf16", "mxfp4"])
POINT = Point("tetrajet", "tiny", 1e-3, 4, 1, 1)


def trained(step: int, ms: float = 10.0, loss: float = 6.0, norm: float = 0.5) -> str:
    return (
        f" iteration {step:8d}/       4 | elapsed time per iteration (ms): {ms} | "
        f"lm loss: {loss} | grad norm: {norm} |"
    )


def held_out(step: int, loss: float) -> str:
    return f" validation loss at iteration {step} on validation set | lm loss value: {loss} | x"


ALL_STEPS = [*map(trained, range(1, 5)), held_out(4, 6.5)]


@dataclass
class Recorder:
    """Takes the place of launches, of which it keeps what they were given. outputs: the lines of
    each launch's log, in turn. seconds: that each launch takes, of the time in `now`."""

    outputs: list[list[str]]
    seconds: float = 0.0
    now: float = 1000.0
    processes: list[int] = field(default_factory=list)
    flags: list[list[str]] = field(default_factory=list)
    paths: list[Path] = field(default_factory=list)
    environments: list[Mapping[str, str]] = field(default_factory=list)

    def launch(self, processes: int, flags: list[str]) -> list[str]:
        self.processes.append(processes)
        self.flags.append(flags)
        return ["command", *flags]

    def run(self, command: list[str], path: Path, *, environment: Mapping[str, str]) -> runs.Log:
        assert command == ["command", *self.flags[-1]]
        self.paths.append(path)
        self.environments.append(environment)
        self.now += self.seconds
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = self.outputs[len(self.paths) - 1]
        path.write_text("\n".join(lines) + "\n")
        log = runs.Log()
        for line in lines:
            log.read(line)
        if not log.held_out:
            raise runs.RunFailed(f"{lines[-1]}\nThe launch failed")
        return log


def record(monkeypatch: pytest.MonkeyPatch, *outputs: list[str], seconds: float = 0.0) -> Recorder:
    recorder = Recorder([*outputs], seconds)
    monkeypatch.setattr(runs, "launch", recorder.launch)
    monkeypatch.setattr(runs, "run", recorder.run)
    monkeypatch.setattr(time, "monotonic", lambda: recorder.now)
    return recorder


def launch_of(folder: Path, matrix: Matrix = MATRIX, devices: str = "2,3") -> Launch:
    return Launch(configuration(matrix, POINT, TEXT), folder, folder / "data", devices, 2)


def save(launch: Launch, step: int) -> Path:
    """What Megatron leaves of a checkpoint of `step`."""
    folder = launch.folder / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "latest_checkpointed_iteration.txt").write_text(str(step))
    return folder


def value(flags: list[str], name: str) -> str:
    assert flags.count(name) == 1, name
    return flags[flags.index(name) + 1]


# --- commands -------------------------------------------------------------------------------------


def test_every_launch_has_the_processes_the_devices_and_a_cache_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = record(monkeypatch, ALL_STEPS, [held_out(4, 6.6)], [held_out(4, 6.7)])
    launch = launch_of(tmp_path, EVALUATED)
    found = launch.run(None)
    assert found is not None and found["evaluated"] == {"bf16": 6.6, "mxfp4": 6.7}
    assert recorder.processes == [2, 2, 2] and found["processes"] == 2
    environment = {"CUDA_VISIBLE_DEVICES": "2,3", "OMP_NUM_THREADS": "1"}
    assert recorder.environments == [environment] * 3
    for flags in recorder.flags:
        assert value(flags, "--data-cache-path") == str(launch.folder / "cache")
        assert value(flags, "--train-data-path") == str(tmp_path / "data/train_text_document")
    names = ["train-01.log", "evaluation-01.log", "evaluation-02.log"]
    assert recorder.paths == [launch.folder / name for name in names]


def test_evaluations_load_the_model_and_the_training_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = record(monkeypatch, ALL_STEPS, [held_out(4, 6.6)], [held_out(4, 6.7)])
    launch = launch_of(tmp_path, EVALUATED)
    launch.run(None)
    training, *evaluations = recorder.flags
    saved = str(launch.folder / "checkpoints")
    assert "--load" not in training and value(training, "--save") == saved
    for flags in evaluations:
        assert value(flags, "--load") == saved
        assert "--skip-train" in flags and "--save" not in flags


def test_each_launch_has_a_log_of_its_own_and_the_row_is_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = [trained(1, 30.0, 9.0), held_out(1, 8.9), trained(2, 30.0, 8.0)]
    second = [trained(2, 10.0, 7.5), trained(3, 10.0), trained(4, 10.0), held_out(4, 6.5)]
    recorder = record(monkeypatch, first, second)
    launch = launch_of(tmp_path)
    assert launch.run(9.0) is None
    assert (launch.folder / "train-01.log").read_text().splitlines() == first
    found = launch.run(9.0)
    assert [path.name for path in recorder.paths] == ["train-01.log", "train-02.log"]
    assert found is not None and found["held_out"] == [(1, 8.9), (4, 6.5)]
    assert found["train"] == [(1, 9.0), (2, 7.5), (3, 6.0), (4, 6.0)]
    assert found["milliseconds"] == 10.0


def test_the_order_of_more_than_99_launches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mistake: train-100.log comes before train-11.log."""
    launch = launch_of(tmp_path)
    launch.folder.mkdir()
    for number in range(1, 100):
        (launch.folder / f"train-{number:02}.log").write_text(trained(1, loss=9.0))
    (launch.folder / "train-100.log").write_text(trained(1, loss=7.0))
    recorder = record(monkeypatch, [trained(4), held_out(4, 6.5)])
    found = launch.run(None)
    assert found is not None and found["train"] == [(1, 7.0), (4, 6.0)]
    assert recorder.paths == [launch.folder / "train-101.log"]


def test_the_window_and_the_metrics_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Metrics are beside the checkpoint, which is removed: they stay in the run's folder."""
    record(monkeypatch, ALL_STEPS)
    launch = launch_of(tmp_path)
    line = {"kind": "weight", "step": 2, "layer": "a", "metrics": {"r": 3.0}}
    content = json.dumps(line) + "\n"
    saved = save(launch, 2)
    (saved / "metrics.jsonl").write_text(content)
    found = launch.run(None)
    assert found is not None and found["metrics"] == {"weight": {"r": [(2, 3.0)]}}
    assert not saved.exists() and (launch.folder / "metrics.jsonl").read_text() == content
    assert found["window"] == window(60) > 0
    plain = configuration(MATRIX, POINT._replace(recipe="bf16", rounding_seed=None), TEXT)
    record(monkeypatch, ALL_STEPS)
    unmeasured = Launch(plain, tmp_path, tmp_path / "data", "", 1).run(None)
    assert unmeasured is not None
    assert unmeasured["window"] == 0 and unmeasured["metrics"] == {}


# --- figures --------------------------------------------------------------------------------------


def test_an_evaluation_is_not_a_step(tmp_path: Path) -> None:
    """The mistake: the time of the step before it counts once more."""
    path = tmp_path / "log"
    lines = [trained(1, 10.0), trained(2, 90.0), held_out(2, 7.0), trained(3, 10.0)]
    lines += [trained(4, 90.0), held_out(4, 6.5), held_out(4, 6.5)]
    path.write_text("\n".join(lines))
    assert curves([path])["milliseconds"] == 50.0


def test_points_that_are_not_finite_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row is JSON, which has no NaN. The loss of the last step alone decides about a run."""
    nan = math.nan
    lines = [trained(1), held_out(1, nan), trained(2, loss=nan, norm=nan), held_out(2, math.inf)]
    record(monkeypatch, [*lines, trained(3), trained(4), held_out(4, 6.5)])
    found = launch_of(tmp_path).run(None)
    assert found is not None and found["held_out"] == [(4, 6.5)]
    assert found["train"] == [(1, 6.0), (3, 6.0), (4, 6.0)]
    assert found["grad_norms"] == [(1, 0.5), (3, 0.5), (4, 0.5)]
    json.dumps(found, allow_nan=False)


# --- evaluations ----------------------------------------------------------------------------------


def test_a_loss_of_an_evaluation_that_is_not_finite_fails_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second try makes this evaluation again, and no other launch."""
    outputs = ALL_STEPS, [held_out(4, 6.6)], [held_out(4, math.nan)], [held_out(4, 6.7)]
    recorder = record(monkeypatch, *outputs)
    launch = launch_of(tmp_path, EVALUATED)
    found = launch.run(None)
    assert found is not None and found["status"] == "failed"
    assert found["error"] == "the held-out loss in mxfp4 is nan"
    save(launch, 4)
    again = launch.run(None)
    assert again is not None and again["evaluated"] == {"bf16": 6.6, "mxfp4": 6.7}
    assert [path.name for path in recorder.paths][3:] == ["evaluation-02.log"]


def test_no_evaluation_begins_after_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call goes on with what is left, on the model that was trained."""
    outputs = ALL_STEPS, [held_out(4, 6.6)], [held_out(4, 6.7)]
    recorder = record(monkeypatch, *outputs, seconds=120.0)
    launch = launch_of(tmp_path, EVALUATED)
    saved = save(launch, 4)
    assert launch.run(2.0) is None and len(recorder.paths) == 1 and saved.exists()
    assert launch.run(2.0) is None and len(recorder.paths) == 2 and saved.exists()
    found = launch.run(2.0)  # an evaluation that has begun ends
    names = ["train-01.log", "evaluation-01.log", "evaluation-02.log"]
    assert [path.name for path in recorder.paths] == names and not saved.exists()
    assert found is not None and found["evaluated"] == {"bf16": 6.6, "mxfp4": 6.7}
    assert found["held_out"] == [(4, 6.5)]


def test_a_model_that_is_trained_anew_is_evaluated_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the rows of a finished run were deleted: its logs are there, its model is not."""
    evaluations = [held_out(4, 6.6)], [held_out(4, 6.7)]
    stopped = [trained(1), held_out(1, 9.0), trained(2), "exiting program after 1.0 minutes"]
    again = [held_out(4, 5.6)], [held_out(4, 5.7)]
    record(monkeypatch, ALL_STEPS, *evaluations, stopped, ALL_STEPS, *again)
    launch = launch_of(tmp_path, EVALUATED)
    first = launch.run(None)
    assert first is not None and first["status"] == "finished"
    assert launch.run(2.0) is None  # the last step in the first model's log does not count
    found = launch.run(None)
    assert found is not None and found["evaluated"] == {"bf16": 5.6, "mxfp4": 5.7}
