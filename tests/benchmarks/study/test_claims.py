"""The claims of docs/paper-claims.md: figures are those of results, and verdicts follow."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.study import claims_table, tables
from benchmarks.study.claims import CLAIMS, SPACE
from benchmarks.study.claims_table import place_of, seen_of_effects
from benchmarks.study.committed import runs_of_study
from benchmarks.study.errors import StudyError
from benchmarks.study.gaps import ENOUGH, Gap
from benchmarks.study.papers import PAPERS
from benchmarks.study.verdicts import (
    NOISE,
    Claim,
    Effect,
    Expected,
    Pair,
    effect_of,
    verdict,
    verdict_of_effect,
)
from tests.benchmarks.study.prose import recipes_prose
from tools.rows import Row
from tools.sweep import __main__, llama, page, promotion, results
from tools.sweep.axes import Combination
from tools.sweep.findings import FINDINGS, Finding, summary, verdict_of
from tools.sweep.main_effects import MAIN_EFFECTS, MainEffect
from tools.sweep.words import WORDS, Word

DOCS = Path(__file__).parents[3] / "docs"
SPACE_TEXT = (DOCS / SPACE).read_text()
KINDS: list[Expected] = ["lower", "higher", "equal"]
OF_EFFECTS = [claim for claim in CLAIMS if claim.effects]
Change = MainEffect | Word | Finding
Scores = dict[Combination, float]
# The changes of the sweep by the first cells of their rows.
CHANGES: dict[str, Change] = {each.claim: each for each in FINDINGS}
CHANGES |= {f"{each.what} | {each.where}": each for each in MAIN_EFFECTS}
CHANGES |= {f"{each.what} | {each.where}": each for each in WORDS}


@pytest.fixture(scope="module")
def scores() -> dict[str, list[Scores]]:
    """By stage the scores of the combinations that go through all stages: their mean over the
    seeds, and those of each seed."""
    rows = __main__.all_rows(__main__.RESULTS, llama.RESULTS)
    found = {}
    for stage, own in page.of_design(rows, promotion.DESIGNED).items():
        by_seed = [results.scores(rows, stage, [seed]) for seed in ("1", "2")]
        found[stage] = [own, *({each: one[each] for each in own} for one in by_seed)]
    return found


def decided(of: list[Scores], change: Change, minus: Change | None = None) -> str:
    """The sweep's verdict on the claim that a change lowers the loss, or lowers it by more than
    another one in the same pairs does."""

    def differences(scores: Scores) -> list[float]:
        own = change.differences(scores)
        others = [0.0] * len(own) if minus is None else minus.differences(scores)
        return [each - other for each, other in zip(own, others, strict=True)]

    means = [sum(differences(each)) / len(differences(each)) for each in of[1:]]
    return verdict_of(differences(of[0]), means)


def cell(found: Effect) -> str:
    return f"{found.mean:+.4f} ({found.low:+.4f} to {found.high:+.4f}; {found.pairs})"


@pytest.mark.parametrize("claim", OF_EFFECTS, ids=lambda claim: claim.text)
def test_effects_are_those_of_the_results(claim: Claim, scores: dict[str, list[Scores]]) -> None:
    """So is the verdict, for which each of the two seeds counts too."""
    of = scores[claim.stage]
    for row in claim.effects:
        assert SPACE_TEXT.count(f"\n| {row} |") == 1
        found = effect_of(SPACE_TEXT, row, claim.stage)
        assert cell(found) == summary(CHANGES[row].differences(of[0]))
        told = {"held": -1, "not held": 1, "not decided": 0}[decided(of, CHANGES[row])]
        assert told == (found.low > 0) - (found.high < 0)
        seen, _ = seen_of_effects(SPACE_TEXT, claim)
        assert f"{cell(found).partition(';')[0]}), {found.pairs} pairs" in seen


def test_another_figure_of_the_page_is_noticed() -> None:
    claim = OF_EFFECTS[0]
    row, other = claim.effects
    changed = re.sub(rf"(\n\| {re.escape(row)} .*) -0\.0", r"\1 -0.1", SPACE_TEXT)
    assert seen_of_effects(changed, claim) != seen_of_effects(SPACE_TEXT, claim)
    stage = replace(claim, stage="diffusion")
    assert seen_of_effects(SPACE_TEXT, stage) != seen_of_effects(SPACE_TEXT, claim)
    with pytest.raises(StudyError, match="has no row 'a row' with a mean of llama"):
        effect_of(SPACE_TEXT, "a row", "llama")
    with pytest.raises(StudyError, match="has no row"):  # it has no model of this row
        effect_of(SPACE_TEXT, "a loss scale of 65536 | UE5M3", "llama")
    assert effect_of(SPACE_TEXT, other, "llama") != effect_of(SPACE_TEXT, row, "llama")


@pytest.mark.parametrize(
    ("low", "high", "lower", "higher", "equal"),
    [
        (-0.3, -0.1, "held in 300 steps", "not held in 300 steps", "held in 300 steps"),
        (0.1, 0.3, "not held in 300 steps", "held in 300 steps", "not held in 300 steps"),
        (-0.1, 0.3, "not decided", "not decided", "no difference above the spread"),
        (0.0, 0.3, "not decided", "not decided", "no difference above the spread"),
    ],
)
def test_the_verdict_of_an_effect(
    low: float, high: float, lower: str, higher: str, equal: str
) -> None:
    found = Effect((low + high) / 2, low, high, 4)
    assert verdict_of_effect(found, "lower") == lower
    assert verdict_of_effect(found, "higher") == higher
    assert verdict_of_effect(found, "equal") == equal


def test_verdicts_that_are_written_by_hand(scores: dict[str, list[Scores]]) -> None:
    """Each is no more than what the pairs decide."""
    written = {claim.text: claim for claim in OF_EFFECTS if claim.verdict}
    forward = written.pop("most of the loss is of the forward pass")
    fprop, others = (CHANGES[row] for row in forward.effects)
    of = scores["llama"]
    assert decided(of, fprop) == "held" and decided(of, others) == "not decided"
    assert decided(of, fprop, others) == "not decided"  # so the claim as a whole is not held
    assert forward.verdict == "held for fprop in 300 steps, not decided for dgrad and wgrad"
    clipped = written.pop("values times 3/4, which do not clip, lose less than those that may")
    three_quarters, floor = (CHANGES[row] for row in clipped.effects)
    assert decided(of, three_quarters, floor) == "not decided" and clipped.verdict == "not decided"
    formats = written.pop("the format of block scales matters most")
    assert formats.verdict.startswith("not decided: it matters")
    assert {decided(of, CHANGES[row]) for row in formats.effects} == {"held"}
    # "Other parts as much": fprop.
    least = min(effect_of(SPACE_TEXT, row, "llama").mean for row in formats.effects)
    assert effect_of(SPACE_TEXT, forward.effects[0], "llama").mean < least
    [scaled] = written.values()
    alone, beside = (CHANGES[row] for row in scaled.effects)
    assert scaled.stage == "diffusion" and not alone.differences(scores["llama"][0])
    found = [decided(scores["diffusion"], each) for each in (alone, beside)]
    assert found == ["held", "not decided"]
    assert scaled.verdict == "held in a small model without a tensor scale"


def test_what_the_training_loss_does_without_the_mean() -> None:
    """tests/tools/sweep/test_page_words.py holds the page's sentence to the results."""
    [claim] = [claim for claim in OF_EFFECTS if claim.seen and claim.stage == "llama"]
    [figure] = re.findall(r"changes by ([+-][\d.]+)", claim.seen)
    assert f"that are recorded, changes by {figure}." in " ".join(SPACE_TEXT.split())
    assert "Evaluation therefore leaves the mean in X" in (DOCS / "recipe-files.md").read_text()


