"""docs/design-space.md: its tables are those of the code and of the committed results."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean, median

import pytest
import yaml
from torch import float32

from benchmarks.study import matrix, showing, tables
from benchmarks.study.gaps import Gap, gap
from megatron_fp4 import get_recipe
from tests.tools.sweep.test_axes import unnamed
from tests.tools.sweep.test_statistics import STARS
from tools import pages, rows
from tools.rows import Row
from tools.sweep import factorial, llama, page, promotion, results, words
from tools.sweep.agreement import agreement
from tools.sweep.axes import Combination
from tools.sweep.building import recipe_of
from tools.sweep.findings import FINDINGS, interval_of_mean
from tools.sweep.pareto import Point, better, draw, frontier, to_confirm
from tools.sweep.points_tables import BEST, trade_table, traded
from tools.sweep.promotion import on_lines, promoted, random_lines
from tools.sweep.provenance import PACKAGES, provenance
from tools.sweep.results import BF16
from tools.sweep.stages.digits import Classifier

SUFFICES = "A straight-through estimator suffices: {} does not help"
LIMITS = "The scale's format is the bottleneck: {}"
UNDER_TENSOR_SCALE = [f"{each} under a tensor scale helps" for each in ("E4M3", "UE5M3")]
DOCS = Path(__file__).parents[3] / "docs"
STAMP = {"device": ["CPU"], "commit": "unknown", **dict.fromkeys(PACKAGES, "1.0")}
E1M2 = {"element": "e1m2", "scale": "e4m3", "rule": "up", "backward_rule": "inflated"}
E1M2 |= {"outer_scale": "row", "maximum": "softmax"}
PAGE, PICTURE = DOCS / "design-space.md", DOCS / "images/design-space.svg"


def test_the_axes_are_the_code_s() -> None:
    text = PAGE.read_text()
    assert pages.into(text, "axes", "\n".join(page.axes_table())) == text


@pytest.fixture(scope="module")
def section(committed: list[Row]) -> str:
    return page.section(committed, llama.RESULTS)


def test_the_results_are_the_committed_ones(section: str) -> None:
    text = PAGE.read_text()
    assert pages.into(text, "sweep", section) == text


def test_the_picture_is_that_of_the_results(
    committed: list[Row], every_point: list[Point], tmp_path: Path
) -> None:
    assert page.last_stage(committed) == llama.NAME
    draw(every_point, f"score of {llama.NAME}", tmp_path / "p.svg")
    assert (tmp_path / "p.svg").read_bytes() == PICTURE.read_bytes()


def test_the_last_stage_is_complete(committed: list[Row], tmp_path: Path) -> None:
    """Its runs are those of the matrix that the stages before promote."""
    path = tmp_path / "sweep.yaml"
    path.write_text(llama.matrix(promoted(committed, 3)))
    study, found = matrix.read(str(path)), rows.read(llama.RESULTS, llama.KEYS)
    finished, failed = showing.rows_of(study, found)
    assert len(finished) == len(study.points()) and not failed
    # Others were promoted before the words were there: more of the best are, the more there are.
    others = {row["configuration"]["recipe"] for row in found} - {
        run.recipe for run in study.points()
    }
    assert len(others) == 3 and len(found) == len(finished) + 2 * len(others)


def test_the_best_were_trained_again(every_point: list[Point]) -> None:
    """The committed matrix is what `best` makes, and what it made before the words were there."""
    found = yaml.safe_load((matrix.FOLDER / "sweep-best.yaml").read_text())
    earlier = found["runs"].pop()
    assert found == yaml.safe_load(llama.matrix_of_best(to_confirm(every_point)))
    own = set(words.combinations())
    before = [point for point in every_point if point.combination not in own]
    [block] = yaml.safe_load(llama.matrix_of_best(to_confirm(before)))["runs"]
    [now] = found["runs"]
    gone = [each for each in block["recipes"] if each not in now["recipes"]]
    assert len(gone) == 2 and earlier == now | {"recipes": gone}


@pytest.mark.parametrize(
    ("name", "chosen"),
    [
        (
            "sweep-ue5m3-dge",
            {"scale": "ue5m3", "rule": "nearest", "backward_rule": "inflated"}
            | {"outer_scale": "tensor"},
        ),
        ("sweep-e1m2-dge", E1M2),
        ("sweep-e1m2-dge-kept", E1M2 | {"outer_gradient": "kept"}),
        ("sweep-e8m0-dge", {"rule": "ceil", "backward_rule": "ceil"}),
    ],
)
def test_combinations_that_are_recipe_files(name: str, chosen: dict[str, str]) -> None:
    """They are among the best that were trained again, and the page names them."""
    assert f"[{name}.yaml](../benchmarks/study/candidates/{name}.yaml)" in PAGE.read_text()
    each = Combination(block="16", rounding="gradients", estimator="dge", **chosen)
    path = matrix.FOLDER / f"candidates/{name}.yaml"
    assert unnamed(get_recipe(path)) == unnamed(recipe_of(each))
    gaps = gaps_of_fresh_seeds()
    assert llama.recipe(each) in gaps
    if name == "sweep-e8m0-dge":
        fast = {recipe: gap for recipe, gap in gaps.items() if "block=16,rule=ceil" in recipe}
        assert min(fast, key=lambda each: fast[each].mean) == llama.recipe(each) and len(fast) == 3
        assert fast[llama.recipe(each)].verdict == "within the spread"


def gaps_of_fresh_seeds() -> dict[str, Gap]:
    """The differences from BF16 of the best combinations, by recipe."""
    found = rows.read(Path("benchmarks/results/study-sweep-best.jsonl"), llama.KEYS)
    [cell] = tables.cells(found)
    names = [recipe for recipe in tables.recipes(found) if recipe.startswith(llama.RECIPE)]
    gaps = {recipe: gap(found, cell, recipe, "bf16") for recipe in names}
    assert all(each and len(each.by_seed) == len(llama.FRESH_SEEDS) for each in gaps.values())
    return {recipe: each for recipe, each in gaps.items() if each is not None}


def test_the_three_best_with_fresh_seeds() -> None:
    text = " ".join(PAGE.read_text().split())
    gaps = gaps_of_fresh_seeds()
    order = sorted(gaps, key=lambda recipe: gaps[recipe].mean)
    kept, e1m2, ue5m3 = best = order[:3]
    assert "outer_gradient=kept" in kept and kept == f"{e1m2},outer_gradient=kept"
    assert "element=e1m2" in e1m2 and "scale=ue5m3" in ue5m3
    verdicts = [gaps[recipe].verdict for recipe in order]
    assert verdicts[:3] == ["lower"] * 3 and "lower" not in verdicts[3:]
    assert f"`dge` and `maximum=softmax`: {gaps[e1m2].mean:+.4f}. This is the recipe file" in text
    assert f"The same with `outer_gradient=kept`: {gaps[kept].mean:+.4f}. This is" in text
    assert f"under a tensor scale, and `dge`: {gaps[ue5m3].mean:+.4f}. This is" in text
    with_words = {"outer_gradient=kept": ue5m3, "outer_scale=row": "block=16,rule=ceil"}
    through, rows_scaled = (
        next(gap for recipe, gap in gaps.items() if recipe.endswith(word) and start in recipe)
        for word, start in with_words.items()
    )
    assert f"through that scale, ends {through.mean:+.4f} from BF16, within the spread." in text
    assert f"ends {rows_scaled.mean:+.4f} from BF16" in text
    assert (through.verdict, rows_scaled.verdict) == ("within the spread", "higher")
    first = [min(best, key=lambda recipe: gaps[recipe].by_seed[seed]) for seed in (3, 4, 5)]
    assert first.count(ue5m3) == 1  # "with one of the three seeds the last one is the best"


def test_figures_in_words(committed: list[Row]) -> None:
    found = committed
    text = " ".join(PAGE.read_text().split())
    last = agreement(found, "diffusion", llama.NAME)
    assert last is not None and last.every.above_0
    assert f"the rank correlation is {page.correlation(last.every)}" in text
    low, high = last.better_half.interval
    assert low < 0 < high
    assert (
        f"Among the better half of them it is {page.correlation(last.better_half)}, which decides"
        in text
    )
    scores, stars = results.scores(found, llama.NAME), promotion.stars_of(found)
    own = {each: score for each, score in scores.items() if stars[each] in promotion.DESIGNED}
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
    assert f"DGE lowers the loss by {-change[estimators[0]]:.3f} after 5M tokens" in text


def test_a_loss_scale_does_what_a_tensor_scale_does(committed: list[Row]) -> None:
    """Of UE5M3, in the stages that can scale the loss. Without either the loss is far higher."""
    [scaled] = [each for each in FINDINGS if "loss is scaled" in each.claim]
    [needed] = [each for each in FINDINGS if each.claim == "UE5M3 needs a tensor scale"]
    columns = page.of_factorial(committed)
    del columns[llama.NAME]
    assert len(columns) == 3
    changes = [mean(scaled.differences(own)) for own in columns.values()]
    one, two, three = (f"{each:+.4f}" for each in changes)
    assert (
        f"a loss scale of 65536 does the same: a tensor scale beside it changes {one}, {two} and "
        f"{three}."
    ) in " ".join(PAGE.read_text().split())
    for own, change in zip(columns.values(), changes, strict=True):
        assert mean(needed.differences(own)) < -50 * abs(change)


def test_underflow_in_words(committed: list[Row]) -> None:
    zeros = results.scores(committed, "products", figure="dy zeros")

    def share(**axes: str) -> str:
        chosen = factorial.UE5M3 | axes
        own = [zeros[each] for each in factorial.combinations() if has(each, chosen)]
        assert len(own) == 8
        return f"{100 * min(own):.0f}% to {100 * max(own):.0f}%"

    plain = {"estimator": "straight-through", "maximum": "straight-through", "loss_scale": "1"}
    without, under = share(outer_scale="none", **plain), share(outer_scale="tensor", **plain)
    told = f"{without} of dY's elements are then 0, and {under} under a tensor scale."
    assert told in " ".join(PAGE.read_text().split())


def has(each: Combination, values: dict[str, str]) -> bool:
    return all(getattr(each, axis) == value for axis, value in values.items())


def test_times_in_words(every_point: list[Point]) -> None:
    """The times of formats, without rounding, transform or estimator, over those of E8M0."""
    times = {each.combination: each.times for each in every_point}

    def over_e8m0(device: str, block: str, **axes: str) -> str:
        plain = times[Combination(block=block, **factorial.E8M0)]
        return f"{times[Combination(block=block, **axes)][device] / plain[device]:.1f}"

    text = " ".join(PAGE.read_text().split())
    e4m3, ue5m3 = (each | factorial.TENSOR for each in (factorial.E4M3, factorial.UE5M3))
    [both] = {over_e8m0("hopper", b, **axes) for b in ("16", "32") for axes in (e4m3, ue5m3)}
    assert f"E4M3 or UE5M3 scales needs {both} times the time of E8M0 on Hopper" in text
    long, short = (over_e8m0("hopper", block, **factorial.FP32) for block in ("32", "16"))
    assert f"needs {long} times in blocks of 32, and {short} times in blocks of 16" in text
    [one], [other] = (
        {over_e8m0("blackwell", block, **axes) for block in ("16", "32")} for axes in (e4m3, ue5m3)
    )
    assert f"it is {one} times for E4M3 and {other} times for UE5M3" in text


def test_the_trade_in_words(every_point: list[Point]) -> None:
    text = " ".join(PAGE.read_text().split())
    own, gaps, errors = traded(every_point), [], []
    assert len(own) == 4 and "none of the four combinations with all three" in text
    verdicts = [line.split(" | ")[-2:] for line in trade_table(every_point)[2:]]
    assert verdicts == [["not decided", "not decided |"]] * 4
    assert "whether any of them is a best trade is not decided on either GPU" in text
    for device in ("hopper", "blackwell"):
        best = frontier(every_point, device)
        found = [[best.index(other) for other in better(each, best, device)] for each in own]
        assert all(found)  # none is on the frontier
        always = sorted(set.intersection(*map(set, found)))
        assert always == [1] and "Number 2 of both frontiers has a better score" in text
        assert best[1].combination == Combination(
            forward="bf16", backward_rule="ceil", rounding="gradients"
        )
        gaps += [each.score - best[number].score for each in own for number in always]
        errors += [each.error or 0 for each in own]
    lower = f"lower by {min(gaps):.3f} to {max(gaps):.3f}, with standard errors of up to"
    assert f"{lower} {max(errors):.3f}. It is the second of {len(every_point)}" in text


def test_words_in_words(committed: list[Row]) -> None:
    """What the page says of words in the last stage, and that it names all that change the loss."""
    text = " ".join(PAGE.read_text().split())
    scores = page.of_design(committed, promotion.DESIGNED)[llama.NAME]
    every = {(word.what, word.where): word.differences(scores) for word in words.WORDS}
    tried = {key: each for key, each in every.items() if each}
    found = {what: each for (what, _), each in reversed(tried.items())}
    clear = {what: mean(each) for (what, _), each in tried.items() if decided(each)}
    # Without unit-gain, StableSPAM, MS-EDEN and what is compared with it.
    assert len(tried) == len(words.WORDS) - 6
    assert f"Of {len(tried)} words one or two are so by chance." in text
    fprop, everywhere, of_x, of_both, floor = clear.values()
    assert "fprop in BF16" in clear
    assert f"With fprop in BF16 the loss is {-fprop:.3f} lower." in text
    unchanged = f"could tell ({mean(found['dgrad and wgrad in BF16']):+.4f})"
    for said in (
        unchanged,
        f"Stochastic rounding of fprop too raises it by {everywhere:.3f}.",
        f"DGE of X in place of W raises it by {of_x:.3f}, and DGE of both by {of_both:.3f}.",
        f"Rule `floor` in the backward pass raises it by {floor:.3f}.",
    ):
        assert said in text
    of_all = tried["stochastic rounding of X and W too", "E8M0, E4M3, UE5M3, Hadamard"]
    low, high = interval_of_mean(of_all)
    assert f"changes the loss by {mean(of_all):+.4f} ({low:+.4f} to {high:+.4f}) there" in text
    low, high = interval_of_mean(found["rule four-over-six of fprop in place of nearest"])
    assert f"{low:+.4f} to {high:+.4f}) and rule `mse` ({mean(found[MSE]):+.4f}) are not" in text


MSE = "rule mse of fprop in place of ceil"


def decided(differences: list[float]) -> bool:
    low, high = interval_of_mean(differences)
    return low > 0 or high < 0


def test_departures_from_the_plan(committed: list[Row]) -> None:
    assert Classifier(Combination(), 1).last.weight.dtype == float32
    taken = [row["seconds"] for row in committed if row["stage"] == "products"]
    assert f"`products` takes {median(taken):.1f} s a combination" in PAGE.read_text()


def test_where_results_were_made(tmp_path: Path) -> None:
    """By stage; a GPU that the stage did not use is said to be beside it."""
    versions = dict.fromkeys(("python", "torch", "triton", "megatron-core", "numpy"), "1.0")

    def made(stage: str, device: str, commit: str) -> Row:
        stamp = {"device": [device, device], "commit": commit + 40 * "0", **versions}
        return {"stage": stage, "stamp": stamp, "numerics": 3}

    run = made("", "H200", "c") | {"configuration": {"numerics": 3}, "status": "finished"}
    (tmp_path / "study.jsonl").write_text(json.dumps(run) + "\n")
    found: list[Row] = [made("products", "CPU, 1 threads", "a"), made("draws", "H100", "b")]
    found += [made("digits", "H100", "d"), {"stage": llama.NAME}]
    same = ", ".join(f"{name} 1.0" for name in versions) + "; numerics version 3, commit "
    assert provenance(found, tmp_path / "study.jsonl") == [
        f"- `products`: CPU, 1 threads; {same}a00000000000.",
        f"- `draws`, `digits`: the CPU of a machine with H100; {same}b00000000000, d00000000000.",
        f"- `llama`: H200; {same}c00000000000.",
    ]


def test_a_stage_without_the_training_around_a_recipe_says_nothing_of_it(
    committed: list[Row], section: str
) -> None:
    """The mistake: runs that do not scale the loss count as such that do."""
    [claim] = [each for each in FINDINGS if "loss is scaled" in each.claim]
    assert len(claim.differences(results.scores(committed, llama.NAME))) >= 3
    [line] = [each for each in section.splitlines() if claim.claim in each]
    assert line.endswith("|  | not decided |")
    best = section.split("The best 10 of `llama`")[1]
    assert "loss_scale" not in best and "optimizer" not in best


def test_tables_of_results() -> None:
    """A rule that is better by 2 and a block that is worse by .5, in two levels of stages."""
    lines = on_lines(random_lines(STARS, 10))
    some = [e for place, e in enumerate(STARS) if place < 60 or e in lines]
    plain = BF16.values()

    def loss(each: Combination) -> float:
        return -2.0 * (each.rule == "ceil") + 0.5 * (each.block == "16")

    found: list[Row] = [
        {
            "stage": stage,
            "status": "failed" if (stage, each) == ("digits", some[3]) else "finished",
            "star": STARS.get(each, each.key),
            "combination": each.chosen,
            "seconds": 1.25,
            "stamp": STAMP,
            "numerics": 3,
            "seeds": {"1": {name: loss(each)}, "2": {name: loss(each)}},
        }
        for stage, name, own in (("products", "score", some), ("digits", "loss", [*some, *plain]))
        for each in own
    ]
    for row in found:
        for figures in row["seeds"].values():
            figures |= {"y error": figures.get("score", 0.0), "dw error": 0.0}
    text = page.section(found, None)
    (line,) = (each for each in text.splitlines() if each.startswith("| `digits` | a class"))
    number = len(some) + len(plain)
    assert line.endswith(f" | {number:,} | 1 | 2 | 1.2 | {1.25 * number / 3600:.2f} |")
    (line,) = (each for each in text.splitlines() if each.startswith("| `products` | `digits` |"))
    one = "1.00 (1.00 to 1.00)"
    assert f" {one} | 1.00 | {one} | {one} | yes |" in line
    assert "\n- `products`, `digits`: CPU; " in text
    assert "Not complete yet: `draws`, `regression`, `diffusion`, `llama`." in text
    found_lines = [each for each in text.splitlines() if each.startswith("| `block` | `16` |")]
    assert len(found_lines) == 2 and all("+0.5 (+0.5 to +0.5; " in each for each in found_lines)
    assert f"The best {BEST} of `digits`" in text
    best = min(loss(each) for each in some if each.forward == each.backward == "fp4")
    assert best == -2.0 and "\n| 1 | -2.0000 ± 0.0000 | " in text
    assert "is better in `digits` and needs less time on blackwell than these, by" in text


def test_no_results_are_an_error() -> None:
    with pytest.raises(ValueError, match="python -m tools.sweep run products"):
        page.section([], None)
    with pytest.raises(ValueError, match="<!-- sweep -->"):
        pages.into("a page", "sweep", "tables")
