"""What a run's launch is given, and what is read of its logs and metrics."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from benchmarks.study import results
from benchmarks.study.__main__ import UNFINISHED
from benchmarks.study.configuration import configuration, hash_of
from benchmarks.study.launching import Launch, averaged, curves, error_line
from benchmarks.study.matrix import Matrix, Point
from tools import runs
from tools.installed_text import Text

ROOT = Path(__file__).parents[3]
TEXT = {"sha256": "5e4f", "held_out": {"tokens": 30_000}}
MATRIX = Matrix("test", "a test", Text(2, 1024), [])
CONFIGURATION = configuration(MATRIX, Point("tetrajet", "tiny", 1e-3, 4, 1, 1), TEXT)
STEP = (
    " iteration {step:8d}/       4 | elapsed time per iteration (ms): {ms} | "
    "lm loss: {loss} | grad norm: {norm} |"
)
HELD_OUT = " validation loss at iteration {step} on validation set | lm loss value: {loss} | x"


def log(path: Path, *lines: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return path


def step(step: int, loss: float, norm: float = 0.5, ms: float = 10.0) -> str:
    return STEP.format(step=step, loss=loss, norm=norm, ms=ms)


def test_the_last_launch_counts_where_steps_were_repeated(tmp_path: Path) -> None:
    first = [step(1, 9.0), step(2, 8.0, 0.4, 90.0), step(3, 1.0)]
    second = [step(3, 7.0, ms=20.0), step(4, 6.0, float("nan")), HELD_OUT.format(step=4, loss=6.5)]
    found = curves([log(tmp_path / "1", *first), log(tmp_path / "2", *second)])
    assert found["train"] == [(1, 9.0), (2, 8.0), (3, 7.0), (4, 6.0)]
    assert found["grad_norms"] == [(1, 0.5), (2, 0.4), (3, 0.5)]  # NaN is no JSON
    assert found["held_out"] == [(4, 6.5)] and found["milliseconds"] == 10.0


def test_metrics_are_averaged_over_the_linears(tmp_path: Path) -> None:
    """What a resumed run wrote again counts; null is left out."""
    values: list[tuple[int, str, float | None]] = [
        (2, "a", 9.0), (2, "b", 3.0), (2, "a", 1.0), (4, "a", 5.0), (4, "b", None),
    ]  # fmt: skip
    lines = [
        json.dumps({"kind": "weight", "step": step, "layer": layer, "metrics": {"r": value}})
        for step, layer, value in values
    ]
    found = averaged(log(tmp_path / "metrics.jsonl", *lines))
    assert found == {"weight": {"r": [(2, 2.0), (4, 5.0)]}}


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (f"ValueError: {ROOT}/runs/x is bad", "ValueError: runs/x is bad"),
        (
            "FileNotFoundError: [Errno 2] No such file or directory: '/home/me/runs/x.pt'",
            "FileNotFoundError: [Errno 2] No such file or directory: 'x.pt'",
        ),
        ('File "/home/me/lib/a.py", line 3, in run', 'File "a.py", line 3, in run'),
        ("error: /mnt/b/c.h:12 (/tmp/d)", "error: c.h:12 (d)"),
        ("OSError: --load=/mnt/me/runs and /mnt/me", "OSError: --load=runs and me"),
        ("tcp://host:1/a, W/X, 3 / 4, ../b/c, ~/d, runs/*/e", None),
    ],
    ids=["the checkout", "quotes", "traceback", "list", "flag", "no absolute path"],
)
def test_an_error_line_has_no_path_of_the_machine(line: str, found: str | None) -> None:
    text = f"Traceback\n[rank0]: {line}\n\nThe launch failed (1); its log: /home/me/x.log"
    assert error_line(runs.RunFailed(text)) == f"[rank0]: {found or line}"


@pytest.mark.parametrize(
    ("message", "found"),
    [("the loss is nan", "the loss is nan"), ("\nThe launch failed (1); its log: x", "no output")],
)
def test_the_error_line_of_a_launch_without_output(message: str, found: str) -> None:
    """A message of one line is the reason; the last of several says how the launch ended."""
    assert error_line(runs.RunFailed(message)) == found


def pairs(flags: list[str]) -> list[list[str]]:
    return [flags[i : i + 2] for i in range(len(flags))]


def test_a_launch_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    launch = Launch(CONFIGURATION, tmp_path, tmp_path / "data", "0,1", 2)
    flags = launch.flags(None)
    # Of a flag that is given twice the last counts: GPUs share the batch, or the configuration
    # divides the model.
    assert flags[:2] == ["--tensor-model-parallel-size", "1"]
    assert flags[2 : 2 + len(CONFIGURATION["flags"])] == CONFIGURATION["flags"]
    assert "--load" not in flags and "--exit-duration-in-mins" not in flags
    assert ["--tensor-model-parallel-size", "2"] not in pairs(flags)
    saved = launch.folder / "checkpoints"
    log(saved / "latest_checkpointed_iteration.txt", "2")
    assert ["--load", str(saved)] in pairs(launch.flags(None))
    assert ["--exit-duration-in-mins", "8"] in pairs(launch.flags(9.0))


@pytest.mark.parametrize(
    ("lines", "status", "row"),
    [
        ([step(4, 6.0), HELD_OUT.format(step=4, loss=6.5)], 0, "finished"),
        ([step(4, 6.0), HELD_OUT.format(step=4, loss="nan")], 0, "failed"),
        ([step(2, 6.0), HELD_OUT.format(step=2, loss=6.5)], 0, None),
        ([step(2, 6.0), "exiting program after 3.0 minutes"], 0, None),
        ([step(2, 6.0), "[rank0]: RuntimeError: the reason"], 1, "failed"),
    ],
    ids=["finished", "NaN", "evaluated and stopped", "stopped", "raised"],
)
def test_how_a_launch_ended(
    lines: list[str], status: int, row: str | None, tmp_path: Path, monkeypatch: Any
) -> None:
    launch = Launch(CONFIGURATION, tmp_path, tmp_path / "data", "")
    content = "\n".join(lines)
    code = f"print({content!r}); raise SystemExit({status})"
    monkeypatch.setattr(runs, "launch", lambda processes, flags: [sys.executable, "-c", code])
    checkpoint = log(launch.folder / "checkpoints/iter", "weights")
    found = launch.run(None)
    assert (found and found["status"]) == row
    assert checkpoint.exists() == (row != "finished")
    if row == "failed":
        assert found is not None
        assert found["error"] in ("the held-out loss is nan", "[rank0]: RuntimeError: the reason")
    if row == "finished":
        assert found is not None and found["hash"] == hash_of(CONFIGURATION)
        assert found["held_out"] == [(4, 6.5)] and found["metrics"] == {}
        json.dumps(found, allow_nan=False)


# --- a real launch --------------------------------------------------------------------------------


def kill(process: subprocess.Popen[str]) -> None:
    """Ends a command and all that it started, as the loss of a machine does."""
    every = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    for each in every:
        each.kill()
    psutil.wait_procs(every, timeout=30)
    process.wait()


def start(folder: Path, name: str, steps: int, *more: str) -> subprocess.Popen[str]:
    """Runs a matrix of one run; its results are in NAME.jsonl."""
    block = {"recipes": ["tetrajet-ema"], "sizes": ["tiny"], "learning_rates": [4e-3]}
    runs: list[Any] = [block | {"steps": [steps], "seeds": [1]}]
    text = {"megabytes": 0.5, "vocabulary": 512}
    matrix = folder / "one.yaml"
    content = {"what": "a test", "text": text, "metrics_interval": 60, "runs": runs}
    matrix.write_text(yaml.safe_dump(content))
    words = [sys.executable, "-m", "benchmarks.study", "run", str(matrix), *more]
    words += ["--work", str(folder / name), "--results", str(folder / f"{name}.jsonl")]
    return subprocess.Popen(words, cwd=ROOT, text=True)


@pytest.mark.outside
def test_a_run_that_was_killed_goes_on_and_ends_as_if_it_was_not(tmp_path: Path) -> None:
    killed = start(tmp_path, "killed", 120)
    deadline = time.monotonic() + 300
    while not list((tmp_path / "killed").glob("*/checkpoints/latest_checkpointed_iteration.txt")):
        assert killed.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    kill(killed)
    assert results.read(tmp_path / "killed.jsonl") == []
    for name in ("killed", "whole"):
        assert start(tmp_path, name, 120).wait() == 0
    [resumed], [whole] = (results.read(tmp_path / f"{name}.jsonl") for name in ("killed", "whole"))
    for key in ("hash", "configuration", "text", "held_out"):
        assert resumed[key] == whole[key], key
    # Megatron reports the first step after a start too, so that the next mean is of fewer steps.
    found, expected = dict(resumed["train"]), dict(whole["train"])
    assert found.keys() - expected.keys() == {51}
    assert {step for step in expected if found[step] != expected[step]} <= {52}
    assert resumed["metrics"]["fprop.w"] == whole["metrics"]["fprop.w"]
    [log] = (tmp_path / "killed").glob("*/train-02.log")
    [steps] = [re.findall(r"iteration +(\d+)/ +120 ", log.read_text())]
    assert int(steps[0]) in (51, 52)  # not from the start
    assert whole["train"][0][1] > whole["train"][-1][1] + 0.5  # it learned
    assert start(tmp_path, "whole", 120).wait() == 0
    assert len(results.read(tmp_path / "whole.jsonl")) == 1


@pytest.mark.outside
def test_a_run_that_is_longer_than_the_command_may_last_is_left(tmp_path: Path) -> None:
    assert start(tmp_path, "long", 5000, "--minutes", "2").wait() == UNFINISHED
    assert results.read(tmp_path / "long.jsonl") == []
    assert list((tmp_path / "long").glob("*/checkpoints/latest_checkpointed_iteration.txt"))
