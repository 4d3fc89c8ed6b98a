"""docs/study.md has the committed result, and says what the matrices and sizes are."""

from __future__ import annotations

import json
import math
import re
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.study import matrix, pictures, results, showing, tables
from benchmarks.study.__main__ import default_results, main
from benchmarks.study.configuration import configuration, hash_of, point_of
from benchmarks.study.errors import StudyError
from benchmarks.study.gaps import cell_of, gap, runs_of
from benchmarks.study.matrix import Point
from benchmarks.study.sizes import SIZES
from megatron_fp4.arithmetic.formats import NUMERICS_VERSION
from tests.benchmarks.study.prose import rows_of
from tools import rows as rows_file

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/study.md").read_text()
# By committed result: the page with its tables, and the device of its runs.
COMMITTED = {
    "tiny": ("docs/study.md", "CPU"),
    "windows": ("docs/notes/oscillation.md", "CPU"),
    "delays": ("docs/notes/oscillation.md", "CPU"),
    "few-bits-tiny": ("docs/notes/few-bits.md", "CPU"),
    "few-bits": ("docs/notes/few-bits.md", "NVIDIA H200"),
    "few-bits-ddp": ("docs/notes/few-bits.md", "NVIDIA H200"),
    "input-store": ("docs/notes/few-bits.md", "NVIDIA H200"),
    "backward-3M": ("docs/design-space.md", "NVIDIA H200"),
    "trades": ("docs/design-space.md", "NVIDIA H200"),
    "oscillation-3M": ("docs/notes/oscillation.md", "NVIDIA H200"),
    "estimators": ("docs/notes/estimators.md", "CPU"),
    "rates-3M": ("docs/notes/estimators.md", "NVIDIA H200"),
    "two-rates-3M": ("docs/notes/estimators.md", "NVIDIA H100"),
    "low-rates-3M": ("docs/notes/estimators.md", "NVIDIA H200"),
    "recipes-3M": ("docs/study.md", "NVIDIA H200"),
    "rates-26M": ("docs/study.md", "NVIDIA H200"),
    "largest": ("docs/study.md", "NVIDIA H200"),
    "served": ("docs/study.md", "NVIDIA H200"),
    "served-3M": ("docs/study.md", "NVIDIA H200"),
    "recipes": ("docs/study.md", "NVIDIA H200"),
    "ablations": ("docs/study.md", "NVIDIA H200"),
    "sweep-best": ("docs/design-space.md", "NVIDIA H200"),
}


UNFINISHED = {
    "ablations-3M": "docs/study.md",
    "candidates": "docs/study.md",
    "one-epoch": "docs/study.md",
    "same-loss-3M": "docs/study.md",
    "sizes": "docs/study.md",
}  # tables of the runs so far
PAGES = {name: page for name, (page, _) in COMMITTED.items()} | UNFINISHED


TINY = matrix.read("tiny")
ROWS = rows_of("tiny")


@pytest.mark.parametrize("name", PAGES)
def test_the_tables_are_the_committed_result(name: str) -> None:
    page, study, rows = (ROOT / PAGES[name]).read_text(), matrix.read(name), rows_of(name)
    assert showing.into(page, name, showing.section(study, rows)) == page
    last_step, loss = rows[0]["held_out"][-1]
    changed = [row | {"held_out": [[last_step, loss + 0.01]]} for row in rows[:1]]
    other = showing.section(study, changed + rows[1:])
    assert showing.into(page, name, other) != page  # the control


@pytest.mark.parametrize("name", COMMITTED)
def test_the_result_has_every_run_once(name: str) -> None:
    study, rows = matrix.read(name), rows_of(name)
    finished, failed = showing.rows_of(study, rows)
    assert len(finished) == len(rows) == len(study.points()) and not failed
    assert len({row["hash"] for row in rows}) == len(rows)
    assert all(row["stamp"]["device"][0].startswith(COMMITTED[name][1]) for row in rows)


