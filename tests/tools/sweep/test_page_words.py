"""Sentences of docs/design-space.md whose figures are those of the committed results."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from statistics import mean

import pytest
from scipy.stats import t as student

from tests.tools.sweep.test_page import PAGE
from tools import rows
from tools.rows import Row
from tools.sweep import factorial, llama, page, promotion, results, words
from tools.sweep.agreement import agreement_of_designed
from tools.sweep.axes import Combination, drawn, values
from tools.sweep.bias import biases
from tools.sweep.findings import FINDINGS, interval_of_mean, summary
from tools.sweep.pareto import Point
from tools.sweep.stages import STAGES


@pytest.fixture(scope="module")
def text() -> str:
    return " ".join(PAGE.read_text().split())


def test_the_number_of_claims(text: str) -> None:
    assert f"There are {len(FINDINGS)} claims" in text


def test_biases_in_words(committed: list[Row], text: str) -> None:
    found = {(base.scale, base.block, product): own for base, product, own in biases(committed)}
    assert len(found) == 8
    plain = CHANGES_OF_ROUNDING
    nearest, of_dy, of_all = told(found["ue5m3", "16", "dX"], plain)
    assert (
        f"the bias of dX of UE5M3 in blocks of 16 under a tensor scale is {nearest} to nearest, "
        f"{of_dy} with stochastic rounding of dY alone, and {of_all} with that of all operands. "
        "That of dW is {}, {} and {}.".format(*told(found["ue5m3", "16", "dW"], plain))
    ) in text
    transformed = ["Hadamard", "SR of dY, Hadamard"]
    turned = [told(found["ue5m3", "16", product], transformed) for product in ("dX", "dW")]
    (x, both_x), (w, both_w) = turned
    assert f"leaves {x} and {w}, and {both_x} and {both_w} with stochastic rounding of dY" in text
    for biased in found.values():  # what the words say of UE5M3 holds of every format
        assert biased["nearest"] > biased["SR of dY"] > 10 * biased["SR of dY, Hadamard"] > 0
        assert abs(biased["SR of dY, X and W"]) < biased["SR of dY"] / 100


def test_ms_eden_in_words(committed: list[Row], text: str) -> None:
    found = {(base.scale, base.block, product): own for base, product, own in biases(committed)}
    both = ["MS-EDEN", "SR of dY, X and W, Hadamard"]
    (x, rounded_x), (w, rounded_w) = (told(found["ue5m3", "16", p], both) for p in ("dX", "dW"))
    told_of = f"leaves {x} of dX and {w} of dW, and stochastic rounding of all operands beside a"
    assert f"{told_of} transform {rounded_x} and {rounded_w}." in text
    for (scale, _, _), biased in found.items():
        assert ("MS-EDEN" in biased) == (scale != "e8m0")  # which has no such rule
        assert all(abs(biased[each]) < biased["Hadamard"] / 10 for each in both if each in biased)
    [word] = [each for each in words.WORDS if each.what.startswith("MS-EDEN in place")]
    ratios = []
    for figure in ("dx variance", "dw variance"):
        own = results.scores(committed, "draws", figure=figure)
        ratios += [own[changed] / own[base] for base, changed in word.pairs]
    assert f"it has {min(ratios):.2f} to {max(ratios):.2f} of the variance of dX and dW" in text
    assert len(ratios) == 8 and max(ratios) < 0.5  # "less than half"
    columns = page.of_design(committed, promotion.DESIGNED)
    differences = {stage: word.differences(own) for stage, own in columns.items()}
    assert not differences.pop(llama.NAME) and {len(own) for own in differences.values()} == {4}
    one, two, three = (summary(own).partition(";")[0] + ")" for own in differences.values())
    assert f"`regression` and `digits` do not tell them apart: {one} and {two}." in text
    for stage in ("regression", "digits"):
        low, high = interval_of_mean(differences[stage])
        assert low < 0 < high
    lower = f"lowers the loss of `diffusion` by {-mean(differences['diffusion']):.4f} against it"
    assert f"{lower}, in all four pairs and with each seed: {three}." in text
    for seed in ("1", "2"):
        assert max(word.differences(results.scores(committed, "diffusion", [seed]))) < 0


CHANGES_OF_ROUNDING = ["nearest", "SR of dY", "SR of dY, X and W"]


def told(biased: dict[str, float], changes: list[str]) -> list[str]:
    return [f"{biased[each]:z.5f}" for each in changes]


def test_all_operands_against_nearest_in_words(committed: list[Row], text: str) -> None:
    [claim] = [each for each in FINDINGS if each.change == factorial.BACKWARD]
    own = page.of_design(committed, promotion.DESIGNED)[llama.NAME]
    differences = claim.differences(own)
    assert len(differences) == 4 and mean(differences) < 0
    assert claim.verdict(own, [own]) == "not decided"
    assert f"changes the loss by {summary(differences).partition(';')[0]})" in text


def test_stages_that_tell_good_combinations_apart(committed: list[Row], text: str) -> None:
    found = {stage: agreement_of_designed(committed, stage, llama.NAME) for stage in STAGES}
    halves = {stage: each.better_half for stage, each in found.items() if each}
    assert {each.number for each in found.values() if each} == {200}
    assert {stage for stage, half in halves.items() if half.above_0} == {"products", "diffusion"}
    assert halves["draws"].value < 0 and halves["digits"].value < 0  # "tell nothing of it"
    assert all(
        each.every.above_0 for each in found.values() if each
    )  # "what fails from what works"
    diffusion = found["diffusion"]
    assert diffusion is not None and diffusion.ceiling_of_half is not None
    assert diffusion.better_half.value == pytest.approx(diffusion.ceiling_of_half, abs=0.005)
    cells = {stage: page.correlation(half) for stage, half in halves.items()}
    for said in (
        f"its rank correlation with `llama` is {cells['diffusion']}, as high as",
        f"that `products` prefers it is {cells['products']}.",
        f"`draws` has {cells['draws']}, and `digits` {cells['digits']}.",
        f"`regression` has {cells['regression']}, which is not decided.",
    ):
        assert said in text


def test_the_quantile_of_two_seeds_in_words(every_point: list[Point], text: str) -> None:
    assert {each.seeds for each in every_point} == {2}
    two_each = 2 * (2 - 1)
    quantile = float(student.ppf(0.975, two_each))
    assert f"so that this is {quantile:.1f} standard errors of the difference" in text


def test_straight_through_in_words(committed: list[Row], text: str) -> None:
    """One seed of the candidates has DGE on `tetrajet`; of the maximum the bounds of the loss."""
    path = Path("benchmarks/results/study-candidates.jsonl")
    losses = {
        run["configuration"]["recipe"]: run["held_out"][-1][1]
        for run in rows.read(path, llama.KEYS)
        if run["configuration"]["seed"] == 1 and run["configuration"]["learning_rate"] == 2e-3
    }
    higher = losses["benchmarks/study/candidates/tetrajet-dge.yaml"] - losses["tetrajet"]
    assert f"It raises that of `tetrajet` by {higher:.3f} after 200M tokens" in text
    own = page.of_design(committed, promotion.DESIGNED)[llama.NAME]
    through = [each for each in FINDINGS if "of the maximum" in each.claim]
    intervals = [interval_of_mean(each.differences(own)) for each in through]
    assert len(intervals) == 3 and all(low < 0 < high for low, high in intervals)
    lowest = min(low for low, _ in intervals)
    assert f"leave no gain above about {-lowest:.3f}." in text


def test_words_ran_on_another_host_in_words(committed: list[Row], text: str) -> None:
    for stage in ("digits", "diffusion"):
        hosts: dict[str, Counter[str]] = {}
        for row in committed:
            if row["stage"] == stage:
                hosts.setdefault(row["star"], Counter()).update(set(row["stamp"]["device"]))
        ((host, _),) = hosts[factorial.STAR].items()
        assert host not in hosts[words.STAR]
        number = hosts[words.STAR]["NVIDIA H200"]
        assert f"{number} combinations with [words](#the-sample) ran on another host" in text
        third = hosts[words.STAR].total() - number
        assert f"The {third} with MS-EDEN, and with stochastic" in text


def test_rules_of_e8m0_in_words(text: str) -> None:
    rules = ("floor", "ceil", "mse", "three-quarters")
    assert drawn(Combination(), "backward_rule") == rules
    assert {*values(Combination(), "backward_rule")} == {*rules, "nearest"}
    assert "Here up is `ceil`; `floor`, `mse` and `three-quarters` are beside it." in text
    assert "To nearest is `nearest`, which is younger than the results." in text
