"""Promotion, rank correlations and effects, on results that are known."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import rankdata, spearmanr

from tools.rows import Row
from tools.sweep import factorial, words
from tools.sweep.agreement import FEWEST_RANKED, agreement, agreement_of_designed, ceiling
from tools.sweep.axes import Combination, line
from tools.sweep.effects import effects
from tools.sweep.promotion import DESIGNED, LEVELS, Line, lines_of, on_lines, promoted, random_lines
from tools.sweep.rank_correlation import (
    medians_of_draws,
    places_in_groups,
    ranks_of_draws,
    spearman,
    spearman_of_draws,
)
from tools.sweep.sampling import sample

STARS = {e: star for e, star in sample(2000, seed=11).items() if star not in DESIGNED}
EACH = list(STARS)
TENTH = on_lines(random_lines(STARS, 10)) & set(EACH)


def rows_of(
    stage: str,
    figure: str,
    losses: dict[Combination, list[float]],
    stars: dict[Combination, str] = STARS,
) -> list[Row]:
    return [
        {
            "stage": stage,
            "status": "finished",
            "star": stars[each],
            "combination": each.chosen,
            "seeds": {str(seed): {figure: loss} for seed, loss in enumerate(own, start=1)},
        }
        for each, own in losses.items()
    ]


def test_rank_correlations_are_scipy_s() -> None:
    source = np.random.default_rng(0)
    for ties in (1000, 5):
        a, b = source.integers(ties, size=50), source.integers(ties, size=50)
        assert spearman(a, b) == pytest.approx(spearmanr(a, b).statistic)


def test_agreement_is_of_random_lines_alone() -> None:
    """Among the best the first stage says little of the second: that must not lower it."""
    source = random.Random(0)
    truth = {each: source.gauss(0, 1) for each in EACH}
    first = rows_of("products", "score", {e: [truth[e] + source.gauss(0, 0.5)] for e in EACH})
    noisy = {e: [truth[e] + source.gauss(0, 0.8) for _ in range(3)] for e in EACH}
    found = agreement([*first, *rows_of("digits", "loss", noisy)], "products", "digits")
    assert found is not None and found.number == len(TENTH)
    for each in (found.every, found.alike, found.better_half):
        assert each.interval[0] < each.value < each.interval[1]
    assert found.every.above_0 and found.every.value == pytest.approx(0.79, abs=0.12)
    # Reliability of a mean of 3 seeds: 1 / (1 + .64 / 3) = .82; its root .91.
    assert found.ceiling == pytest.approx(0.9, abs=0.06)
    shuffled = dict(zip(noisy, source.sample(list(noisy.values()), len(noisy)), strict=True))
    none = agreement([*first, *rows_of("digits", "loss", shuffled)], "products", "digits")
    assert none is not None and not none.every.above_0


def test_few_combinations_have_no_agreement() -> None:
    """The mistake: of three the interval is a single value, as if all were known."""
    designed = [e for e, star in sample(1, seed=1).items() if star in DESIGNED]
    plain = [e for e in designed if (e.loss_scale, e.optimizer) == ("1", "adam")]
    apart = {STARS[each]: each for each in TENTH}  # one of each star
    both = (agreement, list(apart.values())), (agreement_of_designed, plain)
    for found, every in both:
        stars = STARS | dict.fromkeys(plain, DESIGNED[0])
        centers = rows_of("draws", "score", {e: [0.0] for e in STARS}, stars)
        for count in (3, FEWEST_RANKED - 1, FEWEST_RANKED):
            losses = {each: [float(place)] for place, each in enumerate(every[:count])}
            rows = rows_of("products", "score", losses, stars)
            rows += rows_of("digits", "loss", losses, stars)
            assert (found([*centers, *rows], "products", "digits") is None) == (count < 10)


def test_agreement_of_the_designs() -> None:
    """A stage that sees what fails and nothing else says nothing of the better half."""
    source, every = random.Random(4), sample(1, seed=1)
    stars = {each: star for each, star in every.items() if star in DESIGNED}
    failed = {each: 10.0 * (source.random() < 0.3) for each in stars}
    quality = {each: source.gauss(0, 1) for each in stars}
    last = {each: [failed[each] + quality[each] + source.gauss(0, 0.3)] * 2 for each in stars}
    rows = rows_of("llama", "loss", last, stars)
    for stage, weight in (("draws", 0.0), ("diffusion", 1.0)):
        own = {e: [failed[e] + weight * quality[e] + source.gauss(0, 0.3)] for e in stars}
        rows += rows_of(stage, "score" if stage == "draws" else "loss", own, stars)
    plain = [each for each in stars if (each.loss_scale, each.optimizer) == ("1", "adam")]
    blind, good = (agreement_of_designed(rows, stage, "llama") for stage in ("draws", "diffusion"))
    assert blind is not None and good is not None and blind.number == len(plain)
    assert blind.every.above_0 and good.better_half.above_0
    assert blind.better_half.interval[0] < 0 < blind.better_half.interval[1]
    assert good.ceiling_of_half == pytest.approx(1)  # both seeds say the same


def test_a_base_is_drawn_with_all_its_words() -> None:
    bases = words.bases()
    assert list(bases) == words.combinations()
    assert set(bases.values()) <= set(factorial.combinations())


def test_seeds_that_say_nothing_are_a_ceiling_of_nothing() -> None:
    source = random.Random(1)
    found = rows_of("digits", "loss", {e: [source.random() for _ in range(3)] for e in EACH})
    limit = ceiling(found, "digits", EACH)
    assert limit is not None and limit < 0.4


def test_effects_are_those_of_pairs_that_differ_on_one_axis() -> None:
    """Scores that are sums over the axes have the effects of the terms, whatever else differs."""
    terms = {"rule": {"ceil": -2.0, "up": 3.0}, "block": {"16": -0.5}, "signs": {"none": 0.25}}

    def score(each: Combination) -> float:
        return sum(of.get(getattr(each, axis), 0.0) for axis, of in terms.items())

    scores = {each: score(each) for each in EACH}
    found = {
        (each.axis, each.value): each
        for each in effects(scores, random_lines(STARS, 1))
        if each.against in ("floor", "nearest", "32", "random")
    }
    for (axis, value), term in {
        ("rule", "ceil"): -2.0,
        ("rule", "up"): 3.0,
        ("block", "16"): -0.5,
        ("signs", "none"): 0.25,
        ("hadamard", "backward"): 0.0,
    }.items():
        effect = found.get((axis, value)) or next(
            each for each in effects(scores, random_lines(STARS, 1)) if each.value == value
        )
        assert effect.median == pytest.approx(term) and len(effect.differences) > 5
        assert effect.quartiles == pytest.approx((term, term))


def test_formats_are_compared_though_they_have_other_rules() -> None:
    center = Combination(rule="ceil")
    scores = {each: 1.0 * len(each.scale) for each in line(center, "scale").values()}
    found = {e.value: e.differences for e in effects(scores, [Line(center, "scale")])}
    assert found == {"e4m3": [0.0], "ue5m3": [1.0], "fp32": [0.0]}


def test_the_best_of_each_kind_and_a_tenth_of_the_lines_are_promoted() -> None:
    losses = {each: float(place) for place, each in enumerate(EACH)}
    found = promoted(rows_of("products", "score", {e: [losses[e]] for e in EACH}), 1)
    assert TENTH <= set(found)
    for kind in {(each.forward, each.backward) for each in EACH}:
        own = [each for each in EACH if (each.forward, each.backward) == kind]
        best = own[: -(-len(own) // LEVELS[1].best_of)]  # the losses are in this order
        assert set(best) <= set(found)
        assert {e for e in found if (e.forward, e.backward) == kind} == set(best) | (
            TENTH & set(own)
        )


def test_a_combination_that_failed_one_stage_is_not_promoted() -> None:
    plain, other = Combination(), replace(Combination(), rule="ceil")
    found = []
    for stage, figure in (("draws", "score"), ("regression", "loss"), ("digits", "loss")):
        for each in (plain, other):
            row = {
                "stage": stage,
                "status": "failed" if (stage, each) == ("digits", other) else "finished",
                "star": "1",
                "combination": each.chosen,
                "seeds": {"1": {figure: 1.0}},
            }
            found.append(row)
    assert list(promoted(found, 2)) == [plain]


def test_a_tenth_of_the_lines_is_chosen_whatever_the_scores() -> None:
    every, tenth = random_lines(STARS, 1), random_lines(STARS, 10)
    assert set(random_lines(STARS, 50)) < set(tenth) < set(every)
    assert on_lines(every) >= set(EACH)
    assert len(tenth) / len(every) == pytest.approx(0.1, abs=0.03)
    for center, axis in tenth:
        assert STARS[center] == center.key and len(line(center, axis)) > 1


def test_stages_without_an_optimizer_have_no_lines_of_it() -> None:
    axes = {stage: {axis for _, axis in lines_of(STARS, stage)} for stage in ("draws", "digits")}
    assert "optimizer" in axes["digits"] and "optimizer" not in axes["draws"]


def test_ranks_within_the_same_gemms() -> None:
    """Where the second stage ranks the GEMMs as the first, and nothing else, the correlation of all
    is high and that among combinations of the same GEMMs is none."""
    source = random.Random(2)
    kind = {each: 10.0 * (each.forward == "bf16") for each in EACH}
    first = {each: [kind[each] + source.random()] for each in EACH}
    second = {each: [kind[each] + source.random()] for each in EACH}
    rows = [*rows_of("products", "score", first), *rows_of("digits", "loss", second)]
    found = agreement(rows, "products", "digits")
    assert found is not None and found.every.value > 0.4 and found.every.above_0
    for part in (found.alike, found.better_half):
        assert part.value == pytest.approx(0, abs=0.25)
        assert part.interval[0] < 0 < part.interval[1]


def test_draws_are_samples_with_repeated_elements() -> None:
    """All statistics of draws at once are those of each sample written out."""
    source = np.random.default_rng(0)
    a, b = source.integers(12, size=40).astype(float), source.normal(size=40)
    groups = source.integers(4, size=40)
    drawn = source.integers(40, size=(50, 40))
    counts = np.stack([np.bincount(each, minlength=40) for each in drawn])
    correlations, medians = spearman_of_draws(a, b, counts), medians_of_draws(a, counts)
    ranks, places = ranks_of_draws(a, counts), places_in_groups(a, counts, groups)
    for i, each in enumerate(drawn):
        assert correlations[i] == pytest.approx(spearmanr(a[each], b[each]).statistic)
        assert medians[i] == np.median(a[each])
        assert (ranks[i][each] == rankdata(a[each]) - 1).all()
        for group in range(4):
            own = each[groups[each] == group]
            expected = (rankdata(a[own]) - 0.5) / len(own) - 0.5
            assert places[i][own] == pytest.approx(expected)