def test_figures_of_the_finalists_among_the_candidates() -> None:
    rows, folder = rows_of("candidates"), "benchmarks/study/candidates/"
    cell = next(each for each in tables.cells(rows) if each.learning_rate == 2e-3)

    def above(name: str, other: str = "bf16", seeds: int = 2) -> float:
        found = gap(rows, cell, name, other)
        assert found is not None and len(found.by_seed) == seeds
        return found.mean

    tetrajet = above("tetrajet")
    then, ends, mse, both = (
        above(f"{folder}{name}-then-fp8.yaml")
        for name in ("tetrajet", "fp8-ends", "mse-16", "mse-16-ends")
    )
    for text in (
        f"loss above BF16's is {tetrajet:.4f} for `tetrajet`",
        f"lowers it to {then:.4f}, and the first and the last layer in `fp8` too to {ends:.4f}",
        f"in addition, these are {mse:.4f} and {both:.4f}",
        f"`fp8` itself is at {above('fp8'):.4f}",
        f"ends {above(folder + 'sweep-e8m0-dge.yaml', 'tetrajet', seeds=1):.4f} above `tetrajet`",
    ):
        assert text in PAGE
    below = {each: each < tetrajet / 2 for each in (then, ends, mse, both)}
    assert list(below.values()) == [False, True, True, True]


def test_figures_in_running_text_of_the_candidates() -> None:
    rows, folder = rows_of("candidates"), "benchmarks/study/candidates/"
    loss = {
        (row["configuration"]["recipe"], row["configuration"]["learning_rate"]): last
        for row in rows
        if row["configuration"]["seed"] == 1
        for _, last in row["held_out"][-1:]
    }
    plain = loss["bf16", 0.002]

    def above(name: str, other: str = "bf16") -> float:
        one, two = (
            each if (each, 0.002) in loss else f"{folder}{each}.yaml" for each in (name, other)
        )
        return loss[one, 0.002] - loss[two, 0.002]

    assert 0.5 < above("tetrajet-then-fp8") / above("tetrajet") < 0.55
    assert 0 < above("tetrajet-then-fp8", "fp8-ends-then-fp8") < 0.01
    nearest = above("nearest-then-fp8", "tetrajet-then-fp8")
    dge = above("tetrajet-dge", "tetrajet")
    both = above("mse-16-nearest-dge-then-fp8", "mse-16-nearest-then-fp8")
    lower = loss["bf16", 0.0014] - plain
    for text in (
        f"backward pass costs {nearest:.3f} more than stochastic rounding",
        f"DGE costs {dge:.3f} on `tetrajet`, and {both:.3f} on the candidate with it",
        f"a lower rate of all weights costs BF16 {lower:.3f} (one seed).",
        f"forward pass is in BF16, costs {above('mxfp4-rht-sr'):.3f} (one seed).",
    ):
        assert text in PAGE


def test_what_begins_with_other_weights_under_tensor_parallelism() -> None:
    layout, step = " --tensor-model-parallel-size 2 --sequence-parallel", 600
    rows = [row for row in rows_of("same-loss-3M") if row["configuration"]["seed"] == 1]
    whole = {row["configuration"]["recipe"]: dict(row["train"]) for row in rows}
    file = ROOT / "benchmarks/results/same-loss-begins.json"
    begins = {row["recipe"]: dict(row["train"]) for row in json.loads(file.read_text())["rows"]}
    behind = [begins[name + layout][step] - whole[name][step] for name in ("bf16", "tetrajet")]
    assert f"by {behind[0]:.3f}, and `tetrajet` behind `tetrajet` by {behind[1]:.3f}" in PAGE
    repeated = begins["tetrajet" + layout]
    assert len(repeated) == 21 and repeated.items() <= whole["tetrajet" + layout].items()