def test_the_legend_has_the_numbers_of_seeds() -> None:
    text = recipes_prose()
    assert (ENOUGH, NOISE) == (4, 0.01)
    for said in (
        "From four seeds on its bootstrap interval follows, as (a to b). Of two or three ",
        "below 0.01 with one to three seeds, or of one seed at another size than 26M. Of a claim ",
        "With four or more seeds such a claim also held if the whole interval is at or below",
    ):
        assert said in text, said


def test_figures_of_claims_that_refer_to_a_page_are_on_it() -> None:
    for claim in CLAIMS:
        sources = [claim.pair is not None, bool(claim.effects), bool(claim.page)]
        assert sum(sources) == 1, claim.text
        assert bool(claim.page) == bool(claim.seen and claim.verdict and not claim.effects)
        text = (DOCS / claim.page).read_text() if claim.page else ""
        for figure in re.findall(r"[+-]?\d+\.\d+", claim.seen if claim.page else ""):
            assert figure in text, (claim.text, figure)
    assert {claim.paper for claim in CLAIMS} == PAPERS.keys()


@pytest.mark.parametrize(
    ("by_seed", "lower", "higher", "equal"),
    [
        ({1: -0.02, 2: -0.03}, "held", "not held", "held"),
        ({1: 0.02, 2: 0.03}, "not held", "held", "not held"),
        ({1: -0.02, 2: 0.03}, "not decided", "not decided", "no difference above the spread"),
        ({1: -0.007, 2: -0.0071}, "not decided", "not decided", "not decided"),
        ({1: -0.007, 2: -0.0071, 3: -0.007}, "not decided", "not decided", "not decided"),
        ({1: -0.007, 2: -0.0071, 3: -0.007, 4: -0.007}, "held", "not held", "held"),
        ({1: 0.009}, "not decided", "not decided", "not decided"),
        ({1: 0.02}, "not held, one seed", "held, one seed", "not held, one seed"),
    ],
)
def test_the_verdict_of_a_claim(
    by_seed: dict[int, float], lower: str, higher: str, equal: str
) -> None:
    expected = {"lower": lower, "higher": higher, "equal": equal}
    assert {each: verdict(Gap(by_seed), each) for each in KINDS} == expected


