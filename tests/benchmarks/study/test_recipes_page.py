"""The pages that compare recipes are the committed results."""

from __future__ import annotations

import itertools
import math
import re
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.study import comparison, pictures, recipe_facts, recipes_page, tables
from benchmarks.study.__main__ import main
from benchmarks.study.committed import earlier_numerics, runs_of_study
from benchmarks.study.comparison import OWN, Comparison
from benchmarks.study.entries import BF16, recipe_of
from benchmarks.study.errors import StudyError
from benchmarks.study.gaps import Gap, gap
from benchmarks.study.pictures import draw_over_tokens, held_out_gaps
from benchmarks.study.recipe_paths import candidate
from benchmarks.study.sizes import SIZES
from benchmarks.study.small_models import small_table
from benchmarks.study.verdicts import NOISE
from megatron_fp4 import Recipe, get_recipe, list_recipes
from megatron_fp4.arithmetic.formats import NUMERICS_VERSION
from megatron_fp4.estimate.plans import recipe_named
from tests.benchmarks.study.prose import recipes_prose

ROOT = Path(__file__).parents[3]
FOUND = comparison.read()
CELL = FOUND.cells[0]


def says(text: str) -> None:
    """Asserts that a page has this text, whatever its line breaks."""
    assert " ".join(text.split()) in recipes_prose()


def above(name: str, other: str = BF16, found: Comparison = FOUND) -> Gap:
    """The held-out loss of a recipe minus that of another one, in the first comparison."""
    own = gap(found.rows, CELL, name, other)
    assert own is not None
    return own


def step_of(name: str) -> recipe_facts.Speed | None:
    """The speed of a training step of a recipe of the page."""
    return recipe_facts.step_of(name, recipe_named(name))


def of_study(study: str, name: str, rate: float) -> Gap:
    """The held-out loss of a recipe minus BF16's in a matrix, at a learning rate."""
    rows, _ = runs_of_study(study)
    [cell] = [cell for cell in tables.cells(rows) if cell.learning_rate == rate]
    own = gap(rows, cell, name, BF16)
    assert own is not None
    return own


def of_3m(name: str) -> Gap:
    """The held-out loss of a recipe minus BF16's in the matrix recipes-3M."""
    return of_study("recipes-3M", name, 0.0015)


def of_60m(name: str) -> Gap:
    """The held-out loss of a recipe minus BF16's at 60M."""
    [cell] = [cell for cell in FOUND.cells if cell.size == "60M"]
    own = FOUND.gap(name, cell)
    assert own is not None
    return own


def least_to_most(found: Gap, sign: int) -> str:
    """The range of the seeds' differences, all of which have the sign."""
    sizes = sorted(sign * loss for loss in found.by_seed.values())
    assert sizes[0] > 0
    return f"{sizes[0]:.3f} to {sizes[-1]:.3f}"


def with_other_loss(recipe: str) -> Comparison:
    """The committed results with another loss at the end of the first run of a recipe."""
    rows = list(FOUND.rows)
    place = next(i for i, r in enumerate(rows) if r["configuration"]["recipe"] == recipe)
    step, loss = rows[place]["held_out"][-1]
    rows[place] = rows[place] | {"held_out": [*rows[place]["held_out"][:-1], [step, loss + 0.1]]}
    return replace(FOUND, rows=rows)


@pytest.mark.parametrize("name", recipes_page.pages_of(FOUND))
def test_the_tables_are_the_committed_results(name: str) -> None:
    page = (ROOT / name).read_text()
    assert recipes_page.into(page, recipes_page.pages_of(FOUND)[name]) == page


@pytest.mark.parametrize("recipe", ["tetrajet", "tetrajet-fp8", BF16])
def test_another_loss_is_noticed(recipe: str) -> None:
    made = recipes_page.pages_of(with_other_loss(recipe))
    for name in (recipes_page.README, recipes_page.RECIPES, recipes_page.CLAIMS):
        page = (ROOT / name).read_text()
        assert recipes_page.into(page, made[name]) != page
    candidates = made[recipes_page.OWN]["recipes: losses of candidates"]
    assert (candidates not in (ROOT / recipes_page.OWN).read_text()) == (recipe == BF16)