def test_every_committed_result_is_in_a_page() -> None:
    files = (ROOT / "benchmarks/results").glob("study-*.jsonl")
    found = {path.stem.removeprefix("study-") for path in files}
    of_sweep = {"sweep"}  # see tests/tools/sweep/test_page.py
    assert found == {*COMMITTED, *UNFINISHED, *of_sweep}


def test_the_last_run_of_a_point_counts() -> None:
    """A run that was made anew, of another numerics version, is no other rounding seed."""
    name = "recipes-3M"
    study, rows = matrix.read(name), rows_of(name)
    step, loss = rows[0]["held_out"][-1]
    other = rows[0]["configuration"] | {"numerics": 99}
    anew = {"hash": hash_of(other), "configuration": other}
    again = rows[0] | anew | {"held_out": [[step, loss + 1.0]]}
    finished, failed = showing.rows_of(study, [*rows, again])
    assert len(finished) == len(rows) and again in finished and rows[0] not in finished
    failure = {"hash": "f", "status": "failed", "error": "it broke"}
    error = failure | {"configuration": other, "text": rows[0]["text"]}
    finished, failed = showing.rows_of(study, [*rows, error, error])
    assert rows[0] in finished and failed == []
    _, failed = showing.rows_of(study, [*rows[1:], error, error])
    assert failed == [error]


def test_runs_with_other_flags_than_the_matrix_has_do_not_count() -> None:
    """The mistake: after a change of the matrix its earlier runs stand beside the new ones."""
    study, rows = matrix.read("few-bits-ddp"), rows_of("few-bits-ddp")
    finished, _ = showing.rows_of(study, rows)
    assert len(finished) == len(rows)
    for changed in (replace(study, flags="--weight-decay 0"), replace(study, ranks=1)):
        assert showing.rows_of(changed, rows) == ([], [])
        assert {point_of(row["configuration"]) for row in rows} == {*changed.points()}
    evaluated = replace(study, evaluate_in=["bf16"])  # which changes no training
    assert showing.rows_of(evaluated, rows)[0] == finished


@pytest.mark.parametrize("name", UNFINISHED)
def test_a_result_that_grows_has_runs_of_its_matrix(name: str) -> None:
    study, rows = matrix.read(name), rows_of(name)
    finished, failed = showing.rows_of(study, rows)
    assert 0 < len(finished) == len(rows) < len(study.points()) and not failed


@pytest.mark.parametrize("name", [*COMMITTED, *UNFINISHED])
def test_a_run_of_a_table_is_not_run_again(name: str) -> None:
    """Each line of the result file has the hash of its configuration, and what is left to run is
    what the tables lack."""
    path = ROOT / default_results(matrix.read(name))
    assert all(r["hash"] == hash_of(r["configuration"]) for r in rows_file.read(path, {"hash"}))
    study, rows = matrix.read(name), rows_of(name)
    finished, _ = showing.rows_of(study, rows)
    today = [row for row in finished if row["configuration"]["numerics"] == NUMERICS_VERSION]
    done = results.finished(rows)
    for row in today:
        point = point_of(row["configuration"])
        assert hash_of(configuration(study, point, row["text"])) in done, point


def test_a_recipe_file_that_was_edited_is_run_again() -> None:
    study, rows = matrix.read("candidates"), rows_of("candidates")
    finished, _ = showing.rows_of(study, rows)
    edited = [
        row | {"configuration": of | {"recipe_fields": of["recipe_fields"] | {"name": "edited"}}}
        for row in rows
        if "recipe_fields" in (of := row["configuration"])
    ]
    assert edited and showing.rows_of(study, edited) == ([], [])
    assert len(finished) == len(rows) > len(edited)


@pytest.mark.parametrize("name", [*COMMITTED, *UNFINISHED])
def test_no_path_of_a_machine_is_recorded(name: str) -> None:
    content = (ROOT / default_results(matrix.read(name))).read_text()
    assert not re.search(r"/(work|tmp|home|root|usr)\b", content)


