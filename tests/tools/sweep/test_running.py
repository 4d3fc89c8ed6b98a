"""A sweep in several processes: each result is kept at once, and nothing is evaluated twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.tools.sweep.test_stages import recorded
from tools import rows
from tools.sweep import __main__, results, running, tensors
from tools.sweep.axes import Combination
from tools.sweep.results import BF16, ranked, scores
from tools.sweep.running import SweepError, Task

ROOT = Path(__file__).parents[3]
INTERRUPTED = """
import signal
import sys
from pathlib import Path

from tests.tools.sweep.test_running import COMBINATIONS, MORE
from tools.sweep import running

if __name__ == "__main__":
    # Where the tests run in the background of a shell, this signal is ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    path, tensors = map(Path, sys.argv[1:])
    tasks = [running.Task("products", each, each.key, tensors) for each in (*COMBINATIONS, *MORE)]
    running.run(tasks, path, {}, 1)
"""
COMBINATIONS = [
    Combination(),
    Combination(rule="ceil"),
    Combination(rule="ceil", backward_rule="ceil"),
    Combination(backward="fp8"),
]


MORE = [  # so many that an interrupt comes before they have all finished
    Combination(
        rule=rule, backward_rule=backward, block=block, rounding=rounding, operands=operands
    )
    for rule in ("floor", "ceil")
    for backward in ("floor", "three-quarters")
    for block in ("16", "32")
    for rounding in ("gradients", "gradients-and-x", "backward", "all")
    for operands in ("raw", "forward")
]


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A file of recorded tensors."""
    (each,) = recorded(64, 64, 64)
    parts = {"x": each.x, "weight": each.weight, "gradient": each.gradient}
    found = [{"name": f"decoder.layers.{layer}.linear", **parts} for layer in (0, 1, 3)]
    torch.save(found, tmp_path / "tensors.pt")
    return tmp_path / "tensors.pt"


