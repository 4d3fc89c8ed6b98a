"""Sentences of docs/design-space.md whose figures are those of the committed results."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from statistics import mean

import pytest
import torch
from scipy.stats import t as student

from benchmarks import digits_head
from megatron_fp4 import get_recipe
from tests.tools.sweep.test_axes import unnamed
from tests.tools.sweep.test_page import PAGE
from tools import rows
from tools.rows import Row
from tools.sweep import axes, factorial, llama, page, promotion, results, words
from tools.sweep.agreement import agreement, agreement_of_designed
from tools.sweep.axes import Combination, drawn, values, without_training
from tools.sweep.bias import biases
from tools.sweep.building import recipe_of
from tools.sweep.findings import FINDINGS, interval_of_mean, summary
from tools.sweep.pareto import INPUTS, OUTPUTS, TOKENS, Point, frontier
from tools.sweep.stages import STAGES, draws
from tools.sweep.stages.images import PIXELS


@pytest.fixture(scope="module")
def text() -> str:
    return " ".join(PAGE.read_text().split())


def test_the_number_of_claims(text: str) -> None:
    assert f"There are {len(FINDINGS)} claims" in text


def test_one_target_writes_the_page(text: str) -> None:
    """Each part between markers is written by a command of the target."""
    makefile = Path("Makefile").read_text()
    [recipe] = re.findall(r"^design-space:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    assert "tools.sweep show --page docs/design-space.md --picture docs/images/" in recipe
    [studies] = re.findall(r"for study in (.+); do", recipe)
    assert studies.split() == re.findall(r"<!-- study: (.+?) -->", text)
    assert "`make design-space` writes all tables of this page and the picture anew" in text


def test_the_functions_that_the_page_names_exist(text: str) -> None:
    named = re.findall(r"`(_\w+)`", text.partition("## Add an axis")[2])
    assert len(named) == 2 and all(callable(getattr(axes, each)) for each in named)


def test_plotted_times_beside_measured_ones(every_point: list[Point], text: str) -> None:
    """Of number 1 of both frontiers, and of the combination that is furthest from its time."""
    folder = "benchmarks/study/candidates/"
    size = {"in": INPUTS, "out": OUTPUTS}
    result = json.loads(Path("benchmarks/results/linear-formats.json").read_text())
    assert result["tokens"] == TOKENS and result["stamp"]["device"] == ["NVIDIA H200"]
    ms = {row["recipe"]: row["ms"] for row in result["rows"] if row.items() >= size.items()}
    first = frontier(every_point, "hopper")[0]
    assert first == frontier(every_point, "blackwell")[0]

    def times(name: str) -> tuple[str, str, str]:
        recipe = get_recipe(f"{folder}{name}.yaml")
        [point] = [
            each
            for each in every_point
            if unnamed(recipe_of(without_training(each.combination))) == unnamed(recipe)
        ]
        assert (point == first) == (name == "sweep-ue5m3-dge")
        measured = ms[f"{folder}{name}.yaml"] / ms["bf16"]
        return f"{point.times['hopper']:.2f}", f"{measured:.2f}", f"{point.today:.2f}"

    ue5m3, e1m2 = times("sweep-ue5m3-dge"), times("sweep-e1m2-dge")
    for said in (
        f"the picture has {ue5m3[0]} on Hopper, and measured on an H200 it takes {ue5m3[1]}, since",
        f"the picture has {e1m2[0]} too, and it takes {e1m2[1]}, since",
        f"As they run today the model has {ue5m3[2]} and {e1m2[2]}.",
    ):
        assert said in text, said


def test_one_stage_has_no_ceiling(committed: list[Row], text: str) -> None:
    for stage in promotion.LEVELS[1].stages:
        found = agreement(committed, "products", stage)
        one_seed = len(results.seeds_of(committed, stage)) == 1
        assert found is not None and (found.ceiling is None) == one_seed == (stage == "draws")
    assert f"`draws` has one seed, which gives all of its {draws.DRAWS} draws." in text


def test_the_last_linear_of_digits_in_words(committed: list[Row], text: str) -> None:
    """In BF16 it decides nothing. In float32 losses are those that other hosts recorded."""
    result = json.loads(Path("benchmarks/results/digits_head.json").read_text())
    assert result["settings"] == json.loads(json.dumps(STAGES["digits"].settings))
    recorded = {
        Combination(**row["combination"]): row for row in committed if row["stage"] == "digits"
    }
    own = [Combination(**row["combination"]) for row in result["rows"]]
    assert own == digits_head.COMBINATIONS and len(own) == 9
    every: list[list[float]] = []
    for each, row in zip(own, result["rows"], strict=True):
        seeds = recorded[each]["seeds"]
        assert row["float32"] == {seed: figures["loss"] for seed, figures in seeds.items()}
        assert recorded[each]["stamp"]["device"] != result["stamp"]["device"]
        every.append([row["bf16"][seed] - row["float32"][seed] for seed in seeds])
    assert sum(recorded[each]["star"] == words.STAR for each in own) == 3
    assert "Nine combinations of `digits`, three of them with a word, were run again" in text
    means = [mean(each) for each in every]
    low, high = interval_of_mean(means)
    assert low < 0 < high
    largest = max(abs(loss) for losses in every for loss in losses)
    for said in (
        f"nine combinations end {mean(means):+.4f} ({low:+.4f} to {high:+.4f}) from those in",
        f"By combination it is {min(means):+.4f} to {max(means):+.4f}, and in a seed up to "
        f"{largest:.3f}",
    ):
        assert said in text, said


def test_the_last_linear_is_in_bf16_or_not() -> None:
    """Its logits are BF16 numbers, and float32 has others. First weights are the same."""
    x = torch.randn(8, PIXELS, generator=torch.Generator().manual_seed(1))
    found = {}
    for head, kind in digits_head.HEADS.items():
        torch.manual_seed(1)
        with torch.no_grad():
            found[head] = kind(digits_head.COMBINATIONS[0], 1)(x)
    rounded = {head: torch.equal(each, each.bfloat16().float()) for head, each in found.items()}
    assert rounded == {"float32": False, "bf16": True}
    assert torch.allclose(found["float32"], found["bf16"], atol=0.02)


def test_rows_that_are_bound_to_recorded_tensors(committed: list[Row], text: str) -> None:
    """Each row of `products` and `draws` to the same ones, and no other row."""
    found: dict[str, set[str | None]] = {}
    for row in committed:
        if row["stage"] in STAGES:
            found.setdefault(row["stage"], set()).add(row["tensors"])
    [digest] = found["products"]
    assert digest is not None and len(digest) == 64 and found["draws"] == {digest}
    assert {stage for stage, own in found.items() if own == {None}} == STAGES.keys() - {
        "products", "draws",
    }  # fmt: skip
    assert "The tensors of `products` and `draws` are those of a training on this machine" in text


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
    assert len(differences) == 8 and mean(differences) < 0
    assert claim.verdict(own, [own]) == "not decided"
    told_of = (
        "stochastic rounding of all operands, with and without a transform, changes the loss by"
    )
    assert f"{told_of} {summary(differences).partition(';')[0]})" in text


def test_stages_that_tell_good_combinations_apart(committed: list[Row], text: str) -> None:
    found = {stage: agreement_of_designed(committed, stage, llama.NAME) for stage in STAGES}
    halves = {stage: each.better_half for stage, each in found.items() if each}
    [number] = {each.number for each in found.values() if each}
    assert f"these are {number} recipes. Of the {number // 2} that `diffusion` prefers" in text
    assert f"Of the {number // 2} that `products` prefers" in text
    assert {stage for stage, half in halves.items() if half.above_0} == {"products", "diffusion"}
    assert halves["draws"].value < 0 and halves["digits"].value < 0  # "tell nothing of it"
    assert all(
        each.every.above_0 for each in found.values() if each
    )  # "what fails from what works"
    diffusion = found["diffusion"]
    assert diffusion is not None and diffusion.ceiling_of_half is not None
    assert diffusion.better_half.value > diffusion.ceiling_of_half - 0.005  # "as high as"
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


def test_the_mean_of_x_in_the_training_loss(text: str) -> None:
    runs = {
        (row["configuration"]["recipe"], row["configuration"]["seed"]): row
        for row in rows.read(llama.RESULTS, llama.KEYS)
    }

    def losses(combination: Combination, seed: int) -> tuple[float, float]:
        row = runs[llama.recipe(combination), seed]
        return row["held_out"][-1][1], mean(loss for _, loss in row["train"][-5:])

    [word] = [word for word in words.WORDS if word.what == "the mean of X subtracted"]
    changes = [
        [new - old for new, old in zip(losses(changed, seed), losses(base, seed), strict=True)]
        for base, changed in word.pairs
        for seed in llama.BLOCK["seeds"]
    ]
    held_out, training = map(mean, zip(*changes, strict=True))
    assert len(changes) == 8 and f"so the held-out loss ({held_out:+.4f}) does not show" in text
    assert f"the last five that are recorded, changes by {training:+.4f}." in text
