"""A study goes on where it was interrupted; failures are recorded and not tried for ever."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.study import __main__ as command
from benchmarks.study import results, running
from benchmarks.study.configuration import hash_of
from benchmarks.study.errors import StudyError
from benchmarks.study.launching import Launch
from benchmarks.study.matrix import Block, Matrix
from benchmarks.study.running import Machine, Session
from tools import installed_text
from tools import rows as rows_file
from tools.installed_text import Text

TEXT = {"sha256": "5e4f", "held_out": {"tokens": 30_000}}


def matrix(**block: Any) -> Matrix:
    values: dict[str, Any] = {
        "learning_rates": [1e-3],
        "steps": [60],
        "seeds": [1, 2],
        "sizes": ["tiny"],
    }
    values |= {"recipes": ["bf16", "tetrajet"]} | block
    chosen = Block(**values)
    return Matrix("test", "a test", Text(2, 1024), [chosen])


class StandIn:
    """Takes the place of launches. fails: recipes whose runs fail. unfinished: how often a run ends
    before it is finished."""

    def __init__(self, fails: tuple[str, ...] = (), unfinished: int = 0) -> None:
        self.launched: list[str] = []
        self.devices: list[str] = []
        self.minutes: list[float | None] = []
        self._fails, self._unfinished = fails, unfinished
        self._lock = threading.Lock()

    def __call__(self, launch: Launch, minutes: float | None) -> results.Row | None:
        name = hash_of(launch.configuration)
        with self._lock:
            self.launched.append(name)
            self.devices.append(launch.devices)
            self.minutes.append(minutes)
        row = {"hash": name, "configuration": launch.configuration}
        if self.launched.count(name) <= self._unfinished:
            return None
        if launch.configuration["recipe"] in self._fails:
            return row | {"status": "failed", "error": "RuntimeError: the reason"}
        return row | {"status": "finished", "held_out": [[60, 4.0]], "metrics": {}}


def session(folder: Path, run: running.Runner, minutes: float | None = None) -> Session:
    deadline = None if minutes is None else time.monotonic() + 60 * minutes
    stamp = {"commit": "c0ffee"}
    path = folder / "r.jsonl"
    return Session(path, folder, folder, stamp, TEXT, deadline, run, say=lambda line: None)


def test_a_finished_run_is_not_run_again_and_a_changed_one_is(tmp_path: Path) -> None:
    first, second, third = StandIn(), StandIn(), StandIn()
    session(tmp_path, first).train(matrix(), Machine(()))
    assert len(first.launched) == 4
    session(tmp_path, second).train(matrix(), Machine(()))
    assert second.launched == []
    session(tmp_path, third).train(matrix(seeds=[2, 3], recipes=["tetrajet"]), Machine(()))
    assert len(third.launched) == 1
    rows = results.read(tmp_path / "r.jsonl")
    assert [row["hash"] for row in rows] == first.launched + third.launched
    assert all(row["stamp"] == {"commit": "c0ffee"} and row["text"] == TEXT for row in rows)


def test_an_unfinished_run_has_no_row_and_is_run_again(tmp_path: Path) -> None:
    run = StandIn(unfinished=3)
    once = session(tmp_path, run)
    once.train(matrix(seeds=[1]), Machine(()))
    assert results.read(tmp_path / "r.jsonl") == []
    assert len(once.left(matrix(seeds=[1]))) == 2 and once.failures(matrix(seeds=[1])) == []
    session(tmp_path, run).train(matrix(seeds=[1]), Machine(()))
    assert Counter(run.launched).most_common(1)[0][1] == 4
    assert session(tmp_path, run).left(matrix(seeds=[1])) == []


def test_a_failed_run_is_tried_twice_and_then_no_more(tmp_path: Path) -> None:
    run = StandIn(fails=("tetrajet",))
    for _ in range(3):
        session(tmp_path, run).train(matrix(seeds=[1]), Machine(()))
    assert sorted(Counter(run.launched).values()) == [1, 2]
    found = session(tmp_path, run)
    [row] = found.failures(matrix(seeds=[1]))
    assert row["error"] == "RuntimeError: the reason" and found.left(matrix(seeds=[1])) == []
    assert found.failures(matrix(seeds=[2])) == []  # of other matrices in the same file
    recovered = StandIn()
    (tmp_path / "r.jsonl").write_text(json.dumps(row) + "\n")  # one failure: there is another try
    session(tmp_path, recovered).train(matrix(seeds=[1]), Machine(()))
    assert session(tmp_path, recovered).failures(matrix(seeds=[1])) == []


def test_no_run_is_started_near_the_deadline(tmp_path: Path) -> None:
    late, early = StandIn(), StandIn()
    session(tmp_path, late, minutes=1.4).train(matrix(), Machine(()))
    assert late.launched == []
    session(tmp_path, early, minutes=3).train(matrix(), Machine(()))
    assert all(minutes is not None and 2.9 < minutes <= 3 for minutes in early.minutes)
    assert len(early.minutes) == 4


def test_an_interrupt_is_not_a_failure(tmp_path: Path) -> None:
    """Ctrl-C ends the launches too, which then seem to have failed."""
    failing = StandIn(fails=("tetrajet",))

    def run(launch: Launch, minutes: float | None) -> results.Row | None:
        if launch.configuration["recipe"] == "bf16":
            raise KeyboardInterrupt
        time.sleep(0.2)
        return failing(launch, minutes)

    with pytest.raises(KeyboardInterrupt):
        session(tmp_path, run).train(matrix(), Machine((), at_once=2))
    assert results.read(tmp_path / "r.jsonl") == []


def test_a_run_that_finishes_after_the_error_of_another_is_kept(tmp_path: Path) -> None:
    """Its checkpoints are gone by then: it could not be continued."""
    finishing, started = StandIn(), threading.Event()

    def run(launch: Launch, minutes: float | None) -> results.Row | None:
        if launch.configuration["recipe"] == "bf16":
            assert started.wait(30)
            raise ValueError("no disk")
        started.set()
        time.sleep(0.2)
        return finishing(launch, minutes)

    with pytest.raises(ValueError, match="no disk"):
        session(tmp_path, run).train(matrix(seeds=[1]), Machine((), at_once=2))
    [row] = results.read(tmp_path / "r.jsonl")
    assert row["status"] == "finished"


# --- the machine ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpus", "size", "places"),
    [
        (0, "60M", [""]),
        (1, "26M", ["0"]),
        (8, "26M", [str(i) for i in range(8)]),
        (1, "60M", ["0"]),
        (3, "60M", ["0,1"]),
        (4, "60M", ["0,1,2,3"]),
        (8, "60M", ["0,1,2,3", "4,5,6,7"]),
    ],
)
def test_where_runs_are_placed(gpus: int, size: str, places: list[str]) -> None:
    machine = Machine([*map(str, range(gpus))])
    assert machine.places(machine.processes(size)) == places


def test_runs_of_a_number_of_ranks(tmp_path: Path) -> None:
    """On that many GPUs each, or on the CPU; too few GPUs are an error."""
    for gpus, places in ((0, [""]), (2, ["0,1"]), (5, ["0,1", "2,3"])):
        machine = Machine([*map(str, range(gpus))])
        assert machine.processes("tiny", 2) == 2 and machine.places(2) == places
    two = replace(matrix(), ranks=2)
    stand_in = StandIn()
    session(tmp_path, stand_in).train(two, Machine(["0", "1"]))
    assert stand_in.devices == ["0,1"] * 4
    with pytest.raises(StudyError, match="a run needs 2 GPUs, and 1 are visible"):
        session(tmp_path / "few", stand_in).train(two, Machine(["0"]))


@pytest.mark.parametrize(
    ("flags", "ranks", "places"),
    [
        ("", 0, ["0", "1", "2", "3"]),
        ("--tensor-model-parallel-size 2 --sequence-parallel", 0, ["0,1", "2,3"]),
        ("--pipeline-model-parallel-size 2", 0, ["0,1", "2,3"]),
        ("--pipeline-model-parallel-size=2", 0, ["0,1", "2,3"]),
        ("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", 0, ["0,1,2,3"]),
        ("--pipeline-model-parallel-size 2", 2, ["0,1,2,3"]),
    ],
)
def test_a_model_that_is_divided_takes_more_gpus(
    flags: str, ranks: int, places: list[str], tmp_path: Path
) -> None:
    """Tensor and pipeline parallelism are flags of a recipe; ranks are copies of the model."""
    block = replace(matrix().runs[0], recipes=[f"tetrajet {flags}"])
    stand_in = StandIn()
    asked = replace(matrix(), runs=[block], ranks=ranks)
    session(tmp_path, stand_in).train(asked, Machine([*"0123"]))
    assert set(stand_in.devices) <= set(places) and places[0] in stand_in.devices


def test_one_run_a_gpu_at_a_time(tmp_path: Path) -> None:
    busy: Counter[str] = Counter()
    most: Counter[str] = Counter()
    stand_in = StandIn()

    def run(launch: Launch, minutes: float | None) -> results.Row | None:
        busy[launch.devices] += 1
        most[launch.devices] = max(most[launch.devices], busy[launch.devices])
        time.sleep(0.02)
        busy[launch.devices] -= 1
        return stand_in(launch, minutes)

    session(tmp_path, run).train(matrix(seeds=list(range(8))), Machine([*"0123"]))
    assert most == dict.fromkeys("0123", 1)
    assert len(results.read(tmp_path / "r.jsonl")) == 16


# --- the result file ------------------------------------------------------------------------------


def test_a_row_that_was_cut_off_is_left_out_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "new" / "r.jsonl"
    of = [{"seed": seed} for seed in range(3)]
    rows = [{"hash": hash_of(each), "status": "finished", "configuration": each} for each in of]
    for row in rows[:2]:
        rows_file.append(path, row)
    path.write_bytes(path.read_bytes() + b'{"hash": "2", "sta')
    assert results.read(path) == rows[:2]
    rows_file.append(path, rows[2])
    assert results.read(path) == rows
    path.write_text("{}\n")
    with pytest.raises(StudyError, match="r.jsonl:1 lacks configuration, hash, status"):
        results.read(path)


# --- the command ----------------------------------------------------------------------------------


def main(folder: Path, run: Any, monkeypatch: pytest.MonkeyPatch, *more: str) -> int:
    monkeypatch.setattr(running, "Session", partial(Session, run=run))
    monkeypatch.setattr(installed_text, "prepare", lambda text, output: {})
    monkeypatch.setattr(installed_text, "described", lambda manifest: TEXT)
    words = ["run", "tiny", "--work", str(folder), "--results", str(folder / "r.jsonl")]
    return command.main([*words, "--commit", "c0ffee", *more])


def test_the_command_says_what_is_left_and_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(tmp_path, StandIn(unfinished=9), monkeypatch) == command.UNFINISHED
    assert "48 of 48 runs are left: give the same command again" in capsys.readouterr().out
    assert main(tmp_path, StandIn(fails=("mxfp4",)), monkeypatch) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("study: 12 of 48 runs failed: ") and "RuntimeError: the reason" in last
    assert main(tmp_path, StandIn(), monkeypatch) == 1  # it says so again
    (tmp_path / "r.jsonl").unlink()
    assert main(tmp_path, StandIn(), monkeypatch) == 0
    assert command.main(["show", "tini"]) == 2
    assert "neither a file nor a matrix" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--at-once", "0"], "study: --at-once is 0: give 1 or more"),
        (["--at-once", "-1"], "study: --at-once is -1: give 1 or more"),
        (["--minutes", "1.9"], "study: --minutes is 1.9: give 2 or more, or leave it out"),
        (["--minutes", "nan"], "study: --minutes is nan: give 2 or more, or leave it out"),
        (["--minutes", "inf"], "study: --minutes is inf: give 2 or more, or leave it out"),
    ],
)
def test_numbers_with_which_nothing_would_be_trained(
    words: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = StandIn()
    assert main(tmp_path, run, monkeypatch, *words) == 2
    said = capsys.readouterr()
    assert said.err.startswith(says) and said.err.count("\n") == 1 and said.out == ""
    assert run.launched == [] and not (tmp_path / "r.jsonl").exists()


def test_the_least_minutes_are_enough_to_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = StandIn()
    assert main(tmp_path, run, monkeypatch, "--minutes", "2") == 0
    assert len(run.launched) == 48


# --- two commands at a time -----------------------------------------------------------------------


def test_two_commands_do_not_write_one_result_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = StandIn()
    with rows_file.alone(tmp_path / "r.jsonl"):
        assert main(tmp_path, run, monkeypatch) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"study: another run is writing to {tmp_path / 'r.jsonl'}: wait for it")
    assert said.count("\n") == 1 and run.launched == []
    assert main(tmp_path, run, monkeypatch) == 0  # the file is free again


def test_a_run_is_not_trained_twice_in_one_folder(tmp_path: Path) -> None:
    """Two commands with other results and one folder of work: each trains what the other does not.
    The mistake: both write into the folder of the same run."""
    said: list[str] = []
    second, others, runs = StandIn(), matrix(seeds=[1, 2]), matrix(seeds=[1])

    def first(launch: Launch, minutes: float | None) -> results.Row | None:
        if launch.configuration["recipe"] == "bf16":
            beside = session(tmp_path, second)
            beside.path, beside.say = tmp_path / "second.jsonl", said.append
            beside.train(others, Machine(()))
            assert [hash_of(each) for each in beside.left(others)] == [launch.folder.name]
        return StandIn()(launch, minutes)

    session(tmp_path, first).train(runs, Machine(()))
    assert len(second.launched) == 3
    assert len(results.read(tmp_path / "r.jsonl")) == 2
    text = "study: bf16, tiny, 60 steps, learning rate 0.001, seed 1: left out, since another"
    assert said and any(line.startswith(text) for line in said)
    again = session(tmp_path, second)
    again.path = tmp_path / "second.jsonl"
    again.train(others, Machine(()))  # the folder is free again
    assert len(second.launched) == 4 and again.left(others) == []
