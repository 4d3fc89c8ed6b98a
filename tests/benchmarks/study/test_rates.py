"""What the pages say of the finalists at other learning rates is in the committed results."""

from __future__ import annotations

import pytest

from tests.benchmarks.study.prose import prose, recipes_prose, rows_of

OWN = "fp8-ends-then-fp8.yaml"  # the file of `tetrajet-fp8`
FINALISTS = ("bf16", "tetrajet", OWN, "fp8", "four-over-six")
ABOVE = ("tetrajet", "four-over-six", OWN, "fp8")
Losses = dict[str, dict[float, float]]  # by recipe and learning rate


@pytest.fixture(scope="module")
def losses() -> Losses:
    found: Losses = {}
    for row in rows_of("rates-26M"):
        of = row["configuration"]
        by_rate = found.setdefault(of["recipe"].split("/")[-1], {})
        by_rate[of["learning_rate"]] = row["held_out"][-1][1]
    return {name: found[name] for name in FINALISTS}


def above_at_best(losses: Losses) -> list[float]:
    """How far each finalist at its best rate is above BF16 at its own."""
    best = {name: min(of.values()) for name, of in losses.items()}
    return [best[name] - best["bf16"] for name in ABOVE]


def test_the_best_rate_of_each_finalist(losses: Losses) -> None:
    best = {name: min(of, key=lambda rate: of[rate]) for name, of in losses.items()}
    assert best == {**dict.fromkeys(FINALISTS, 0.0028), "fp8": 0.004}
    assert list(losses["four-over-six"]) == [0.002, 0.0028]
    plain, six, own, fp8 = (f"{above:.3f}" for above in above_at_best(losses))
    text = (
        f"they end {plain} (`tetrajet`), {six} (`four-over-six`), {own} (`tetrajet-fp8`) and "
        f"{fp8} (`fp8`) above BF16 at its own."
    )
    assert text in prose("docs/study.md")
    assert "losses at rates from 0.002 on are less than 0.01 apart" in prose("docs/study.md")
    for of in losses.values():
        assert max(loss for rate, loss in of.items() if rate >= 0.002) - min(of.values()) < 0.01


def test_bf16_at_other_rates(losses: Losses) -> None:
    loss = losses["bf16"]
    worse, better, higher = (loss[rate] - loss[0.002] for rate in (0.0014, 0.0028, 0.004))
    says = (
        f"BF16 is {worse:.3f} worse at 0.0014 than at 0.002, {-better:.3f} better at 0.0028, and "
    )
    assert f"{says}{-higher:.3f} better at 0.004." in prose("docs/study.md")
    says = f"BF16 is {worse:.3f} worse at 0.0014 and {-better:.3f} better at 0.0028, and the gaps"
    plain, _, own, _ = above_at_best(losses)
    assert f"{says} of `tetrajet` and `tetrajet-fp8` at their own best" in prose("README.md")
    shared = [losses[name][0.002] - losses["bf16"][0.002] for name in ("tetrajet", OWN)]
    says = f"where that seed has {shared[0]:.3f} and {shared[1]:.3f} at the shared one."
    assert f"best rates are {plain:.3f} and {own:.3f}, {says}" in prose("README.md")
    says = (
        "Of four rates 0.0028 has the lowest loss for BF16, which is "
        f"{-better:.3f} below its loss at the rate 0.002."
    )
    assert says in recipes_prose()


def test_the_gaps_at_the_best_rates_and_at_the_shared_one(losses: Losses) -> None:
    shared = [losses[name][0.002] - losses["bf16"][0.002] for name in ABOVE]
    best, shared_words = (
        f"{plain:.3f}, {six:.3f}, {own:.3f} and {fp8:.3f} above it"
        for plain, six, own, fp8 in (above_at_best(losses), shared)
    )
    text = (
        f"`tetrajet`, `four-over-six`, `tetrajet-fp8` and `fp8` end {best}, where they end "
        f"{shared_words} at 0.002"
    )
    assert text in recipes_prose()
