"""Gaps are paired by the data's seed, and their intervals are the bootstrap's."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from benchmarks.study.configuration import configuration, hash_of
from benchmarks.study.gap_words import gap_and_seeds
from benchmarks.study.gaps import ENOUGH, LEVEL, Cell, Gap, bootstrap, cell_of, gap, spread
from benchmarks.study.matrix import Matrix, Point
from megatron_fp4.arithmetic.formats import NUMERICS_VERSION
from tests.benchmarks.study.prose import prose, recipes_prose
from tools.installed_text import Text

TEXT = {"sha256": "5e4f", "held_out": {"tokens": 30_000}}
MATRIX = Matrix("test", "a test", Text(2, 1024), [])
CELL = Cell("5e4f", "tiny", 60, 1e-3, NUMERICS_VERSION)


def row(recipe: str, seed: int, loss: float, rounding_seed: int | None = None) -> dict[str, Any]:
    rounding = None if recipe == "bf16" else rounding_seed or seed
    point = Point(recipe, "tiny", 1e-3, 60, seed, rounding)
    found = configuration(MATRIX, point, TEXT)
    held_out = [[30, 9.0], [60, loss]]
    return {"hash": hash_of(found), "configuration": found, "held_out": held_out}


def test_gaps_are_paired_by_the_seed_of_the_data() -> None:
    """Whatever the order of the rows; a seed that only one of the recipes has does not count."""
    generator = np.random.default_rng(3)
    base, own = generator.normal(5, 1, 4), generator.normal(5.1, 1, 4)
    rows = [row("bf16", seed, loss) for seed, loss in enumerate(base)]
    rows += reversed([row("tetrajet", seed, loss) for seed, loss in enumerate(own)])
    rows.append(row("tetrajet", 9, 100.0))
    found = gap(rows, CELL, "tetrajet", "bf16")
    assert found is not None
    assert found.by_seed == pytest.approx(dict(enumerate(own - base)))
    assert found.mean == pytest.approx((own - base).mean())
    assert found.spread == pytest.approx(np.ptp(own - base))
    apart = np.ptp(own) + np.ptp(base)
    assert found.spread != pytest.approx(apart)  # the control: not paired


def test_other_cells_do_not_count() -> None:
    rows = [row("bf16", 1, 5.0), row("tetrajet", 1, 5.1)]
    for change in (
        {"steps": 61}, {"learning_rate": 2e-3}, {"text": "0"}, {"size": "26M"}, {"numerics": 1},
    ):  # fmt: skip
        assert gap(rows, CELL._replace(**change), "tetrajet", "bf16") is None


def test_runs_of_two_numerics_versions_are_not_paired() -> None:
    """The mistake: a recipe that was run anew is compared with runs from before."""
    earlier, now = row("tetrajet", 1, 5.1), row("bf16", 1, 5.0)
    earlier["configuration"] |= {"numerics": NUMERICS_VERSION - 1}
    for cell in {cell_of(each) for each in (earlier, now)}:
        assert gap([earlier, now], cell, "tetrajet", "bf16") is None


def test_rounding_seeds_are_averaged_before_seeds_are_compared() -> None:
    rows = [row("bf16", 1, 5.0), row("bf16", 2, 4.0)]
    rows += [row("tetrajet", 1, 5.0 + extra, 7 + i) for i, extra in enumerate((0.1, 0.2, 0.6))]
    rows.append(row("tetrajet", 2, 4.1))
    found = gap(rows, CELL, "tetrajet", "bf16")
    assert found is not None and found.by_seed == pytest.approx({1: 0.3, 2: 0.1})
    assert found.mean == pytest.approx(0.2)  # the control: over all runs it is 0.25
    other = gap(rows, CELL, "bf16", "tetrajet")
    assert other is not None and other.by_seed == pytest.approx({1: -0.3, 2: -0.1})


@pytest.mark.parametrize(
    ("by_seed", "says"),
    [
        ({1: 0.5}, "one seed"),
        ({1: 0.10, 2: 0.14}, "higher"),
        ({1: -0.10, 2: -0.14}, "lower"),
        ({1: 0.01, 2: 0.04}, "within the spread"),
        ({1: -0.5, 2: 0.5}, "within the spread"),
        ({1: 0.25, 2: 0.75}, "within the spread"),  # no larger than the spread, and as large
        ({1: -0.25, 2: -0.75}, "within the spread"),
    ],
)
def test_nothing_is_said_about_less_than_the_spread(by_seed: dict[int, float], says: str) -> None:
    assert Gap(by_seed).verdict == says
    assert (Gap(by_seed).interval is None) == (len(by_seed) == 1)


@pytest.mark.parametrize("count", [2, 3, 5])
def test_the_interval_is_that_of_all_resamples(count: int) -> None:
    """Quantiles of the means of every sample with replacement; of 2 or 3 values they are the
    smallest and the largest."""
    values = list(np.random.default_rng(count).normal(0.05, 0.02, count))
    every = np.sort([np.mean(each) for each in itertools.product(values, repeat=count)])
    # DRAWS draws: 4 standard errors of a share of 0.025 are 0.0062.
    for share, found in zip((0.025, 0.975), bootstrap(values), strict=True):
        low, high = np.quantile(every, [share - 0.0063, share + 0.0063], method="inverted_cdf")
        assert low - 1e-12 <= found <= high + 1e-12
    ends = pytest.approx((min(values), max(values)), rel=1e-12)
    assert (bootstrap(values) == ends) == (count <= 3)
    assert bootstrap(values) == bootstrap(values)


def test_the_interval_is_scipys() -> None:
    stats = pytest.importorskip("scipy.stats")
    values = np.random.default_rng(8).normal(0.05, 0.02, 12)
    other = stats.bootstrap(
        (values,), np.mean, n_resamples=40_000, method="percentile", random_state=1
    ).confidence_interval
    # 4 standard errors of either quantile, about 0.05 of the mean's standard error, of 10,000 draws
    bound = 4 * 0.03 * values.std() / 12**0.5
    assert bootstrap(list(values)) == pytest.approx(tuple(other), abs=bound)
    narrow = stats.bootstrap(
        (values,), np.mean, confidence_level=0.9, method="percentile", random_state=1
    ).confidence_interval
    assert bootstrap(list(values)) != pytest.approx(tuple(narrow), abs=bound)  # the control


def test_what_few_seeds_tell_by_chance() -> None:
    """How often the interval contains the true mean, and how often recipes with the same loss get
    another verdict than `within the spread`: of normal differences, as docs/study.md says."""
    generator, page = np.random.default_rng(5), prose("docs/study.md")
    shares = {2: (0.5, 0.3), 3: (0.75, 0.08), 4: (0.8, 0.02), 5: (0.83, 0.005)}
    for seeds, (contained, told) in shares.items():
        found = [
            Gap(dict(enumerate(each))) for each in generator.normal(size=(4000, seeds)).tolist()
        ]
        intervals = [bootstrap([*each.by_seed.values()]) for each in found[:400]]
        inside = sum(low <= 0 <= high for low, high in intervals) / len(intervals)
        error = (contained * (1 - contained) / len(intervals)) ** 0.5
        assert inside == pytest.approx(contained, abs=4 * error)
        assert inside < LEVEL - error  # the control: it is no interval of 95%
        chance = sum(each.verdict in ("higher", "lower") for each in found) / len(found)
        assert chance == pytest.approx(told, abs=4 * (told / len(found)) ** 0.5)
    assert "in about 50% of cases with 2 seeds, 75% with 3, 80% with 4 and 83% with 5." in page
    assert "to equal recipes too, in about 30% of cases" in recipes_prose()
    assert "in about 30% of cases with 2 seeds, 8% with 3, 2% with 4 and 0.5% with 5." in page


def test_the_spread() -> None:
    assert spread([3.0]) is None and spread([]) is None
    assert spread([1.0, 4.0, 2.0]) == 3.0


@pytest.mark.parametrize(
    ("differences", "words"),
    [
        ([0.004], "+0.004, 1 seed"),
        ([0.017, 0.011], "+0.014 (+0.017, +0.011), 2 seeds"),
        ([0.017, 0.011, 0.02], "+0.016 (+0.017, +0.011, +0.020), 3 seeds"),
        ([0.02, 0.02, 0.02, 0.02], "+0.020 (+0.020 to +0.020), 4 seeds"),
    ],
)
def test_few_seeds_are_shown_in_place_of_an_interval(differences: list[float], words: str) -> None:
    found = Gap(dict(enumerate(differences)))
    assert gap_and_seeds(found) == words
    # The mistake: the interval of two or three seeds.
    assert (" to " in gap_and_seeds(found)) == (len(differences) >= ENOUGH)


def test_a_gap_that_was_not_run() -> None:
    assert gap_and_seeds(None) == "not run"
