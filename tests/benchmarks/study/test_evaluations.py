"""Models that are evaluated in other precisions than that of their training (`evaluate_in`)."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.study import __main__, matrix, results, tables
from benchmarks.study.configuration import configuration, hash_of, point_of
from benchmarks.study.errors import StudyError
from benchmarks.study.launching import Launch, evaluation_flags
from benchmarks.study.matrix import Matrix, Point
from tools import runs
from tools.installed_text import Text

W_ALONE = "benchmarks/study/ablations/w-in-fp4.yaml"
TEXT = {"sha256": "5e4f", "held_out": {"tokens": 30_000}}
MATRIX = Matrix("test", "a test", Text(2, 1024), [], evaluate_in=["bf16", "tetrajet", W_ALONE])
POINT = Point("tetrajet-ema,ema_share=0.02 --fp4-param-gather", "tiny", 1e-3, 4, 1, 1)
CONTENT = {
    "what": "a test",
    "text": {"megabytes": 0.5, "vocabulary": 512, "held_out_share": 0.2},
    "runs": [
        {"recipes": ["bf16"], "sizes": ["tiny"], "learning_rates": [4e-3], "steps": [40],
         "seeds": [1]}
    ],
}  # fmt: skip


def test_evaluations_are_a_part_of_the_configuration() -> None:
    """With the content of a recipe file. Without any, configurations are those of results from
    before there were evaluations."""
    found = configuration(MATRIX, POINT, TEXT)
    content = found["evaluate_in"]
    assert list(content) == MATRIX.evaluate_in
    assert content["bf16"] == content["tetrajet"] == {} and "fprop" in content[W_ALONE]
    assert point_of(found) == POINT
    plain = configuration(replace(MATRIX, evaluate_in=[]), POINT, TEXT)
    fewer = configuration(replace(MATRIX, evaluate_in=["bf16"]), POINT, TEXT)
    assert "evaluate_in" not in plain
    assert len({hash_of(each) for each in (found, fewer, plain)}) == 3


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("bf16", r"evaluate_in is a list, such as \[bf16\]"),
        (["tetrajet --fp4-grad-comm fp8"], "has flags, and takes a recipe alone"),
        (["tetrajt"], "tetrajt"),
    ],
)
def test_a_mistake_is_told(given: Any, says: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(yaml.safe_dump(CONTENT | {"evaluate_in": given}))
    with pytest.raises(StudyError, match=says):
        matrix.read(str(path))


def test_an_evaluation_has_no_flag_of_the_recipe_that_trained() -> None:
    """The mistake: flags without a value, and options, would be left over."""
    flags = configuration(MATRIX, POINT, TEXT)["flags"]
    assert {"--fp4-recipe-option", "--fp4-param-gather", "--fp4-seed"} <= set(flags)
    in_bf16 = evaluation_flags(flags, "bf16")
    assert in_bf16[-1] == "--skip-train" and not any(word.startswith("--fp4") for word in in_bf16)
    assert "ema_share=0.02" not in in_bf16 and "tetrajet-ema" not in in_bf16
    assert set(flags) - set(in_bf16) == {
        "--fp4-recipe", "tetrajet-ema", "--fp4-recipe-option", "ema_share=0.02", "--fp4-seed",
        "--fp4-param-gather", "--fp4-metrics-interval",
    }  # fmt: skip
    own = ["--fp4-recipe", "mxfp4", "--fp4-load-anyway"]
    assert evaluation_flags(flags, "mxfp4") == [*in_bf16[:-1], *own, "--skip-train"]


def test_an_evaluation_that_fails_is_a_failed_run(tmp_path: Path, monkeypatch: Any) -> None:
    """Its checkpoint stays, from which the second try goes on."""
    launch = Launch(configuration(MATRIX, POINT, TEXT), tmp_path, tmp_path / "data", "")
    trained = (
        " iteration 4/ 4 | elapsed time per iteration (ms): 1.0 | lm loss: 6.0 |\n"
        " validation loss at iteration 4 on validation set | lm loss value: 6.5 | x"
    )

    def command(processes: int, flags: list[str]) -> list[str]:
        code = f"print({trained!r})"
        if "--fp4-recipe" in flags and "--skip-train" in flags:
            code = "raise SystemExit('RuntimeError: the reason')"
        return [sys.executable, "-c", code]

    monkeypatch.setattr(runs, "launch", command)
    checkpoint = launch.folder / "checkpoints/iter"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.write_text("weights")
    found = launch.run(None)
    assert found is not None and found["status"] == "failed"
    assert found["error"] == "RuntimeError: the reason" and checkpoint.exists()


def row(
    recipe: str, seed: int, evaluated: dict[str, float], rounding: int | None = None
) -> dict[str, Any]:
    rounding = None if recipe == "bf16" else rounding or seed
    point = Point(recipe, "tiny", 1e-3, 4, seed, rounding)
    return {
        "configuration": configuration(replace(MATRIX, evaluate_in=[]), point, TEXT),
        "held_out": [[4, 6.0]],
        "evaluated": evaluated,
    }


def test_the_table_has_differences_from_bf16_in_bf16() -> None:
    rows = [
        row("bf16", 1, {"bf16": 6.0, "tetrajet": 6.3}),
        row("bf16", 2, {"bf16": 6.1, "tetrajet": 6.5}),
        row("tetrajet", 1, {"bf16": 5.9, "tetrajet": 6.1}),
    ]
    head, _, plain, own = tables.evaluation_table(rows)
    assert head.endswith("| in `bf16` | in `tetrajet` |")
    assert plain.endswith("| `bf16` | 2 | +0.000 (+0.000, +0.000) | +0.350 (+0.300, +0.400) |")
    assert own.endswith("| `tetrajet` | 1 | -0.100 | +0.100 |")
    assert tables.evaluation_table(rows[2:]) == []  # nothing to compare with


def test_rounding_seeds_are_averaged_and_runs_without_evaluations_do_not_count() -> None:
    """The mistake: the last rounding seed counts alone."""
    rows = [
        row("bf16", 1, {"bf16": 6.0}),
        row("tetrajet", 1, {"bf16": 6.1}, 1),
        row("tetrajet", 1, {"bf16": 6.3}, 2),
        row("tetrajet", 1, {}, 3),
    ]
    assert tables.evaluation_table(rows)[-1].endswith("| `tetrajet` | 1 | +0.200 |")


@pytest.mark.outside
def test_a_model_of_bf16_is_evaluated_in_others(tmp_path: Path) -> None:
    path, made = tmp_path / "one.yaml", tmp_path / "one.jsonl"
    path.write_text(yaml.safe_dump(CONTENT | {"evaluate_in": ["bf16", "fp8", "mxfp4"]}))
    words = ["run", str(path), "--work", str(tmp_path / "work"), "--results", str(made)]
    assert __main__.main(words) == 0
    [found] = results.read(made)
    loss, evaluated = found["held_out"][-1][1], found["evaluated"]
    assert evaluated["bf16"] == pytest.approx(loss, abs=0.05)  # of other batches of the same text
    assert 0 < abs(evaluated["fp8"] - evaluated["bf16"]) < abs(evaluated["mxfp4"] - loss)
    assert not list(tmp_path.glob("work/*/checkpoints"))
