"""Claims of a paper as comparisons within the factorial, on scores that are known."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace

import pytest

from tests.tools.sweep.test_axes import QUARTET
from tests.tools.sweep.test_statistics import rows_of
from tools.rows import Row
from tools.sweep import factorial, llama, page, words
from tools.sweep.axes import AXES, UNDRAWN, Combination
from tools.sweep.building import recipe_of
from tools.sweep.factorial import E4M3, E8M0, HADAMARD, LOSS_SCALE, STAR, STOCHASTIC, TENSOR, UE5M3
from tools.sweep.findings import FINDINGS, Finding, interval_of_mean, summary
from tools.sweep.main_effects import MAIN_EFFECTS, main_effects_table
from tools.sweep.promotion import promoted, random_lines
from tools.sweep.sampling import sample

ALL = factorial.combinations()


def scored(terms: Mapping[tuple[str, str], float]) -> dict[Combination, float]:
    """Scores that are sums over the axes, by (axis, value)."""

    def score(each: Combination) -> float:
        return sum(terms.get((axis, getattr(each, axis)), 0.0) for axis in AXES)

    return {each: score(each) for each in ALL}


def test_the_factorial_is_whole() -> None:
    assert len(ALL) == len(set(ALL)) == 2 * 4 * (1 + 2 + 2 + 1 + 2) + 4 * 6
    for each in ALL:
        recipe_of(each)
    stars = sample(50, seed=3)
    assert [each for each, star in stars.items() if star == STAR] == ALL
    assert not {center for center, _ in random_lines(stars, 1)} & set(ALL)


def test_words_are_in_pairs_with_the_factorial() -> None:
    """Every pair differs in what the word names alone, and both combinations are recipes. A base
    that is none of the factorial's was made by a word before."""
    stars = sample(50, seed=3)
    own = words.combinations()
    assert [each for each, star in stars.items() if star == words.STAR] == own
    assert not set(own) & set(ALL)
    made = set(ALL)
    for word in words.WORDS:
        assert len(word.pairs) >= 4, word.what
        for base, changed in word.pairs:
            recipe_of(changed)
            assert base in made
            assert {a for a in AXES if getattr(base, a) != getattr(changed, a)} <= set(word.values)
        made.update(changed for _, changed in word.pairs)


def test_the_committed_results_are_of_these_words(committed: list[Row]) -> None:
    """Neither more combinations nor others."""
    found = [
        Combination(**row["combination"])
        for row in committed
        if row["stage"] == "products" and row["star"] == words.STAR
    ]
    assert sorted(map(str, found)) == sorted(map(str, words.combinations()))


def test_ms_eden_is_the_backward_pass_of_quartet_2() -> None:
    """In E4M3, blocks of 16, where fprop is not by four over six. What it is compared with is not:
    it differs in the rule of scales and in rounding."""
    (word,) = (each for each in words.WORDS if each.what.startswith("MS-EDEN in place"))
    ((other, changed),) = (
        pair for pair in word.pairs if (pair[0].scale, pair[0].block) == ("e4m3", "16")
    )
    assert changed == replace(QUARTET, rule="nearest")
    rounded = {"backward_rule": "inflated", "rounding": "backward"}
    assert other == replace(changed, **rounded)


def test_words_that_do_not_fit_the_last_stage() -> None:
    """MS-EDEN has groups of 128, and so has what it is compared with; stochastic rounding of all
    operands with a transform in groups of 32 fits."""
    trained = llama.recipes(words.combinations())
    left_out = [e for e in words.combinations() if llama.recipe(e) not in trained]
    assert {e for e in left_out if e.group == "128"} == {
        changed for word in words.WORDS for _, changed in word.pairs if changed.group == "128"
    }
    assert all(each.group == "128" or each.backward_rule == "unit-gain" for each in left_out)


def test_words_cover_the_axes() -> None:
    """Every value that stars have is in the factorial or a word."""
    pairs = [pair for word in words.WORDS for pair in word.pairs]
    tried = {*ALL, *(each for pair in pairs for each in pair)}
    missing = {
        (axis, value)
        for axis, values in AXES.items()
        for value in values
        if value not in UNDRAWN.get(axis, ())
        if not any(getattr(each, axis) == value for each in tried)
    }
    assert not missing


