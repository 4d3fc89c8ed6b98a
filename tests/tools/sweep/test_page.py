"""docs/design-space.md: its tables are those of the code and of the committed results."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import pytest
import yaml

from benchmarks.study import matrix, showing, tables
from benchmarks.study.gaps import gap
from megatron_fp4 import get_recipe
from tests.tools.sweep.test_axes import unnamed
from tests.tools.sweep.test_statistics import STARS
from tools import pages, rows
from tools.rows import Row
from tools.sweep import __main__, factorial, llama, page, promotion, results
from tools.sweep.agreement import agreement
from tools.sweep.axes import Combination
from tools.sweep.building import recipe_of
from tools.sweep.findings import FINDINGS
from tools.sweep.pareto import draw, to_confirm
from tools.sweep.promotion import on_lines, promoted, random_lines

SUFFICES = "A straight-through estimator suffices: {} does not help"
LIMITS = "The scale's format is the bottleneck: {}"
UNDER_TENSOR_SCALE = [f"{each} under a tensor scale helps" for each in ("E4M3", "UE5M3")]
DOCS = Path(__file__).parents[3] / "docs"
PAGE, PICTURE = DOCS / "design-space.md", DOCS / "images/design-space.svg"


def test_the_axes_are_the_code_s() -> None:
    text = PAGE.read_text()
    assert pages.into(text, "axes", "\n".join(page.axes_table())) == text


def test_the_results_are_the_committed_ones() -> None:
    text = PAGE.read_text()
    section = page.section(__main__.all_rows(__main__.RESULTS, llama.RESULTS))
    assert pages.into(text, "sweep", section) == text


def test_the_picture_is_that_of_the_results(tmp_path: Path) -> None:
    found = __main__.all_rows(__main__.RESULTS, llama.RESULTS)
    stage = page.last_stage(found)
    draw(page.points_of(found, stage), f"score of {stage}", tmp_path / "p.svg")
    assert (tmp_path / "p.svg").read_bytes() == PICTURE.read_bytes()


def test_the_last_stage_is_complete(tmp_path: Path) -> None:
    """Its runs are those of the matrix that the stages before promote."""
    path = tmp_path / "sweep.yaml"
    path.write_text(llama.matrix(promoted(__main__.all_rows(__main__.RESULTS, llama.RESULTS), 3)))
    study, found = matrix.read(str(path)), rows.read(llama.RESULTS, llama.KEYS)
    finished, failed = showing.rows_of(study, found)
    assert len(finished) == len(found) == len(study.points()) and not failed


def test_the_best_were_trained_again() -> None:
    """The committed matrix is what `best` makes of the committed results."""
    every = page.points_of(__main__.all_rows(__main__.RESULTS, llama.RESULTS), llama.NAME)
    committed = yaml.safe_load((matrix.FOLDER / "sweep-best.yaml").read_text())
    assert committed == yaml.safe_load(llama.matrix_of_best(to_confirm(every)))


@pytest.mark.parametrize(
    ("name", "chosen"),
    [
        (
            "sweep-ue5m3-dge",
            {"scale": "ue5m3", "rule": "nearest", "backward_rule": "inflated"}
            | {"outer_scale": "tensor"},
        ),
        ("sweep-e8m0-dge", {"rule": "ceil", "backward_rule": "ceil"}),
    ],
)
def test_combinations_that_are_recipe_files(name: str, chosen: dict[str, str]) -> None:
    """They are among the best that were trained again, and the page says which."""
    each = Combination(block="16", rounding="gradients", estimator="dge", **chosen)
    path = matrix.FOLDER / f"candidates/{name}.yaml"
    assert unnamed(get_recipe(path)) == unnamed(recipe_of(each))
    found = rows.read(Path("benchmarks/results/study-sweep-best.jsonl"), llama.KEYS)
    [cell] = tables.cells(found)
    gaps = {recipe: gaps_of(found, cell, recipe) for recipe in tables.recipes(found)}
    dge = [recipe for recipe in gaps if "dge" in recipe]
    assert max(gaps[recipe] for recipe in dge if "e8m0" not in recipe and "ceil" not in recipe) < 0
    if name == "sweep-e8m0-dge":
        fast = {recipe: gap for recipe, gap in gaps.items() if "block=16,rule=ceil" in recipe}
        assert min(fast, key=fast.__getitem__) == llama.recipe(each) and len(fast) == 2


def gaps_of(found: list[Row], cell: tables.Cell, recipe: str) -> float:
    own = gap(found, cell, recipe, "bf16")
    assert own is not None and len(own.by_seed) == len(llama.FRESH_SEEDS)
    return own.mean


def test_figures_in_words() -> None:
    found = __main__.all_rows(__main__.RESULTS, llama.RESULTS)
    text = " ".join(PAGE.read_text().split())
    last = agreement(found, "diffusion", llama.NAME)
    assert last is not None and last.predicts
    low, high = last.interval
    assert f"the rank correlation is {last.correlation:.2f} ({low:.2f} to {high:.2f})" in text
    assert f"Among the better half of them it is {last.better_half:.2f}." in text
    scores, stars = results.scores(found, llama.NAME), promotion.stars_of(found)
    own = {each: score for each, score in scores.items() if stars[each] == factorial.STAR}
    by_seed = []
    for seed in ("1", "2"):
        every = results.scores(found, llama.NAME, [seed])
        by_seed.append({each: every[each] for each in own})
    change = {claim.claim: mean(claim.differences(own)) for claim in FINDINGS}
    verdict = {claim.claim: claim.verdict(own, by_seed) for claim in FINDINGS}
    formats = [LIMITS.format(each) for each in ("scales in float32 help", *UNDER_TENSOR_SCALE)]
    assert {verdict[claim] for claim in formats} == {"held"}
    float32, e4m3, ue5m3 = (f"{-change[claim]:.3f}" for claim in formats)
    assert (
        f"float32 scales lower the loss by {float32}, E4M3 scales under a tensor scale by {e4m3}, "
        f"and UE5M3 scales under one by {ue5m3}."
    ) in text
    needed = "UE5M3 needs a tensor scale"
    assert verdict[needed] == "held"
    assert f"without it the loss is {-change[needed]:.2f} higher" in text
    open_ones = [
        LIMITS.format("UE5M3 is better than E4M3"),
        "UE5M3 needs stochastic rounding of dY",
    ]
    open_ones += [claim for claim in verdict if claim.startswith("Under a tensor scale")]
    assert len(open_ones) == 5 and {verdict[claim] for claim in open_ones} == {"not decided"}
    estimators = [SUFFICES.format(form) for form in ("dge", "spline", "sigmoid")]
    assert [verdict[claim] for claim in estimators] == ["not held", "held", "held"]
    assert f"`dge` lowers the loss by {-change[estimators[0]]:.3f} here" in text


def test_a_stage_without_the_training_around_a_recipe_says_nothing_of_it() -> None:
    """The mistake: runs that do not scale the loss count as such that do."""
    [claim] = [each for each in FINDINGS if "loss is scaled" in each.claim]
    found = __main__.all_rows(__main__.RESULTS, llama.RESULTS)
    assert len(claim.differences(results.scores(found, llama.NAME))) >= 3
    section = page.section(found)
    [line] = [each for each in section.splitlines() if claim.claim in each]
    assert line.endswith("|  | not decided |")
    best = section.split("The best 10 of `llama`")[1]
    assert "loss_scale" not in best and "optimizer" not in best


def test_tables_of_results() -> None:
    """A rule that is better by 2 and a block that is worse by .5, in two levels of stages."""
    lines = on_lines(random_lines(STARS, 10))
    some = [e for place, e in enumerate(STARS) if place < 60 or e in lines]

    def loss(each: Combination) -> float:
        return -2.0 * (each.rule == "ceil") + 0.5 * (each.block == "16")

    found: list[Row] = [
        {
            "stage": stage,
            "status": "failed" if (stage, each) == ("digits", some[3]) else "finished",
            "star": STARS[each],
            "combination": each.chosen,
            "seconds": 1.25,
            "seeds": {"1": {name: loss(each)}, "2": {name: loss(each)}},
        }
        for each in some
        for stage, name in (("products", "score"), ("digits", "loss"))
    ]
    for row in found:
        for figures in row["seeds"].values():
            figures |= {"y error": figures.get("score", 0.0), "dw error": 0.0}
    text = page.section(found)
    (line,) = (each for each in text.splitlines() if each.startswith("| `digits` | a class"))
    hours = 1.25 * len(some) / 3600
    assert line.endswith(f" | {len(some):,} | 1 | 2 | 1.2 | {hours:.2f} |")
    (line,) = (each for each in text.splitlines() if each.startswith("| `products` | `digits` |"))
    assert " 1.00 | 1.00 to 1.00 | 1.00 | 1.00 | 1.00 | yes |" in line
    assert "Not complete yet: `draws`, `regression`, `diffusion`, `llama`." in text
    found_lines = [each for each in text.splitlines() if each.startswith("| `block` | `16` |")]
    assert len(found_lines) == 2 and all("+0.5 (+0.5 to +0.5; " in each for each in found_lines)
    assert f"The best {page.BEST} of `digits`" in text
    best = min(loss(each) for each in some if each.forward == each.backward == "fp4")
    assert best == -2.0 and "\n| -2.0000 ± 0.0000 | " in text
    assert "is better in `digits` and needs less time on blackwell than these:" in text


def test_no_results_are_an_error() -> None:
    with pytest.raises(ValueError, match="python -m tools.sweep run products"):
        page.section([])
    with pytest.raises(ValueError, match="<!-- sweep -->"):
        pages.into("a page", "sweep", "tables")