def test_the_picture_is_the_committed_one(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    committed = (ROOT / "docs/images/recipe-gaps.svg").read_bytes()
    for folder, found in (("same", FOUND), ("changed", with_other_loss("tetrajet"))):
        path = tmp_path / folder / "picture.svg"
        draw_over_tokens(recipes_page.panels(found), path)
        assert (path.read_bytes() == committed) == (folder == "same")


def test_a_line_of_the_picture_ends_at_the_gap_of_the_table() -> None:
    for name in ("tetrajet", "tetrajet-fp8"):
        seeds = held_out_gaps(FOUND.rows, CELL, name)
        assert statistics.mean(each[-1][1] for each in seeds) == pytest.approx(above(name).mean)
        [series] = [
            each
            for key, each in recipes_page.over_tokens(FOUND, CELL).items()
            if key.split()[0] == name
        ]
        assert series[-1] == pytest.approx(
            (CELL.steps * SIZES[CELL.size].tokens / 1e6, above(name).mean)
        )


def test_the_picture_has_the_recipes_that_are_named() -> None:
    assert set(recipes_page.PICTURED) <= set(list_recipes())
    assert len(recipes_page.PICTURED) == 6 <= len(pictures.COLORS)
    says("The gaps of six recipes at each evaluation")
    drawn = [key.split()[0] for key in recipes_page.over_tokens(FOUND, CELL)]
    assert drawn == recipes_page.PICTURED and len(drawn) < len(FOUND.registered)


def test_names_at_the_ends_of_lines_do_not_cover_each_other() -> None:
    plt = pytest.importorskip("matplotlib.pyplot")
    _, axes = plt.subplots()
    axes.set_ylim(0, 0.1)
    ends = {"a": 0.03, "b": 0.031, "c": 0.001, BF16: 0.0}
    pictures._label_ends(axes, ends, dict.fromkeys(ends, "#000000"))
    plt.close()
    found = {each.get_text(): each.get_position()[1] for each in axes.texts}
    heights = sorted(found.values())
    assert all(b - a > 0.99 * pictures.LABEL for a, b in itertools.pairwise(heights))
    assert sorted(found, key=found.__getitem__) == [BF16, "c", "a", "b"]
    assert found[BF16] == 0.0 and found["a"] == pytest.approx(0.3)
    assert ends["b"] - ends["a"] < 0.1 * pictures.LABEL  # the control: the lines end nearer


def test_every_recipe_and_candidate_has_a_line() -> None:
    made = recipes_page.pages_of(FOUND)
    table = made[recipes_page.RECIPES]["recipes: losses"]
    table += made[recipes_page.OWN]["recipes: losses of candidates"]
    options = {name for name in tables.recipes(FOUND.rows) if "," in name}
    assert {BF16, *list_recipes(), *options} == set(re.findall(r"^\| `(.*?)` \|", table, re.M))
    for entry in tables.recipes(FOUND.rows):
        name = f"| [`{Path(entry).stem}`](" if entry.endswith(".yaml") else f"| `{entry}` |"
        assert name in table


@pytest.mark.parametrize("name", OWN)
def test_the_runs_of_a_file_are_those_of_the_recipe_that_has_its_name(name: str) -> None:
    def unnamed(recipe: Recipe) -> Recipe:
        return replace(recipe, name="", paper="")

    file = unnamed(recipe_of(OWN[name]))
    assert unnamed(get_recipe(name)) == file
    assert unnamed(get_recipe("tetrajet")) != file  # the control


def test_figures_in_running_text() -> None:
    own, plain, fp8, rht = (
        above(name) for name in ("tetrajet-fp8", "tetrajet", "fp8", "mxfp4-rht-sr")
    )
    speed = {name: step_of(name) for name in ("tetrajet", "tetrajet-fp8", "fp8", "mxfp4-rht-sr")}
    ratios = {name: each.ratio for name, each in speed.items() if each is not None}
    times = {name: f"{ratio:.2f}" for name, ratio in ratios.items()}
    assert [len(each.by_seed) for each in (own, plain, fp8, rht)] == [5, 5, 5, 2]
    assert fp8.verdict == "within the spread" and plain.verdict == own.verdict == "higher"
    nvfp4 = {name: above(name) for name in ("four-over-six", "quartet-2", "nvfp4-nvidia")}
    assert [len(each.by_seed) for each in nvfp4.values()] == [5, 2, 2]
    six, least, most = (f"{each.mean:.3f}" for each in nvfp4.values())
    says(f"ends {own.mean:.3f} above BF16's loss where `tetrajet` ends {plain.mean:.3f} above it ")
    says(
        f"(five seeds each) and NVFP4 recipes {least} to {most} (two to five seeds), at {CELL.size}"
    )
    to_plain = ratios["tetrajet-fp8"] / ratios["tetrajet"]
    says(f"A step has {times['tetrajet-fp8']} times BF16's speed, {to_plain:.2f} of `tetrajet`'s")
    says(f"ends {fp8.mean:.3f} above BF16 (five seeds, within their spread), at {times['fp8']}")
    says(f"**`tetrajet`** has {times['tetrajet']} times BF16's speed.")
    slow = ("nvfp4-nvidia", "four-over-six", "quartet-2", "ue5m3", "dge-occ")
    steps = sorted(each.ratio for each in map(step_of, slow) if each is not None)
    assert len(steps) == len(slow)
    says(f"`dge-occ` have {steps[0]:.2f} to {steps[-1]:.2f} times BF16's speed on Hopper")
    says(f"{rht.mean:.3f} above BF16 (two seeds), at {times['mxfp4-rht-sr']} times its speed.")
    # "`fp8` is faster, and its loss is no higher"
    assert ratios["mxfp4-rht-sr"] < ratios["fp8"] and above("mxfp4-rht-sr", "fp8").mean > 0
    says(f"whose forward pass is BF16's, ends {rht.mean:.3f} above it (two seeds)")
    mse, ended = candidate("mse-16-ends-then-fp8"), above(candidate("tetrajet-then-fp8"))
    assert ended.by_seed.keys() == {1, 2}
    same, both = (statistics.mean(each.by_seed[seed] for seed in (1, 2)) for each in (plain, own))
    assert own.mean < plain.mean / 2 and above(mse, "tetrajet-fp8").verdict == "within the spread"
    says(f"from {same:.3f} to {ended.mean:.3f}, and both parts to {both:.3f}")
    says(f"`tetrajet` is at {plain.mean:.3f} and `tetrajet-fp8` at {own.mean:.3f}. In the 3M model")
    small = [of_3m(name) for name in ("tetrajet", "tetrajet-fp8")]
    assert [len(each.by_seed) for each in small] == [3, 3]
    says(f"they are at {small[0].mean:.3f} and {small[1].mean:.3f} (three seeds, ")
    large = [of_60m(name) for name in ("tetrajet", "tetrajet-fp8", "fp8")]
    assert [len(each.by_seed) for each in large] == [2, 2, 1]
    plain_60m, own_60m, fp8_60m = (f"{each.mean:.3f}" for each in large)
    says(f"At 60M `tetrajet-fp8` ends {own_60m} above BF16, and `tetrajet` {plain_60m} (two seeds ")
    says(f"in the 60M model at {plain_60m} and {own_60m} (two seeds each), where `fp8` is ")
    says(f"where `fp8` is at {fp8_60m} (one seed)")
    assert large[2].mean < large[1].mean < large[0].mean
    for own_large, of_26m in zip(large[:2], (plain, own), strict=True):
        assert own_large.mean < of_26m.mean
    says(f"`dge-occ` is {of_3m('dge-occ').mean:.3f} above BF16 (three seeds)")
    first = step_of(candidate("fp8-ends"))
    assert first is not None
    says(f"its first part takes {ratios['tetrajet'] / first.ratio:.3f} times `tetrajet`'s time")
    says(f"and a step of `fp8` {ratios['tetrajet'] / ratios['fp8']:.3f} times")
    says(f"By their shares of training it has {to_plain:.2f} of `tetrajet`'s speed")
    says(f"They end {least} (`quartet-2`, two seeds), {six} (`four-over-six`, five seeds) and ")
    says(f"{most} (`nvfp4-nvidia`, two seeds) above BF16.")
    says(f"is at {own.mean:.3f} with the same five seeds, and at {both:.3f} with the two ")
    of_fp8 = above("tetrajet-fp8", "fp8")
    words = f"ends {of_fp8.mean:.3f} above `fp8` ({least_to_most(of_fp8, 1)} by seed)."
    says(f"`tetrajet-fp8`, which {words}")
    below = [least_to_most(above("tetrajet-fp8", name), -1) for name in nvfp4]
    says(f"By seed it is {below[0]} below `four-over-six`, {below[1]} below `quartet-2` and ")
    says(f"{below[2]} below `nvfp4-nvidia`.")
    says(f"is {-above(mse, 'tetrajet-fp8').mean:.4f} lower, within the spread of the seeds")
    nearest = above(candidate("nearest-then-fp8"), candidate("tetrajet-then-fp8"))
    dge, swept = above(candidate("tetrajet-dge"), "tetrajet"), candidate("sweep-e8m0-dge")
    says(f"costs {nearest.mean:.3f} (`nearest-then-fp8`), DGE {dge.mean:.3f} (`tetrajet-dge`), ")
    says(f"ends {above(swept, 'tetrajet').mean:.3f} above `tetrajet` (`sweep-e8m0-dge`); one seed")
    loss = {
        row["configuration"]["learning_rate"]: row["held_out"][-1][1]
        for row in FOUND.rows
        if (row["configuration"]["recipe"], row["configuration"]["seed"]) == (BF16, 1)
        and row["configuration"]["size"] == CELL.size
    }
    says(f"rate of all weights costs BF16 {loss[0.0014] - loss[0.002]:.3f} (0.0014 in place of ")
    half = 1 - ended.mean / same
    assert 0.45 < half < 0.55  # "about half of the gap"
    series = {key.split()[0]: each for key, each in recipes_page.over_tokens(FOUND, CELL).items()}
    (begin, _), (end, _) = series["mxfp4"][0], series["mxfp4"][-1]
    assert (round(begin), round(end)) == (50, 200)
    assert CELL.steps - int(0.8 * CELL.steps) == 305
    says("The last fifth is 305 steps here")
    layers = SIZES[CELL.size].model.layers
    says(f"Two layers of {layers} are a quarter")
    tokens = CELL.steps * SIZES[CELL.size].tokens
    assert round(tokens / 26e6) == 8
    says("200M tokens are 8 tokens for each parameter of the layers")


def test_what_rounding_noise_alone_does() -> None:
    ramping = get_recipe("tetrajet-ramping").ramping
    assert ramping is not None
    ends = {
        (of["recipe"], of["rounding_seed"]): row["held_out"][-1][1]
        for row in FOUND.rows
        if (of := row["configuration"])["size"] == CELL.size
        and of["learning_rate"] == CELL.learning_rate
        and of["seed"] == 1
        and of["recipe"] in ("tetrajet", "tetrajet-ramping")
    }
    same = [ends["tetrajet", seed] for seed in (1, 2, 3)]
    apart = max(same) - min(same)
    assert 1.9 < NOISE / apart < 2.1
    says(f"with seed 1 that differ in rounding noise alone end {apart:.3f} apart")
    above_least = ends["tetrajet-ramping", 1] - min(same)
    says(
        f"after {ramping.interval:,} of {CELL.steps:,} steps, and ends {above_least:.3f} above the"
    )
    five = [n for n in FOUND.registered if (g := FOUND.gap(n)) is not None and len(g.by_seed) == 5]
    spreads = [above(name).spread or 0 for name in five]
    assert len(spreads) == 4
    says(f"the gaps of one recipe are {min(spreads):.3f} to {max(spreads):.3f} apart.")
    pairs = [above(*names).spread or 0 for names in itertools.combinations(five, 2)]
    says(f"between two recipes varies by up to {max(pairs):.3f} from seed to seed (five seeds).")
    says(f"By default Q-Ramping calibrates first after {ramping.interval:,} steps")


def test_the_own_recipe_has_fp8_where_the_pages_say() -> None:
    recipe = get_recipe("auto")
    assert recipe == get_recipe("tetrajet-fp8")
    assert [(each.after, each.recipe.name) for each in recipe.phases] == [(0.8, "fp8")]
    places = [(each.first, each.last, each.recipe.name) for each in recipe.layers]
    assert places == [(1, 0, "fp8"), (0, 1, "fp8")]


def test_bits_are_those_of_formats() -> None:
    """Of blocks of 32 and 16 with scales of 8 bits, of FP8 with a float32 scale a row, and BF16."""
    fp8 = 8 + 32 / 4096
    for name, saved, held, sent in (
        ("tetrajet", 4.25, 8.5, 4.25),
        ("mxfp4", 4.25, 8.5, 16),
        ("mxfp4-rht-sr", 4.25, 4.25, 16),
        (BF16, 16, 0, 16),
    ):
        assert recipe_facts.bits(recipe_named(name)) == (recipe_facts.Bits(saved, held, sent))
    assert recipe_facts.bits(get_recipe("fp8")).saved == pytest.approx(fp8, abs=0.005)


def test_the_speed_by_phases_is_that_of_the_mean_time(monkeypatch: pytest.MonkeyPatch) -> None:
    first = "benchmarks/study/candidates/fp8-ends.yaml"
    rows = [
        {"name": "bf16", "ms": 100.0, "tokens/s": 10.0, "peak_gib": 3.0},
        {"name": "tetrajet", "ms": 50.0, "tokens/s": 20.0, "peak_gib": 1.0},
        {"name": "fp8", "ms": 75.0, "tokens/s": 13.3, "peak_gib": 2.0},
        {"name": OWN["tetrajet-fp8"], "ms": 2.0, "tokens/s": 500.0, "peak_gib": 9.0},  # a phase
    ]
    monkeypatch.setattr(recipe_facts, "_result", lambda name: {"rows": rows})
    found = step_of(candidate("tetrajet-then-fp8"))
    assert found is not None and found.by_phases
    assert found.ratio == pytest.approx(100 / (0.8 * 50 + 0.2 * 75))
    assert found.tokens == pytest.approx(10 * found.ratio)
    assert step_of("tetrajet-fp8") is None  # its first part is not there
    rows.append({"name": first, "ms": 60.0, "tokens/s": 16.7, "peak_gib": 1.5})
    own = step_of("tetrajet-fp8")
    assert own is not None and own.ratio == pytest.approx(100 / (0.8 * 60 + 0.2 * 75))
    assert (own.peak, found.peak) == (2.0, 2.0)  # that of `fp8`, the last phase of both
    alone = step_of(first)
    assert alone is not None and alone.tokens == 16.7 and not alone.by_phases
    assert step_of("mxfp4") is None


def test_the_command_writes_the_pages_and_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "docs/notes").mkdir(parents=True)
    (tmp_path / "docs/images").mkdir()
    committed = {}
    for name, sections in recipes_page.pages_of(FOUND).items():
        committed[name] = (ROOT / name).read_text()
        emptied = recipes_page.into(committed[name], dict.fromkeys(sections, ""))
        (tmp_path / name).write_text(emptied)
    assert main(["recipes", "--root", str(tmp_path)]) == 0
    assert {name: (tmp_path / name).read_text() for name in committed} == committed
    picture = recipes_page.PICTURE
    assert (tmp_path / picture).read_bytes() == (ROOT / picture).read_bytes()