@pytest.mark.parametrize("design", [ALL, words.combinations()], ids=[STAR, words.STAR])
def test_a_design_is_promoted_however_bad_it_is(design: list[Combination]) -> None:
    every = sample(50, seed=3)
    drawn = {each: star for each, star in every.items() if each not in design}
    own = {each: every[each] for each in design}
    found = rows_of("products", "score", {each: [0.0] for each in drawn}, drawn)
    found += rows_of("products", "score", {each: [9.0] for each in own}, own)
    assert set(design) <= set(promoted(found, 1))


def test_differences_of_a_word_are_those_of_its_pairs() -> None:
    (word,) = (each for each in words.WORDS if each.what == "elements in E1M2")
    found = scored({}) | {changed: 0.5 for _, changed in word.pairs[1:]}
    assert word.differences(found) == [0.5] * 3  # a pair without a score is left out


def test_differences_are_those_of_pairs_alike_but_for_the_change() -> None:
    found = scored(
        {("scale", "ue5m3"): -3.0, ("rule", "nearest"): -1.0, ("outer_scale", "tensor"): 0.25}
        | {("block", "16"): -0.5, ("hadamard", "backward"): 2.0, ("estimator", "dge"): 4.0}
    )
    for finding, expected in (
        (Finding("", UE5M3, E8M0), [-4.0] * 8),
        (Finding("", UE5M3 | TENSOR, E8M0), [-3.75] * 8),
        (Finding("", UE5M3, E4M3, TENSOR), [-3.0] * 8),
        (Finding("", HADAMARD), [2.0] * 24),
        (Finding("", HADAMARD, among=UE5M3 | LOSS_SCALE), [2.0] * 8),
        (Finding("", HADAMARD, among=E8M0), [2.0] * 4),
        (Finding("", {"estimator": "dge"}), [4.0] * 4),
        (Finding("", TENSOR | STOCHASTIC | HADAMARD), [2.25] * 4),
        (Finding("", {"block": "16"}, among=E4M3 | TENSOR), [-0.5] * 4),
    ):
        assert finding.differences(found) == pytest.approx(expected)


def test_every_claim_has_pairs() -> None:
    found = dict.fromkeys([*ALL, *words.combinations()], 0.0)
    for finding in FINDINGS:
        assert len(finding.differences(found)) >= 4, finding.claim


def test_claims_begin_in_the_factorial() -> None:
    """A word may be what a change makes, but is no base: pairs of words would count some formats
    more than others."""
    found = dict.fromkeys([*ALL, *words.combinations()], 0.0)
    for finding in FINDINGS:
        if finding.change != factorial.BACKWARD:
            assert len(finding.differences(found)) == len(finding.differences(scored({})))


def test_main_effects_are_those_of_all_pairs() -> None:
    """Each factor has its own term, of which no other change has any, and every pair counts."""
    found = scored(
        {("scale", "ue5m3"): -3.0, ("scale", "e4m3"): -2.0, ("rule", "absmax"): 5.0}
        | {("outer_scale", "tensor"): 0.25, ("block", "16"): -0.5, ("hadamard", "backward"): 2.0}
        | {("rounding", "gradients"): 0.125, ("loss_scale", "65536"): 7.0}
    )
    groups = ("E8M0, float32, tensor scale", "E4M3, UE5M3 alone")
    expected = {
        ("scales in float32", "in place of E8M0"): [5.0] * 8,
        ("scales in E4M3", "in place of E8M0"): [-2.0] * 8,
        ("scales in UE5M3", "in place of E8M0"): [-3.0] * 8,
        ("scales in E4M3 under a tensor scale", "in place of E8M0"): [-1.75] * 8,
        ("scales in UE5M3 under a tensor scale", "in place of E8M0"): [-2.75] * 8,
        ("scales in UE5M3", "in place of E4M3, tensor scale"): [-1.0] * 8,
        ("a tensor scale", "E4M3"): [0.25] * 8,
        ("a tensor scale", "UE5M3"): [0.25] * 8,
        ("a loss scale of 65536", "UE5M3"): [7.0] * 8,
        ("a loss scale of 65536", "UE5M3, tensor scale"): [7.0] * 8,
    }
    for what, term in (
        ("blocks of 16 in place of 32", -0.5),
        ("stochastic rounding of dY", 0.125),
        ("a Hadamard transform of the backward pass", 2.0),
    ):
        expected |= {(what, group): [term] * n for group, n in zip(groups, (16, 8), strict=True)}
    assert {(e.what, e.where): e.differences(found) for e in MAIN_EFFECTS} == expected
    [line] = (e for e in main_effects_table(MAIN_EFFECTS, {"digits": found}) if "dY | E8M0" in e)
    assert line.endswith("| +0.1250 (+0.1250 to +0.1250; 16) |")