def test_the_page_lists_the_matrices_and_the_sizes() -> None:
    for name in matrix.names():
        study = matrix.read(name)
        finished, _ = showing.rows_of(study, rows_of(name))
        assert f"| `{name}` | {len(finished)} of {len(study.points())} | " in PAGE
    for name, size in SIZES.items():
        gpus = "1 |" if size.gpus == 1 else f"up to {size.gpus}, which"
        model = size.model
        assert f"| `{name}` | {model.layers} | {model.hidden} | {size.tokens:,} | {gpus}" in PAGE


def cells(lines: list[str], start: str) -> list[str]:
    [line] = [line for line in lines if line.startswith(start)]
    return [cell.strip() for cell in line.split("|")[1:-1]]


def test_a_line_of_each_table_is_what_its_rows_say() -> None:
    place = "| tiny | 240 | 0.004 | `mxfp4` |"
    cell = next(c for c in tables.cells(ROWS) if (c.steps, c.learning_rate) == (240, 4e-3))
    own, base = (
        {
            row["configuration"]["seed"]: row
            for row in ROWS
            if row["configuration"]["recipe"] == recipe
            and row["configuration"]["steps"] == 240
            and row["configuration"]["learning_rate"] == 4e-3
        }
        for recipe in ("mxfp4", "bf16")
    )
    losses = [own[seed]["held_out"][-1][1] for seed in (1, 2, 3)]
    differences = [own[seed]["held_out"][-1][1] - base[seed]["held_out"][-1][1] for seed in own]
    assert cells(tables.loss_table(ROWS), place)[4:] == [
        "3", f"{sum(losses) / 3:.4f}", f"{max(losses) - min(losses):.4f}",
    ]  # fmt: skip
    found = cells(tables.gap_table(ROWS, "bf16"), place)
    assert found[5] == f"{sum(differences) / 3:+.4f}"
    assert found[6] == f"{min(differences):+.4f} to {max(differences):+.4f}"  # of 3 seeds
    perplexities, plain = (
        [math.exp(row["held_out"][-1][1]) for row in by_seed.values()] for by_seed in (own, base)
    )
    ratio = statistics.geometric_mean(perplexities) / statistics.geometric_mean(plain)
    assert found[7] == f"{ratio:.4f}"
    assert found[8:] == [f"{max(differences) - min(differences):.4f}", "higher"]
    rates = [row["metrics"]["weight"]["r_quantized"][-1] for row in own.values()]
    assert {step for step, _ in rates} == {240}
    assert (
        cells(tables.oscillation_table(ROWS, 60), place)[6] == f"{sum(r for _, r in rates) / 3:.4f}"
    )
    assert gap(ROWS, cell, "mxfp4", "bf16") is not None


def test_the_papers_figures_stand_beside_its_window_alone() -> None:
    for window, heads in ((60, 9), (200, 10)):
        found = tables.oscillation_table(ROWS, window)
        assert all(len(line.split("|")) == heads + 2 for line in found)
    assert cells(found, "| tiny | 60 | 0.001 | `tetrajet` |")[-1] == "0.0045"


def test_rounding_seeds_have_a_column_where_there_are_any() -> None:
    row = next(row for row in ROWS if row["configuration"]["recipe"] == "mxfp4")
    point = row["configuration"] | {"rounding_seed": 7}
    again = row | {"configuration": point, "held_out": [[60, row["held_out"][-1][1] + 0.25]]}
    assert "rounding" not in tables.loss_table(ROWS)[0]
    found = tables.loss_table([*ROWS, again])
    assert "rounding" in found[0]
    assert cells(found, "| tiny | 60 | 0.001 | `mxfp4` |")[-1] == "0.2500"
    assert cells(found, "| tiny | 60 | 0.001 | `tetrajet` |")[-1] == ""


