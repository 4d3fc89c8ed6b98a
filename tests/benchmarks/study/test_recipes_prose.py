"""What docs/recipes.md and docs/study.md say of the course of runs, and of rounding seeds."""

from __future__ import annotations

import json
import math
import statistics

import pytest
from scipy.stats import t as student

from benchmarks.study import comparison, equal_time, recipe_facts, recipes_page, tables
from benchmarks.study.entries import BF16
from benchmarks.study.equal_time import ratio_of as ratio
from benchmarks.study.gaps import Gap, cell_of, gap, paired
from benchmarks.study.pictures import held_out_gaps
from benchmarks.study.sizes import SIZES
from megatron_fp4 import list_recipes
from megatron_fp4.estimate.plans import recipe_named
from tests.benchmarks.study.prose import ROOT, linears, prose, recipes_prose, rows_of

FOUND = comparison.read()


def course(name: str, size: str) -> dict[int, float]:
    """The gap of a recipe to BF16 after so many millions of tokens."""
    [cell] = [cell for cell in FOUND.cells if cell.size == size]
    [own] = [
        each
        for key, each in recipes_page.over_tokens(FOUND, cell).items()
        if key.split()[0] == name
    ]
    return {round(tokens): gap for tokens, gap in own}


def at_150m(name: str) -> dict[int, float]:
    """The held-out loss of a recipe of 26M after 150M tokens, by seed."""
    return {
        of["seed"]: dict(row["held_out"])[1146]
        for row in FOUND.rows
        if (of := row["configuration"])["recipe"] == name
        and (of["size"], of["learning_rate"]) == ("26M", 0.002)
    }


def test_the_own_recipe_gains_in_its_phase() -> None:
    names = ("tetrajet-fp8", "four-over-six", "tetrajet")
    before = [course(name, "26M")[150] for name in names]
    own, nvfp4, plain = (f"{gap:.3f}" for gap in before)
    assert (
        f"After 150M tokens, in the recipe's FP4 part, `tetrajet-fp8` is {own} above BF16, "
        f"`four-over-six` {nvfp4} and `tetrajet` {plain} (five seeds each)."
    ) in recipes_prose()
    assert 150 / 200 < 0.8 and before[1] < before[0] < before[2]
    apart = paired(*({s: [loss] for s, loss in at_150m(name).items()} for name in names[:2]))
    assert apart is not None and len(apart.by_seed) == 5 and apart.verdict == "within the spread"
    assert (
        f"({apart.mean:.3f} above it, within the spread of the seeds). At the end, after the phase "
        "in `fp8`, it is below."
    ) in recipes_prose()
    assert course("tetrajet-fp8", "26M")[200] < course("four-over-six", "26M")[200]
    end = gap(FOUND.rows, FOUND.cells[0], *names[:2])
    assert end is not None and end.verdict == "within the spread"
    assert len(end.by_seed) == 5 and max(end.by_seed.values()) < 0
    below = [-each for each in end.by_seed.values()]
    half = float(student.ppf(0.975, 4)) * statistics.stdev(below) / math.sqrt(5)
    mean = statistics.mean(below)
    assert (
        f"With each of the five seeds `tetrajet-fp8` ends lower, by {mean:.3f} on average "
        f"({mean - half:.3f} to {mean + half:.3f}, Student's 95% interval). The tables still say "
        f"within the spread, since the spread of the five is {end.spread:.3f} too."
    ) in recipes_prose()


def test_the_order_of_recipes_at_3m() -> None:
    rows = rows_of("recipes-3M")
    [cell] = tables.cells(rows)
    found = {name: gap(rows, cell, name, BF16) for name in tables.recipes(rows) if name != BF16}
    means = {name.partition(",")[0]: each.mean for name, each in found.items() if each is not None}
    order = sorted(means, key=means.__getitem__)
    assert order[-2:] == ["dge-occ", "tetrajet-ema"]
    assert "but `dge-occ` and `tetrajet-ema` are the last ones" in recipes_prose()
    # "Nearly": of the others, none is more than one place from where it is at 26M.
    both = [name for name in order[:-2] if name in FOUND.registered and name != "tetrajet-ramping"]
    large = [name for name in FOUND.registered if name in both]
    assert order != large and len(both) == 9
    assert all(abs(both.index(name) - large.index(name)) <= 1 for name in both)


def test_the_layers_of_the_speed_and_of_the_loss() -> None:
    file = json.loads((ROOT / "benchmarks/results/recipes-step.json").read_text())
    layers = SIZES["26M"].model.layers
    said = f"is of two layers of {file['layers']}, and its loss of two of {layers}."
    assert said in recipes_prose()


