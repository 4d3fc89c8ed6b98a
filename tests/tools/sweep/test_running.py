"""A sweep in several processes: each result is kept at once, and nothing is evaluated twice."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.tools.sweep.test_stages import recorded
from tools import rows
from tools.sweep import __main__, running, tensors
from tools.sweep.axes import Combination
from tools.sweep.results import BF16, ranked, scores
from tools.sweep.running import KEYS, Task

COMBINATIONS = [
    Combination(),
    Combination(rule="ceil"),
    Combination(rule="ceil", backward_rule="ceil"),
    Combination(backward="fp8"),
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
    (row,) = rows.read(path, KEYS)
    here = running.evaluate(tasks[0])["seeds"]  # not in another process
    assert row["seeds"] == json.loads(json.dumps(here))
    path.write_text(before + '{"hash": "cut o')
    assert running.run(tasks, path, {"commit": "c0ffee"}, 2) == 0
    found = rows.read(path, KEYS)
    assert path.read_text().startswith(before) and len(found) == 4
    assert {Combination(**row["combination"]) for row in found} == set(COMBINATIONS)
    assert all(row["stamp"] == {"commit": "c0ffee"} and row["seconds"] > 0 for row in found)
    assert running.run(tasks, path, {}, 2) == 0 and len(rows.read(path, KEYS)) == 4
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
    assert Task("digits", COMBINATIONS[1], "0", written).configuration["tensors"] is None


def test_a_training_that_diverges_is_a_result(
    written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = running.STAGES["regression"]

    def diverges(*_: object) -> dict[str, float]:
        raise ArithmeticError("the loss is inf in step 3")

    monkeypatch.setitem(running.STAGES, "regression", replace(stage, evaluate=diverges))
    row = running.evaluate(Task("regression", Combination(), "0", written))
    assert row["status"] == "failed" and row["error"] == "the loss is inf in step 3"
    assert scores([row], "regression") == {}


def test_scores_are_less_bf16_s_by_seed() -> None:
    def row(combination: Combination, *losses: float) -> rows.Row:
        seeds = {str(seed): {"loss": loss} for seed, loss in enumerate(losses, start=1)}
        return {
            "stage": "digits",
            "status": "finished",
            "combination": combination.chosen,
            "seeds": seeds,
        }

    found = [row(BF16, 1.0, 2.0), row(COMBINATIONS[0], 1.5, 2.3), row(COMBINATIONS[1], 1.1, 2.1)]
    assert scores(found, "digits") == {
        COMBINATIONS[0]: pytest.approx(0.4),
        COMBINATIONS[1]: pytest.approx(0.1),
    }
    assert scores(found, "digits", ["2"])[COMBINATIONS[0]] == pytest.approx(0.3)
    assert ranked(found, ["digits"]) == {COMBINATIONS[0]: 1, COMBINATIONS[1]: 0}


def test_bad_words_end_the_command_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["try", "digits", "scales=e4m3"]) == 2
    assert capsys.readouterr().err.startswith("sweep: no axis scales: forward, backward, scale")
    assert __main__.main(["try", "digits", "scale=e4m3"]) == 2
    assert "contradicts itself" in capsys.readouterr().err
