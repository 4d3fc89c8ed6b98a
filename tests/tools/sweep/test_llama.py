"""The last stage: combinations as recipes of a study's matrix, and its results as a sweep's."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.study import matrix
from benchmarks.study.sizes import SIZES
from megatron_fp4 import ConfigError, get_recipe
from megatron_fp4.errors import SizeError
from megatron_fp4.plan.sizes import check_sizes
from tests.tools.sweep.test_axes import RHT, TETRAJET, unnamed
from tools.sweep import llama
from tools.sweep.axes import Combination
from tools.sweep.building import recipe_of
from tools.sweep.results import BF16, scores


def test_combinations_are_recipes_of_a_matrix(tmp_path: Path) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_text(llama.matrix([TETRAJET, RHT, Combination(optimizer="stable-spam")]))
    points = matrix.read(str(path)).points()
    assert len(points) == 2 * (len(llama.BASELINES) + 3)
    flags = next(point for point in points if "rule=ceil" in point.recipe).flags()
    assert flags[:2] == ["--fp4-recipe", "tools.sweep.building:combined"]
    assert matrix.read(str(path)).flags.split() == llama.FLAGS
    words = flags[3::2]
    options = dict(word.split("=") for word in words if "=" in word)
    assert unnamed(get_recipe(flags[1], **options)) == unnamed(get_recipe("tetrajet"))


def test_the_best_are_trained_with_seeds_that_chose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "best.yaml"
    path.write_text(llama.matrix_of_best([TETRAJET, RHT]))
    points = matrix.read(str(path)).points()
    assert {point.recipe for point in points} == {
        *llama.OTHERS, llama.recipe(TETRAJET), llama.recipe(RHT),
    }  # fmt: skip
    assert not {point.seed for point in points} & set(llama.BLOCK["seeds"])
    chosen = matrix.read(str(written(tmp_path, llama.matrix([TETRAJET])))).points()
    alike = ("size", "learning_rate", "steps")
    assert {tuple(getattr(p, name) for name in alike) for p in points} == {
        tuple(getattr(p, name) for name in alike) for p in chosen
    }


def written(folder: Path, text: str) -> Path:
    path = folder / "matrix.yaml"
    path.write_text(text)
    return path


UNIT_GAIN = Combination(
    scale="e4m3", rule="nearest", backward_rule="unit-gain", operands="forward"
)  # whose backward pass takes blocks of 128 elements, as docs/numerics.md has it


@pytest.mark.parametrize(
    ("combination", "multiple"),
    [(replace(RHT, group="64"), 64), (replace(RHT, group="128"), 128), (UNIT_GAIN, 128)],
)
def test_what_does_not_fit_the_model_is_left_out(combination: Combination, multiple: int) -> None:
    """It is what a linear would refuse."""
    model = SIZES[llama.BLOCK["sizes"][0]].model
    fits = model.hidden % multiple == 0 and model.ffn % multiple == 0
    assert (llama.recipe(combination) in llama.matrix([combination])) == fits
    with nullcontext() if fits else pytest.raises(SizeError):
        check_sizes(recipe_of(combination), None, model.hidden, model.ffn, "fc1")


def test_a_contradiction_is_refused_as_a_recipe_too() -> None:
    with pytest.raises(ConfigError, match="rule=floor .* does not go with scale=e4m3"):
        get_recipe("tools.sweep.building:combined", scale="e4m3")


def test_runs_of_a_study_are_scores_of_the_stage() -> None:
    only = {key: llama.BLOCK[f"{key}s"][0] for key in ("size", "learning_rate")}
    only["steps"] = llama.BLOCK["steps"][0]

    flags = ["--lr", "1", *llama.FLAGS, "--seed", "1"]

    def run(recipe: str, seed: int, loss: float, **other: object) -> dict:
        return {
            "status": "finished",
            "configuration": {"recipe": recipe, "seed": seed, "flags": flags} | only | other,
            "held_out": [(150, 9.0), (300, loss)],
            "milliseconds": 20,
        }

    spam = Combination(rule="ceil", optimizer="stable-spam")
    finished = [run("bf16", seed, 3.0 + seed) for seed in (1, 2)]
    finished += [run(llama.recipe(TETRAJET), seed, 3.1 + seed) for seed in (1, 2)]
    failed = {"status": "failed", "configuration": finished[0]["configuration"]}
    half = run(llama.recipe(RHT), 1, 4.0)  # its second seed has not run
    stars = {BF16["adam"]: "0", TETRAJET: "1", spam: "2", RHT: "3"}
    wrong = [run(llama.recipe(TETRAJET), 1, 9.0, **{key: 7}) for key in only]
    others = [["--lr", "1"], [*llama.FLAGS[:-1], "9"], llama.FLAGS[::-1]]
    wrong += [run(llama.recipe(TETRAJET), 1, 9.0, flags=each) for each in others]
    found = llama.rows([*finished, failed, half, *wrong], stars)
    assert scores(found, llama.NAME) == {TETRAJET: pytest.approx(0.1)}
    assert {row["seconds"] for row in found} == {2 * 300 * 0.02}