def test_the_interval_counts_in_the_direction_of_the_claim() -> None:
    far = Gap({seed: -0.5 - seed / 1000 for seed in range(4)})
    assert [verdict(far, each, 0.02) for each in KINDS] == ["held", "not held", "held"]


def test_the_cell_of_a_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest runs of the newest numerics version, with the pair's learning rate."""
    rows, study = runs_of_study("oscillation-3M")

    def changed(row: Row, **values: Any) -> Row:
        return row | {"configuration": row["configuration"] | values}

    of_rate = [row for row in rows if row["configuration"]["learning_rate"] == 1e-3]
    shorter = [changed(row, steps=10, numerics=3) for row in of_rate]
    longer = [changed(row, steps=20, numerics=3) for row in of_rate]
    first = tables.cells(rows)[0]
    pair = Pair("tetrajet-ema", "tetrajet", "oscillation-3M", 1e-3)
    for found, steps, numerics in (
        (of_rate, max(row["configuration"]["steps"] for row in rows), 2),
        (of_rate + shorter + longer, 20, 3),
        (longer + shorter + of_rate, 20, 3),
    ):
        monkeypatch.setattr(claims_table, "runs_of_study", lambda name, own=found: (own, study))
        words, own, cell = place_of(rows, first, pair)
        assert cell is not None and (cell.steps, cell.numerics) == (steps, numerics)
        assert own == found and ("numerics version 2" in words) == (numerics == 2)
    monkeypatch.setattr(claims_table, "runs_of_study", lambda name: (rows, study))
    with pytest.raises(StudyError, match="names one of several cells of oscillation-3M"):
        place_of(rows, first, replace(pair, rate=None))


def test_a_claim_may_allow_a_difference() -> None:
    found = Gap({1: 0.024, 2: 0.026})
    assert verdict(found, "equal") == verdict(found, "equal", 0.01) == "not held"
    assert verdict(found, "equal", 0.04) == "held"
    for most in (0.02, 0.03):  # by less than rounding noise above and below it
        assert verdict(found, "equal", most) == "not decided"
    wide = Gap({1: 0.0, 2: 0.02, 3: 0.018, 4: 0.002})
    assert verdict(wide, "equal", 0.02) == "held"
    assert verdict(wide, "equal", 0.015) == "not decided"
    assert verdict(Gap({1: 0.056, 2: 0.079}), "equal", 0.06) == "not decided"
    assert verdict(Gap({1: 0.07, 2: 0.072, 3: 0.071, 4: 0.07}), "equal", 0.065) == "not held"


def test_one_seed_of_another_size_decides_nothing() -> None:
    """The noise of single runs was measured at 26M; those of the 3M model are further apart."""
    for loss, says in ((0.02, "not held, one seed"), (-0.02, "held, one seed")):
        assert verdict(Gap({3: loss}), "lower") == verdict(Gap({3: loss}), "lower", 0.0, "26M")
        assert verdict(Gap({3: loss}), "lower") == says
        assert verdict(Gap({3: loss}), "lower", 0.0, "3M") == "not decided"
    assert verdict(Gap({1: 0.02, 2: 0.021}), "lower", 0.0, "3M") == "not held"


@pytest.mark.parametrize("seeds", [2, 3])
def test_the_interval_of_few_seeds_decides_nothing(seeds: int) -> None:
    """The mistake: two or three seeds below the figure of a claim count as a whole interval."""
    few, far = Gap(dict.fromkeys(range(seeds), 0.014)), Gap(dict.fromkeys(range(seeds), 0.009))
    assert few.interval is not None and few.interval[1] <= 0.02
    assert verdict(few, "equal", 0.02) == "not decided"  # the distance is 0.006, below NOISE
    assert verdict(far, "equal", 0.02) == "held"  # by more than NOISE, with no spread
    assert verdict(Gap(dict.fromkeys(range(4), 0.014)), "equal", 0.02) == "held"