def test_verdicts() -> None:
    helps, does_not = Finding("", HADAMARD), Finding("", HADAMARD, helps=False)
    for differences, verdicts in (
        ([-2.0, -1.0, -1.5], ("held", "not held")),
        ([2.0, 1.0, 1.5], ("not held", "held")),
        ([-1.0, 1.0, 0.1, -0.1], ("not decided", "not decided")),
        ([-2.0, -1.0], ("not decided", "not decided")),
        ([], ("not decided", "not decided")),
    ):
        scores = with_differences(differences)
        found = (helps.verdict(scores, [scores]), does_not.verdict(scores, [scores]))
        assert found == verdicts


def test_a_verdict_is_that_of_each_seed() -> None:
    """Pairs share their seeds: one seed that says the opposite leaves a claim undecided."""
    scores, opposite = with_differences([-2.0, -1.0, -1.5]), with_differences([0.5, 0.4, 0.6])
    assert Finding("", HADAMARD).verdict(scores, [scores, scores]) == "held"
    assert Finding("", HADAMARD).verdict(scores, [scores, opposite]) == "not decided"


def with_differences(differences: list[float]) -> dict[Combination, float]:
    """Scores of pairs with and without HADAMARD that differ so."""
    plain = [each for each in ALL if each.hadamard == "none" and each.loss_scale == "1"]
    found: dict[Combination, float] = {}
    for each, difference in zip(plain, differences, strict=False):
        found |= {each: 1.0, replace(each, **HADAMARD): 1.0 + difference}
    return found


@pytest.mark.parametrize("number", [3, 4, 8, 20])
def test_intervals_cover_the_mean(number: int) -> None:
    source, covered = random.Random(5), 0
    for _ in range(600):
        low, high = interval_of_mean([source.gauss(0.3, 1) for _ in range(number)])
        covered += low < 0.3 < high
    assert covered / 600 == pytest.approx(0.95, abs=0.03)


def test_summaries() -> None:
    assert summary([1.0, 1.0, 1.0]) == "+1.0000 (+1.0000 to +1.0000; 3)"
    assert summary([0.5]) == "+0.5000 (1)" and not summary([])


def test_the_table_says_what_the_last_stage_says() -> None:
    helps = scored({("hadamard", "backward"): -1.0})
    stars = dict.fromkeys(ALL, STAR)
    rows = rows_of("regression", "loss", {each: [0.0] for each in ALL}, stars)
    rows += rows_of("digits", "loss", {each: [score] for each, score in helps.items()}, stars)
    lines = page.findings_table(rows)
    assert lines[0] == "| claim | `regression` | `digits` | verdict |"
    (line,) = (each for each in lines if each.startswith("| Under a tensor scale a Hadamard"))
    zeros, ones = "+0.0000 (+0.0000 to +0.0000; 8)", "-1.0000 (-1.0000 to -1.0000; 8)"
    assert line.endswith(f"| {zeros} | {ones} | held |")
    drawn = rows_of("digits", "loss", {each: [0.0] for each in ALL[:2]}, dict.fromkeys(ALL, "0"))
    assert not page.findings_table(drawn)  # none of the factorial