def test_how_gaps_change_with_the_length() -> None:
    """Those of two recipes by no more than the spread of their seeds."""
    [cell] = [cell for cell in FOUND.cells if cell.size == "26M"]
    words, told = {}, {}
    for name in ("mxfp4", "dge-occ", "tetrajet-ema", "four-over-six", "tetrajet"):
        seeds = [dict(each) for each in held_out_gaps(FOUND.rows, cell, name)]
        assert {382, 1525} <= seeds[0].keys()
        begin, end = (statistics.mean(each[step] for each in seeds) for step in (382, 1525))
        words[name] = f"of `{name}` from {begin:.3f} to {end:.3f}"
        changes = {i: each[1525] - each[382] for i, each in enumerate(seeds)}
        told[name] = Gap(changes).verdict
    many, few = [*words.values()][:3], [*words.values()][3:]
    assert (
        f"can still grow: that {many[0]}, that {many[1]}, and that {many[2]}. Of two others the "
        f"change is within the spread of the seeds: that {few[0]}, and that {few[1]}."
    ) in recipes_prose()
    assert [*told.values()] == ["higher"] * 3 + ["within the spread"] * 2


def test_a_run_that_was_made_anew() -> None:
    """The second run of `tetrajet-fp8` with seed 1, of the same flags at another commit."""
    [first] = [
        row
        for row in FOUND.rows
        if (of := row["configuration"])["recipe"] == "tetrajet-fp8"
        and (of["size"], of["seed"], of["learning_rate"]) == ("26M", 1, 0.002)
    ]
    second, bf16 = (
        next(row for row in rows_of("served") if row["configuration"]["recipe"] == name)
        for name in ("tetrajet-fp8", "bf16")
    )
    assert second["stamp"]["commit"] != first["stamp"]["commit"]
    loss, anew, plain = (row["held_out"][-1][1] for row in (first, second, bf16))
    page = recipes_prose()
    assert f"the second run ends {loss - anew:.3f} lower." in page
    assert f"The second run of `tetrajet-fp8` with that seed is at {anew - plain:.3f}." in page


def test_which_sizes_read_no_text_twice() -> None:
    assert all(tables.epochs(row) > 2 for row in FOUND.rows)
    assert tables.epochs(rows_of("recipes-3M")[0]) < 1
    once = rows_of("one-epoch")
    assert all(tables.epochs(row) < 1 for row in once)
    most = max(
        row["configuration"]["steps"] * SIZES[size].tokens / linears(size)
        for row in once
        if (size := row["configuration"]["size"])
    )
    assert 3.5 < most < 4
    says = "models above 3M parameters read more than 4 tokens for each parameter and no text twice"
    assert says in recipes_prose()


def test_the_gap_of_tetrajet_falls_at_60m() -> None:
    found = course("tetrajet", "60M")
    said = (
        f"falls from {found[100]:.3f} after 100M tokens to {found[400]:.3f} after 400M, of a text"
    )
    assert said in recipes_prose()
    assert found[100] > found[300] > found[400]


def test_how_much_slower_fp8_is() -> None:
    own, fp8 = (recipe_facts.step_of(name, recipe_named(name)) for name in ("tetrajet-fp8", "fp8"))
    assert own is not None and fp8 is not None
    share = own.ratio / fp8.ratio - 1
    assert (
        f"Take `fp8` where a lower loss is worth steps that take {share:.0%} longer: it ends"
    ) in recipes_prose()


def test_after_the_same_time() -> None:
    page, table = recipes_prose(), equal_time.equal_time_table(FOUND)
    lines = {line.split(" | ")[0].strip("| `"): line.split(" | ") for line in table[2:]}
    needs = {name: [line[3], line[6].strip(" |")] for name, line in lines.items()}
    assert set(needs) == set(list_recipes())
    [short] = [
        row["held_out"][-1][1]
        for row in rows_of("one-epoch")
        if (row["configuration"]["recipe"], row["configuration"]["size"]) == (BF16, "26M")
    ]
    [(long, tokens)] = [
        (row["held_out"][-1][1], row["configuration"]["steps"] / 723)
        for row in FOUND.rows
        if cell_of(row) == FOUND.cells[0]
        and (row["configuration"]["recipe"], row["configuration"]["seed"]) == (BF16, 1)
    ]
    here = (short - long) / math.log2(tokens)
    assert f"d is {here:.3f} at 26M: BF16's held-out loss after 95M and 200M tokens" in page

    def fit(tokens: float) -> float:
        return 410.7 * (tokens**-0.28 - (2 * tokens) ** -0.28)

    billions, trillions = fit(2e10), fit(1e12)
    said = f"it is {billions:.3f} from 20B to 40B tokens, and {trillions:.3f} from 1T to 2T."
    assert said in page

    def leads(name: str, of: int, d: float) -> bool:
        """What a cell says of d."""
        words = needs[name][of]
        return words == "always" or (
            words != "never" and d > float(words.removeprefix("is above "))
        )

    fast = {name for name in needs if needs[name][0] != "never"}
    assert {n for n in fast if leads(n, 0, here)} == fast == {n for n in needs if ratio(n) > 1}
    assert leads("fp8", 0, trillions) and not leads("tetrajet-fp8", 0, trillions)
    assert leads("tetrajet-fp8", 0, billions)
    assert {n for n in fast - {"fp8"} if leads(n, 1, here)} == {"tetrajet-fp8"}
    own = gap(FOUND.rows, FOUND.cells[0], "tetrajet-fp8", "fp8")
    assert own is not None
    # "About equal": by less than 0.01.
    assert abs(own.mean - here * math.log2(ratio("tetrajet-fp8") / ratio("fp8"))) < 0.01
    assert not any(leads(n, 1, billions) for n in fast - {"fp8"})