def test_failures_are_listed(tmp_path: Path) -> None:
    point, text = Point("mxfp4", "tiny", 1e-3, 60, 1, 1), ROWS[0]["text"]
    failed: dict[str, Any] = {
        "hash": "f", "status": "failed", "configuration": configuration(TINY, point, text),
        "text": text, "error": "RuntimeError: x",
    }  # fmt: skip
    found = showing.section(TINY, [ROWS[0], failed, failed])
    assert "- Failed: mxfp4, tiny, 60 steps, learning rate 0.001, seed 1: RuntimeError: x" in found
    assert "Failed" not in showing.section(TINY, [ROWS[0], failed])  # there is another try
    with pytest.raises(StudyError, match="no run of tiny has finished: `run` trains"):
        showing.section(TINY, [failed])
    with pytest.raises(StudyError, match=r"none\.jsonl does not exist: `run` writes it"):
        showing.show(TINY, tmp_path / "none.jsonl", None, None)


def test_a_recipe_that_does_not_quantize_w_has_no_rates(tmp_path: Path) -> None:
    """Its metrics have no r(W_Q), as those of a forward pass in BF16."""
    row = next(row for row in ROWS if row["configuration"]["recipe"] == "tetrajet")
    weight = {key: of for key, of in row["metrics"]["weight"].items() if key != "r_quantized"}
    other = row | {"configuration": row["configuration"] | {"recipe": "mxfp4-rht-sr"}}
    rows = [*ROWS, other | {"metrics": row["metrics"] | {"weight": weight}}]
    [cell] = [cell for cell in tables.cells(rows) if cell == cell_of(row)]
    assert pictures._rates(rows, cell, "mxfp4-rht-sr") == []
    assert len(pictures._rates(rows, cell, "tetrajet")) == 3


def test_show_writes_a_page_and_pictures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, out = tmp_path / "page.md", tmp_path / "pictures"
    page.write_text("Before\n<!-- study: tiny -->\nold\n<!-- end of study: tiny -->\nAfter\n")
    words = ["show", "tiny", "--results", str(ROOT / default_results(TINY)), "--page", str(page)]
    assert main([*words, "--pictures", str(out)]) == 0
    text = page.read_text()
    assert text.startswith("Before\n") and text.endswith("\nAfter\n") and "old" not in text
    drawn = sorted(out.iterdir())
    assert [path.name for path in drawn] == ["study-tiny-curves.svg", "study-tiny-gaps.svg"]
    assert all("tiny, 240 steps, lr 0.004" in path.read_text() for path in drawn)
    page.write_text("no marks")
    assert main(words) == 2
    assert "<!-- study: tiny -->" in capsys.readouterr().err


def test_curves_are_means_over_the_seeds() -> None:
    """The mistake: a seed with several rounding seeds counts as often as it has runs."""
    cell = next(c for c in tables.cells(ROWS) if (c.steps, c.learning_rate) == (60, 1e-3))

    def curves(rows: list[results.Row]) -> list[dict[float, float]]:
        each = (pictures._training_gaps, pictures._norms, pictures._rates)
        return [dict(pictures.mean(series_of(rows, cell, "mxfp4"))) for series_of in each]

    row = next(iter(runs_of(ROWS, cell, "mxfp4")))
    again = row | {"configuration": row["configuration"] | {"rounding_seed": 7}}
    rows, plain = [*ROWS, again], curves(ROWS)
    assert all(plain) and curves(rows) == [pytest.approx(each) for each in plain]
    of_runs = pictures.mean([each["grad_norms"] for each in runs_of(rows, cell, "mxfp4")])
    assert dict(of_runs) != pytest.approx(plain[1])  # the control


def test_a_curve_is_the_mean_where_all_runs_have_it() -> None:
    assert pictures.mean([[(1, 2.0), (2, 4.0)], [(2, 5.0), (3, 9.0)]]) == [(2, 4.5)]
    assert pictures.mean([]) == []
