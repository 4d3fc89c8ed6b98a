"""A sweep in several processes: each result is kept at once, and nothing is evaluated twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.tools.sweep.test_stages import recorded
from tools import rows
from tools.sweep import results, running, tensors
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