@pytest.mark.parametrize(
    ("loss", "speed", "words"),
    [
        (0.02, 2.0, "is above 0.020"),
        (0.02, 4.0, "is above 0.010"),
        (0.02, 0.5, "never"),
        (0.02, 1.0, "never"),
        (-0.02, 2.0, "always"),
        (-0.02, 1.0, "always"),
        (-0.02, 0.5, "is below 0.020"),
        (0.0, 0.5, "never"),
        (0.0, 2.0, "always"),
    ],
)
def test_where_a_recipe_is_ahead(loss: float, speed: float, words: str) -> None:
    """By the definition: the loss after the same time is loss - d log2(speed) above the other's."""
    assert equal_time.ahead(loss, speed) == words
    for d in (0.001, 0.015, 0.025, 0.1):
        after = loss - d * math.log2(speed)
        if words in ("always", "never"):
            assert (after < 0) == (words == "always")
        else:
            side, edge = words.split()[1:]
            assert (after < 0) == (d > float(edge) if side == "above" else d < float(edge))


def test_the_rounding_seeds_of_one_matrix() -> None:
    ends = [
        row["held_out"][-1][1]
        for row in FOUND.rows
        if (of := row["configuration"])["recipe"] == "tetrajet"
        and (of["size"], of["seed"], of["learning_rate"]) == ("26M", 1, 0.002)
    ]
    assert len(ends) == 3
    lower = sum(ends) / 3 - ends[0]
    assert lower == pytest.approx(0.003, abs=0.0005)
    assert f"differences from `tetrajet` are up to {lower:.3f} lower here" in prose("docs/study.md")


def test_the_curves_of_two_multipliers() -> None:
    rows = rows_of("same-loss-3M")
    curves = {
        (row["configuration"]["recipe"], row["configuration"]["seed"]): dict(row["train"])
        for row in rows
    }
    words = {"FP8": "tetrajet", "BF16": "tetrajet --fp4-multiplier bf16"}
    text = (ROOT / "docs/study.md").read_text()
    apart: list[list[float]] = []
    for seed in (1, 2, 3):
        for word, recipe in words.items():
            losses = [curves[recipe, seed][step] for step in (1, 180, 540, 900, 1260, 1500)]
            cells = " | ".join(f"{loss:.4f}" for loss in losses)
            assert f"| {seed} | {word} | {cells} |" in text
        fp8, bf16 = (curves[recipe, seed] for recipe in words.values())
        assert fp8[1] == bf16[1]
        apart.append([fp8[step] - bf16[step] for step in fp8])
    most = max(abs(loss) for each in apart for loss in each)
    assert f"by {most:.3f} at most, in both directions." in prose("docs/study.md")
    assert min(min(each) for each in apart) < 0 < max(max(each) for each in apart)


def test_tensor_parallelism_from_the_same_weights() -> None:
    rows = rows_of("same-loss-3M")
    ends = {
        (of["recipe"], of["seed"]): row["held_out"][-1][1]
        for row in rows
        if (of := row["configuration"])
    }
    one, two = "tetrajet", "tetrajet --tensor-model-parallel-size 2 --sequence-parallel"
    flag = "--use-cpu-initialization"
    same, same_two = (
        ends[f"tetrajet {flag}", 1],
        ends[two.replace("tetrajet", f"tetrajet {flag}"), 1],
    )
    page = prose("docs/study.md")
    assert f"with seed 1 `tetrajet` under TP2 ends {same - same_two:.3f} below one GPU." in page
    above, above_same = (loss - ends["bf16", 1] for loss in (ends[two, 1], same_two))
    assert (
        f"it ends {above:.2f} above BF16 of one GPU without the flag, and {above_same:.3f} above "
        "with it."
    ) in page
    others = [abs(ends[two, seed] - ends[one, seed]) for seed in (2, 3)]
    assert f"under TP2 is within {max(others):.3f} of one GPU without that flag too." in page
    assert above - above_same > 10 * (same - same_two)  # the control: other weights do more