def test_a_page_without_marker_lines_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["recipes", "--root", str(tmp_path)]) == 2
    (tmp_path / "README.md").write_text("no marks")
    assert main(["recipes", "--root", str(tmp_path)]) == 2
    assert "the page has no lines <!-- recipes: head -->" in capsys.readouterr().err


def test_a_comparison_without_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match="no run of a recipe"):
        comparison.read(tmp_path)


def test_every_recipe_has_the_speed_of_a_step_of_one_run() -> None:
    bf16 = recipe_facts._rows()[BF16]
    for name in (BF16, *list_recipes()):
        found = step_of(name)
        assert found is not None and found.by_phases == (name == "tetrajet-fp8")
        assert found.tokens / found.ratio == pytest.approx(bf16["tokens/s"], rel=1e-3)
        assert recipes_page.speed(name, "")[1] == f"{found.tokens:,.0f}"


def test_the_perplexity_ratio_of_each_cell() -> None:
    head, _, *lines = recipes_page.loss_table(FOUND, [BF16, "tetrajet", "mxfp4"], "")
    place = head.split(" | ").index("perplexity ratio, 60M")
    ratio = f"{math.exp(of_60m('tetrajet').mean):.3f}"
    assert [line.split(" | ")[place] for line in lines] == ["1", ratio, ""]


def test_runs_of_another_numerics_version_are_named() -> None:
    rows, _ = runs_of_study("oscillation-3M")
    assert {row["configuration"]["numerics"] for row in rows} == {2} != {NUMERICS_VERSION}
    assert earlier_numerics(rows) == ", numerics version 2"
    today = [r | {"configuration": r["configuration"] | {"numerics": 3}} for r in rows]
    assert earlier_numerics(today) == ""
    lines = small_table()[2:]
    for line in lines:
        study = line.split("`")[1]
        assert ("numerics version 2 |" in line) == (study == "oscillation-3M")
    page = (ROOT / recipes_page.CLAIMS).read_text()
    claimed = [line for line in page.splitlines() if "[`oscillation-3M`]" in line]
    assert claimed and all(", numerics version 2, " in line for line in claimed)