def test_a_sweep_goes_on_where_it_ended(written: Path, tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    tasks = [Task("products", each, each.key, written) for each in COMBINATIONS]
    assert running.run(tasks[:1], path, {"commit": "c0ffee"}, 1) == 0
    before = path.read_text()
    (row,) = results.read(path)
    here = running.evaluate(tasks[0])["seeds"]  # not in another process
    assert row["seeds"] == json.loads(json.dumps(here))
    path.write_text(before + '{"hash": "cut o')
    assert running.run(tasks, path, {"commit": "c0ffee"}, 2) == 0
    found = results.read(path)
    assert path.read_text().startswith(before) and len(found) == 4
    assert {Combination(**row["combination"]) for row in found} == set(COMBINATIONS)
    assert all(row["stamp"] == {"commit": "c0ffee"} and row["seconds"] > 0 for row in found)
    assert running.run(tasks, path, {}, 2) == 0 and len(results.read(path)) == 4
    assert running.run(tasks[:1], tmp_path / "other.jsonl", {}, 1, deadline=0.0) == 1


def test_a_row_has_all_that_its_figures_depend_on(written: Path, tmp_path: Path) -> None:
    task = Task("products", COMBINATIONS[1], "0", written)
    assert task.configuration["tensors"] == tensors.digest(written)
    assert task.configuration["combination"] == {"rule": "ceil"}
    (each,) = recorded(64, 64, 32)
    parts = {"x": each.x, "weight": each.weight, "gradient": each.gradient}
    torch.save([{"name": "decoder.layers.0.linear", **parts}], tmp_path / "others.pt")
    other = Task("products", COMBINATIONS[1], "0", tmp_path / "others.pt")
    assert other.hash != task.hash
    assert Task("digits", COMBINATIONS[1], "0", None).configuration["tensors"] is None


def test_more_seeds_and_other_settings_make_a_stage_s_results_anew(
    written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = Task("digits", COMBINATIONS[1], "0", None).hash
    stage = running.STAGES["digits"]
    for other in (replace(stage, seeds=5), replace(stage, settings=stage.settings | {"noise": 1})):
        monkeypatch.setitem(running.STAGES, "digits", other)
        assert Task("digits", COMBINATIONS[1], "0", None).hash != before


def test_results_that_cannot_be_compared_are_refused(written: Path, tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    row = running.evaluate(Task("products", COMBINATIONS[0], "0", written))
    for each in (row, row | {"stage": "draws"}, row | {"numerics": 0}):
        rows.append(path, each)
    with pytest.raises(ValueError, match="results of products in .* differ in numerics: use ano"):
        results.read(path)


@pytest.mark.parametrize("key", ["settings", "tensors", "numerics"])
def test_a_file_of_other_results_is_refused_before_anything_is_evaluated(
    key: str, written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "r.jsonl"
    row = running.evaluate(Task("products", COMBINATIONS[0], "0", written))
    rows.append(path, row | {key: "others", "hash": "another"})
    before = path.read_bytes()
    with pytest.raises(ValueError, match=f"results of products in .* differ in {key}: use another"):
        running.run([Task("products", COMBINATIONS[0], "0", written)], path, {}, 1)
    assert path.read_bytes() == before
    digits = Task("digits", COMBINATIONS[0], "0", None)  # another stage: nothing is compared
    assert running.run([digits], path, {}, 1, deadline=0.0) == 1


def test_rows_of_one_hash_count_once(written: Path, tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    found = [running.evaluate(Task("products", each, "0", written)) for each in COMBINATIONS[:2]]
    for row in (*found, found[0]):
        rows.append(path, row)
    assert [row["hash"] for row in results.read(path)] == [row["hash"] for row in found]


def test_a_second_run_on_a_file_is_refused(
    written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r.jsonl"
    words = ["run", "products", "--results", str(path), "--work", str(tmp_path), "--number", "1"]
    with rows.alone(path):
        assert __main__.main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"sweep: another run is writing to {path}: wait for it")
    assert error.count("\n") == 1 and not path.read_bytes()
    assert __main__.main([*words, "--minutes", "1e-9"]) == 75  # once the other has ended
    assert capsys.readouterr().out.endswith("the same command goes on\n")


def test_how_far_a_run_is_is_said_by_time(
    written: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tasks = [Task("products", each, "0", written) for each in COMBINATIONS]
    running.run(tasks[:1], tmp_path / "r.jsonl", {}, 1)
    assert not capsys.readouterr().out
    monkeypatch.setattr(running, "SAY_EVERY", 0.2)  # shorter than the start of a process
    running.run(tasks, tmp_path / "r.jsonl", {}, 1)
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "sweep: 1 of 4" and len(said) > 1  # before anything is there too


def test_a_training_that_diverges_is_a_result(
    written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = running.STAGES["regression"]

    def diverges(*_: object) -> dict[str, float]:
        raise ArithmeticError("the loss is inf in step 3")

    monkeypatch.setitem(running.STAGES, "regression", replace(stage, evaluate=diverges))
    row = running.evaluate(Task("regression", Combination(), "0", None))
    assert row["status"] == "failed" and row["error"] == "the loss is inf in step 3"
    assert scores([row], "regression") == {}
    nan = replace(stage, evaluate=lambda *_: {"loss": float("nan")})
    monkeypatch.setitem(running.STAGES, "regression", nan)
    row = running.evaluate(Task("regression", Combination(), "0", None))
    assert row["status"] == "failed" and row["error"] == "loss is nan"


def test_an_interrupt_keeps_what_has_finished(written: Path, tmp_path: Path) -> None:
    """By a signal to the command, while combinations are evaluated."""
    path, program = tmp_path / "r.jsonl", tmp_path / "sweep.py"
    program.write_text(INTERRUPTED)
    command = [sys.executable, str(program), str(path), str(written)]
    run = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)})
    limit = time.monotonic() + 100
    while not (path.exists() and path.read_text().count("\n") >= 2):
        assert run.poll() is None and time.monotonic() < limit
        time.sleep(0.05)
    run.send_signal(signal.SIGINT)
    assert run.wait(60) != 0
    kept = len(results.read(path))
    tasks = [Task("products", each, each.key, written) for each in (*COMBINATIONS, *MORE)]
    assert 2 <= kept < len(tasks)
    assert running.run(tasks, path, {}, 1) == 0
    found = [row["hash"] for row in results.read(path)]
    assert sorted(found) == sorted(task.hash for task in tasks)


@pytest.mark.parametrize("which", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_workers_end_with_the_command(which: signal.Signals, written: Path, tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    command = [sys.executable, "-m", "tools.sweep", "run", "products", "--results", str(path)]
    command += ["--work", str(tmp_path), "--processes", "2"]
    run = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        # Where the tests run in the background of a shell, it is ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    wait_until(lambda: path.exists() and path.read_text().count("\n") >= 2, run)
    workers = workers_of(run.pid)
    assert len(workers) == 2
    run.send_signal(which)
    said = run.communicate(timeout=60)[0]
    try:
        wait_until(lambda: not any(map(alive, workers)))
    finally:
        for worker in filter(alive, workers):
            os.kill(worker, signal.SIGKILL)
    assert run.returncode == (-which if which == signal.SIGKILL else 130)
    if which != signal.SIGKILL:
        count = len(results.read(path))
        assert f"{count} of 2512 have results of products, of which 0 failed: the same co" in said


def wait_until(true: Callable[[], bool], run: subprocess.Popen[str] | None = None) -> None:
    limit = time.monotonic() + (100 if run else 10)
    while not true():
        assert time.monotonic() < limit and (run is None or run.poll() is None)
        time.sleep(0.05)


def workers_of(parent: int) -> list[int]:
    """The processes that a pool has started, by the command of multiprocessing's `spawn`."""
    found = [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]
    own = [each for each in found if (status := status_of(each)) and status[1] == str(parent)]
    return [each for each in own if b"spawn_main" in Path(f"/proc/{each}/cmdline").read_bytes()]


def alive(process: int) -> bool:
    status = status_of(process)
    return status is not None and status[0] != "Z"


def status_of(process: int) -> list[str] | None:
    """The state of a process, its parent, and more; None if there is no such process."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def test_a_combination_that_the_code_cannot_evaluate_is_named(
    written: Path, tmp_path: Path
) -> None:
    path = tmp_path / "r.jsonl"
    tasks = [Task("products", each, "0", written) for each in COMBINATIONS[:2]]
    wide = Task("products", Combination(hadamard="backward", group="128"), "0", written)
    with pytest.raises(
        SweepError, match="products cannot evaluate hadamard=backward group=128: SizeError"
    ):
        running.run([*tasks, wide], path, {}, 1)
    assert len(results.read(path)) == 2


def test_scores_are_less_bf16_s_by_seed() -> None:
    def row(combination: Combination, *losses: float) -> rows.Row:
        seeds = {str(seed): {"loss": loss} for seed, loss in enumerate(losses, start=1)}
        return {
            "stage": "digits",
            "status": "finished",
            "combination": combination.chosen,
            "seeds": seeds,
        }

    found = [
        row(BF16["adam"], 1.0, 2.0),
        row(COMBINATIONS[0], 1.5, 2.3),
        row(COMBINATIONS[1], 1.1, 2.1),
    ]
    assert scores(found, "digits") == {
        COMBINATIONS[0]: pytest.approx(0.4),
        COMBINATIONS[1]: pytest.approx(0.1),
    }
    spam = [replace(each, optimizer="stable-spam") for each in COMBINATIONS]
    assert set(scores([*found, row(spam[0], 1.0, 1.0)], "digits")) == set(COMBINATIONS[:2])
    other = [*found, row(BF16["stable-spam"], 0.5, 0.5), row(spam[0], 1.0, 1.0)]
    assert scores(other, "digits")[spam[0]] == pytest.approx(0.5)
    assert scores(found, "digits", ["2"])[COMBINATIONS[0]] == pytest.approx(0.3)
    assert ranked(found, ["digits"]) == {COMBINATIONS[0]: 1, COMBINATIONS[1]: 0}


def test_bad_words_end_the_command_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["try", "digits", "scales=e4m3"]) == 2
    assert capsys.readouterr().err.startswith("sweep: no axis scales: forward, backward")
    assert __main__.main(["try", "digits", "scale=e4m3"]) == 2
    assert "sweep: rule=floor (the default) does not go with scale=e4m3: give rule=nearest or" in (
        capsys.readouterr().err
    )
    assert __main__.main(["try", "digits", "scale=e4m3", "scale=e8m0"]) == 2
    assert capsys.readouterr().err == "sweep: scale is given twice: give it once\n"
    assert __main__.main(["cost", "foo=bar"]) == 2
    assert capsys.readouterr().err.startswith("sweep: no axis foo: forward, backward")
    assert __main__.main(["run", "products", "--processes", "0"]) == 2
    assert capsys.readouterr().err == "sweep: --processes is 0: give 1 or more\n"
    for minutes in ("nan", "-1", "0"):
        assert __main__.main(["run", "products", "--minutes", minutes]) == 2
        assert capsys.readouterr().err == f"sweep: --minutes is {minutes}: give more than 0\n"
    assert __main__.main(["show", "--page", "none.md"]) == 2
    assert (
        capsys.readouterr().err == "sweep: none.md: No such file or directory: give another file\n"
    )


def test_a_stage_needs_the_results_of_those_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    none, matrix = str(tmp_path / "none.jsonl"), tmp_path / "sweep.yaml"
    assert __main__.main(["run", "digits", "--results", none]) == 2
    assert "has no results of products, which promotes combinations" in capsys.readouterr().err
    assert __main__.main(["llama", "--results", none, "--out", str(matrix)]) == 2
    assert "has no results of diffusion, which promotes" in capsys.readouterr().err
    assert not matrix.exists()
