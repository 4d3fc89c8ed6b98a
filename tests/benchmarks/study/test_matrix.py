"""Matrices are expanded to every run once, and each configuration has a hash of its own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.study import matrix
from benchmarks.study.configuration import configuration, hash_of, of_this_version, point_of
from benchmarks.study.errors import StudyError
from benchmarks.study.matrix import Block, Matrix, Point
from benchmarks.study.sizes import SIZES
from tools import runs
from tools.installed_text import Text

TEXT = {"sha256": "5e4f", "held_out": {"tokens": 30_000}}
BLOCK = Block(["bf16", "tetrajet"], ["tiny"], [1e-3, 2e-3], [60, 240], [1, 2])
POINT = Point("tetrajet", "tiny", 1e-3, 60, 1, 1)
MATRIX = Matrix("test", "a test", Text(2, 1024), [], metrics_interval=50)
GOOD: dict[str, Any] = {
    "what": "a test",
    "text": {"megabytes": 2, "vocabulary": 1024},
    "runs": [{"recipes": ["bf16"], "sizes": ["tiny"], "learning_rates": ["2e-3"],
              "steps": [60], "seeds": [1]}],
}  # fmt: skip


def written(path: Path, content: Any) -> str:
    path.write_text(yaml.safe_dump(content))
    return str(path)


def test_a_block_is_every_combination_seed_by_seed() -> None:
    points = BLOCK.points()
    assert len(points) == len(set(points)) == 2 * 2 * 2 * 2
    assert [point.seed for point in points] == [1] * 8 + [2] * 8
    assert {p.rounding_seed for p in points if p.recipe == "bf16"} == {None}
    assert all(p.rounding_seed == p.seed for p in points if p.recipe == "tetrajet")


def test_a_recipe_file_counts_by_its_content(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"

    def found(text: str) -> dict[str, Any]:
        path.write_text(text)
        return configuration(MATRIX, POINT._replace(recipe=f"{path},rule=floor"), TEXT)

    plain = found("base: tetrajet\n")
    assert plain["recipe_fields"]["fprop"]["a"]["rule"] == "floor"
    assert hash_of(plain) == hash_of(found("{base: tetrajet}\n"))
    assert hash_of(plain) != hash_of(found("base: mxfp4\n"))
    assert "recipe_fields" not in configuration(MATRIX, POINT, TEXT)


def test_fields_that_an_earlier_version_did_not_have_are_those_of_this_one(tmp_path: Path) -> None:
    """A finished run of a recipe file is found again when recipes have one field more."""
    path = tmp_path / "mine.yaml"
    path.write_text("{base: tetrajet, estimator: {}}\n")
    point, study = POINT._replace(recipe=str(path)), replace(MATRIX, evaluate_in=[str(path), "fp8"])
    now = configuration(study, point, TEXT)
    earlier = json.loads(json.dumps(now))
    for fields in (earlier["recipe_fields"], earlier["evaluate_in"][str(path)]):
        assert fields["estimator"].pop("scale_form")
    assert hash_of(earlier) != hash_of(now) == hash_of(of_this_version(earlier))
    other = json.loads(json.dumps(earlier))
    other["recipe_fields"]["fprop"]["a"]["rule"] = "floor"
    assert hash_of(of_this_version(other)) != hash_of(now)
    later = now | {"recipe_fields": now["recipe_fields"] | {"a field of a later version": 1}}
    assert of_this_version(later) == later


def test_bf16_has_no_rounding_seeds() -> None:
    block = Block(["bf16", "tetrajet"], ["tiny"], [1e-3], [60], [1], rounding_seeds=[7, 8])
    assert [(p.recipe, p.rounding_seed) for p in block.points()] == [
        ("bf16", None), ("tetrajet", 7), ("tetrajet", 8),
    ]  # fmt: skip


def test_what_blocks_share_is_run_once(tmp_path: Path) -> None:
    blocks = GOOD["runs"] + [GOOD["runs"][0] | {"seeds": [1, 2]}]
    found = matrix.read(written(tmp_path / "two.yaml", GOOD | {"runs": blocks}))
    assert [point.seed for point in found.points()] == [1, 2]
    assert found.points()[0].learning_rate == 2e-3  # which YAML reads as text
    assert found.against == ["bf16"]


@pytest.mark.parametrize("key", ["sizes", "learning_rates", "steps", "seeds"])
def test_what_others_are_compared_with_has_runs_at_their_points(key: str, tmp_path: Path) -> None:
    other: dict[str, list[Any]] = {
        "sizes": ["3M"], "learning_rates": [1e-3], "steps": [90], "seeds": [2],
    }  # fmt: skip
    plain = changed(recipes=["tetrajet"])["runs"]
    apart = GOOD | {"against": ["bf16"], "runs": plain + [GOOD["runs"][0] | {key: other[key]}]}
    with pytest.raises(StudyError, match="against: no other recipe .* of a run of bf16: add bf16"):
        matrix.read(written(tmp_path / "apart.yaml", apart))
    together = plain + [GOOD["runs"][0] | {key: other[key] + GOOD["runs"][0][key]}]
    assert matrix.read(written(tmp_path / "one.yaml", apart | {"runs": together})).points()


def test_a_matrix_that_names_no_comparison_needs_no_run_of_bf16(tmp_path: Path) -> None:
    assert matrix.read(written(tmp_path / "own.yaml", changed(recipes=["tetrajet"]))).points()


@pytest.mark.parametrize("name", matrix.names())
def test_the_matrices_of_the_package(name: str) -> None:
    found = matrix.read(name)
    compared = {point.recipe for point in found.points()}
    assert compared > set(found.against) and ("bf16" in compared) == ("bf16" in found.against)
    hashes = {hash_of(configuration(found, p, TEXT)) for p in found.points()}
    assert len(hashes) == len(found.points())


def changed(**block: Any) -> dict[str, Any]:
    return GOOD | {"runs": [GOOD["runs"][0] | block]}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (GOOD | {"seeds": [1]}, "the matrix has no key seeds"),
        (changed(seed=[1]), "runs has no key seed"),
        (changed(seeds=1), r"seeds is a list, such as \[1\]"),
        (changed(steps=["60"]), "60 in steps is no integer"),
        (changed(steps=[0]), "steps are 1 or more"),
        (changed(seeds=[]), "seeds is empty: give one value or more"),
        (changed(recipes=["tetrajet --tensor-model-parallel-size two"]), "invalid int value"),
        (changed(recipes=["tetrajet --tensor-model-parallel-size"]), "expected one argument"),
        (changed(recipes=["tetrajet --pipeline-model-parallel-size 0"]), "size is 0: give 1 or"),
        (changed(sizes=["7B"]), "no size is called 7B"),
        (changed(recipes=["tetrajt"]), "tetrajt"),
        (changed(recipes=["tetrajet,beta=1"]), "beta"),
        (changed(learning_rates=["fast"]), "no number"),
        (GOOD | {"text": {"megabytes": 2}}, "text needs the key vocabulary"),
        (GOOD | {"text": {"megabytes": 2, "vocabulary": 2}}, "vocab-size 2: give a number from"),
        (GOOD | {"text": {"megabytes": "two", "vocabulary": 1024}}, "megabytes is a number"),
        (GOOD | {"metrics_interval": "often"}, "metrics_interval is an integer from 0 on, not 'of"),
        (GOOD | {"metrics_interval": 1.5}, "metrics_interval is an integer from 0 on, not 1.5"),
        (GOOD | {"ranks": "two"}, "ranks is an integer from 0 on, not 'two'"),
        (GOOD | {"ranks": -1}, "ranks is an integer from 0 on, not -1"),
        (GOOD | {"ranks": 3}, "ranks: 3 do not divide the batch of tiny, which has 8 sequences"),
        (GOOD | {"ranks": 16}, "ranks: 16 do not divide"),
        (GOOD | {"flags": ["--a"]}, "flags is a text"),
        (GOOD | {"name": "other"}, "the matrix has no key name: its file's name is its name"),
        (changed(recipes=[4]), "runs: recipes: 4 is no recipe: give a name, a recipe file or bf16"),
        (changed(recipes=[""]), "runs: recipes: '' is no recipe"),
        (changed(recipes=["bf16,beta=1"]), "bf16 takes no options: leave out beta"),
        (changed(sizes=[["tiny"]]), "no size is called"),
        (changed(learning_rates=["nan"]), "nan is no learning rate: give a number above 0"),
        (changed(learning_rates=[0]), "0.0 is no learning rate"),
        (GOOD | {"evaluate_in": ["fp8"]}, "evaluate_in needs bf16, which the others are compared"),
        (GOOD | {"evaluate_in": [8]}, "evaluate_in: 8 is no recipe"),
        (changed(recipes=["tetrajt --fp4-grad-comm fp8"]), "tetrajt"),
        (GOOD | {"against": "bf16"}, r"against is a list, such as \[bf16\]"),
        (changed(recipes=["bf16", "mxfp4"]) | {"against": ["tetrajet"]}, "a run of tetrajet: add"),
        (GOOD | {"against": ["bf16"]}, "no other recipe has a run with the size"),
        ([], "a mapping"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_that_names_the_file(content: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(StudyError, match=says) as error:
        matrix.read(written(tmp_path / "bad.yaml", content))
    assert "\n" not in str(error.value) and "bad.yaml: " in str(error.value)


def test_a_name_that_is_neither_a_matrix_nor_a_file() -> None:
    with pytest.raises(StudyError, match="tini is neither a file nor a matrix: .*tiny"):
        matrix.read("tini")


# --- configurations -------------------------------------------------------------------------------


def test_a_configuration_is_complete() -> None:
    """The axes, the text, and every flag of the model, the training and the recipe."""
    found = configuration(MATRIX, POINT, TEXT)
    flags = found["flags"]
    for flag in [*SIZES["tiny"].model.flags(), *runs.Training(60, learning_rate=1e-3).flags()]:
        assert not flag.startswith("--") or flag in flags
    for words in (["--fp4-recipe", "tetrajet"], ["--fp4-seed", "1"], ["--seed", "1"]):
        assert words in [flags[i : i + 2] for i in range(len(flags))]
    assert flags[flags.index("--eval-iters") + 1] == str(30_000 // (8 * 64))
    assert point_of(json.loads(json.dumps(found))) == POINT
    assert hash_of(json.loads(json.dumps(found))) == hash_of(found)


@pytest.mark.parametrize(
    "change",
    [
        {"recipe": "mxfp4"},
        {"recipe": "tetrajet,double_quantization=false"},
        {"learning_rate": 1.1e-3},
        {"steps": 61},
        {"seed": 2},
        {"rounding_seed": 2},
    ],
    ids=str,
)
def test_every_axis_changes_the_hash(change: dict[str, Any]) -> None:
    other = configuration(MATRIX, POINT._replace(**change), TEXT)
    assert hash_of(other) != hash_of(configuration(MATRIX, POINT, TEXT))


def test_the_text_the_size_and_the_numerics_change_the_hash(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def found(interval: int = 50, text: dict[str, Any] = TEXT) -> str:
        return hash_of(configuration(replace(MATRIX, metrics_interval=interval), POINT, text))

    hashes = [found(), found(interval=60), found(text=TEXT | {"sha256": "5e50"})]
    monkeypatch.setattr("benchmarks.study.configuration.NUMERICS_VERSION", 1000)
    hashes.append(found())
    monkeypatch.setitem(SIZES, "tiny", SIZES["26M"])
    hashes.append(found())
    assert len(set(hashes)) == len(hashes)


def test_metrics_do_not_change_bf16() -> None:
    """Which has none: the same runs of BF16 serve several matrices."""
    point = POINT._replace(recipe="bf16", rounding_seed=None)
    found = configuration(MATRIX, point, TEXT)
    assert found == configuration(replace(MATRIX, metrics_interval=0), point, TEXT)
    assert "--fp4-seed" not in found["flags"]


def test_further_flags_follow_a_recipe() -> None:
    """In the entry of a recipe or of BF16; those of the matrix are in every run."""
    matrix = replace(MATRIX, flags="--use-distributed-optimizer")
    few = "--fp4-grad-comm fp8"
    for recipe, own in (("tetrajet,beta=1", ["--fp4-recipe-option", "beta=1"]), ("bf16", [])):
        point = POINT._replace(recipe=f"{recipe} {few}", rounding_seed=None)
        flags = configuration(matrix, point, TEXT)["flags"]
        for words in (own, few.split(), ["--use-distributed-optimizer"]):
            assert " ".join(words) in " ".join(flags)
        assert ("--fp4-recipe" in flags) == ("--fp4-metrics-interval" in flags) == bool(own)
        plain = configuration(matrix, POINT._replace(recipe=recipe, rounding_seed=None), TEXT)
        assert [flag for flag in flags if flag not in few.split()] == plain["flags"]


def test_ranks_share_the_batch_and_change_the_hash() -> None:
    """Without `ranks` configurations are those of results from before there were any."""
    plain, shared = (configuration(m, POINT, TEXT) for m in (MATRIX, replace(MATRIX, ranks=2)))
    assert "ranks" not in plain and shared["ranks"] == 2
    assert hash_of(plain) != hash_of(shared)
    sizes = []
    for found in (plain, shared):
        flags = found["flags"]
        last = len(flags) - 1 - flags[::-1].index("--micro-batch-size")
        sizes.append(int(flags[last + 1]))
        assert flags[flags.index("--global-batch-size") + 1] == "8"
    assert sizes == [8, 4]
    assert point_of(json.loads(json.dumps(shared))) == POINT


def test_a_size_is_named_by_the_parameters_of_its_layers() -> None:
    for name, millions in (("26M", 26), ("60M", 60), ("150M", 150)):
        model = SIZES[name].model
        head = model.hidden // model.heads
        attention = 2 * model.hidden**2 + 2 * model.hidden * head * model.query_groups
        layer = attention + 3 * model.hidden * model.ffn
        assert model.layers * layer == pytest.approx(millions * 1e6, rel=0.015)
    assert SIZES["26M"].tokens * 1525 == pytest.approx(200e6, rel=1e-3)
