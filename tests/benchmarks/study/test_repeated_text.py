"""What docs/recipes.md and docs/study.md say of text that is read more than once."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest

from benchmarks.study import comparison, matrix, tables
from benchmarks.study.entries import BF16
from benchmarks.study.gaps import Cell, Gap, cell_of, gap, runs_of, training
from benchmarks.study.repeated_text import ONCE, RECIPES, repeated_table
from benchmarks.study.sizes import SIZES
from tests.benchmarks.study.prose import linears, prose, recipes_prose, rows_of
from tools.rows import Row

FOUND = comparison.read()
CELLS = {cell.size: cell for cell in FOUND.cells}
RECIPES_PAGE, STUDY_PAGE = recipes_prose(), prose("docs/study.md")
OWN = "tetrajet-fp8"
NO_NVFP4 = ["fp8", OWN, "tetrajet"]  # the finalists that were run at 60M


def both_gaps(rows: list[Row], cell: Cell, recipe: str) -> tuple[Gap, Gap]:
    """The gaps of a recipe in held-out and in training loss."""
    held_out, trained = gap(rows, cell, recipe, BF16), gap(rows, cell, recipe, BF16, training)
    assert held_out is not None and trained is not None
    return held_out, trained


def gaps_of(recipe: str, size: str) -> tuple[Gap, Gap]:
    """`both_gaps` in the comparison's runs of a size."""
    return both_gaps(FOUND.rows, CELLS[size], recipe)


def means(recipe: str, size: str) -> list[float]:
    return [found.mean for found in gaps_of(recipe, size)]


def curve(recipe: str, size: str, losses: str) -> dict[int, float]:
    """The mean over the runs at each step. losses: "train" or "held_out"."""
    series = [dict(row[losses]) for row in runs_of(FOUND.rows, CELLS[size], recipe)]
    return {step: statistics.mean(each[step] for each in series) for step in series[0]}


def at(series: dict[int, float], step: int) -> float:
    """The value of the last report up to a step."""
    return series[max(each for each in series if each <= step)]


def test_the_training_gap_is_that_of_the_last_reports() -> None:
    """Paired by seed, and of the same batches."""
    rows = rows_of("sizes")
    last = {
        (of["recipe"], of["seed"]): row["train"][-1] for row in rows if (of := row["configuration"])
    }
    _, trained = gaps_of("tetrajet", "60M")
    for seed, found in trained.by_seed.items():
        (step, loss), (same, plain) = last["tetrajet", seed], last[BF16, seed]
        assert step == same and found == pytest.approx(loss - plain)
        first = dict(next(r for r in rows if r["configuration"]["seed"] == seed)["train"])
        assert found != pytest.approx(loss - first[1], abs=0.1)  # the control
    assert set(trained.by_seed) == {1, 2}


def test_the_table_has_every_finalist_that_was_run() -> None:
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in repeated_table(FOUND)[2:]]
    assert [line[0] for line in lines] == sorted((line[0] for line in lines), key=[*SIZES].index)
    shown = {(line[0], line[2], line[3].strip("`")): line for line in lines}
    assert len(shown) == len(lines)
    found = [(rows_of(name), cell) for name in ONCE for cell in tables.cells(rows_of(name))]
    for rows, cell in [(FOUND.rows, cell) for cell in FOUND.cells] + found:
        for recipe in RECIPES:
            if runs := runs_of(rows, cell, recipe):
                tokens = cell.steps * SIZES[cell.size].tokens
                times = f"{tokens / runs[0]['text']['train']['tokens']:.2f} times"
                line = shown.pop((cell.size, times, recipe))
                held_out, trained = both_gaps(rows, cell, recipe)
                assert line[5].startswith(f"{held_out.mean:+.3f}")
                assert line[6].startswith(f"{trained.mean:+.3f}")
    assert not shown


def test_another_training_loss_changes_the_table() -> None:
    def changed(row: Row) -> Row:
        step, loss = row["train"][-1]
        own = row["configuration"]["recipe"] == OWN and cell_of(row) == CELLS["150M"]
        return row | {"train": [[step, loss + 0.01]]} if own else row

    assert repeated_table(replace(FOUND, rows=[*map(changed, FOUND.rows)])) != repeated_table(FOUND)


def test_what_repeated_text_does() -> None:
    (held, trained), (held_60m, trained_60m) = (means("tetrajet", size) for size in ("26M", "60M"))
    (own, own_trained), (own_60m, own_trained_60m) = (means(OWN, size) for size in ("26M", "60M"))
    eight = means("fp8", "60M")
    assert abs(eight[1] - eight[0]) < 0.002  # "about the same in both losses"
    below = {
        name: curve(name, "60M", "held_out")[3050] - at(curve(name, "60M", "train"), 3050)
        for name in (BF16, "tetrajet")
    }
    begins = {
        losses: at(curve("tetrajet", "60M", losses), 765) - at(curve(BF16, "60M", losses), 765)
        for losses in ("held_out", "train")
    }
    for text in (
        f"{trained:.3f} and not {held:.3f} at 26M",
        f"at 60M {trained_60m:.3f} and not {held_60m:.3f}.",
        f"nearly the same: {begins['held_out']:.3f} in held-out and {begins['train']:.3f} in "
        "training loss. From there to the end the first falls to "
        f"{held_60m:.3f}, and the second grows to {trained_60m:.3f}.",
        f"over 200M tokens the gap of `{OWN}` is {own / held:.2f} times that of `tetrajet` in "
        "held-out loss at 26M, "
        f"and {own_trained / trained:.2f} times in training loss. At 60M it is "
        f"{own_60m / held_60m:.2f} and {own_trained_60m / trained_60m:.2f} times.",
        f"In training loss the two are at {trained:.3f} and {own_trained:.3f} at 26M",
        f"and at {trained_60m:.3f} and {own_trained_60m:.3f} at 60M, where it is read [four times]",
        f"at 60M BF16's training loss ends {below[BF16]:.3f} below its held-out loss, and that of "
        f"`tetrajet` {below['tetrajet']:.3f} below.",
        f"In training loss `fp8` is {eight[1]:.3f} above BF16 there, and `tetrajet-fp8` "
        f"{own_trained_60m:.3f}.",
    ):
        assert text in RECIPES_PAGE, text
    assert max(own / held, own_60m / held_60m, own_trained / trained) < 0.5
    assert own_trained_60m / trained_60m < 0.5


def test_the_gaps_are_the_same_where_the_text_is_read_once() -> None:
    rows = rows_of("recipes-3M")
    [cell] = tables.cells(rows)
    assert tables.epochs(rows[0]) < 1 < tables.epochs(runs_of(FOUND.rows, CELLS["26M"], BF16)[0])
    for name in RECIPES:
        held_out, trained = both_gaps(rows, cell, name)
        assert abs(held_out.mean - trained.mean) < 0.005
    held_out, trained = gaps_of("tetrajet", "26M")
    assert trained.mean - held_out.mean > 0.02  # the control: read twice
    says = "where no text is read twice, the gaps in both losses are less than 0.005 apart."
    assert says in RECIPES_PAGE


def test_larger_models_that_read_the_text_once() -> None:
    rows = rows_of("one-epoch")
    assert {row["configuration"]["seed"] for row in rows} == {1}
    small, large = tables.cells(rows)
    found = {
        (cell.size, name): both_gaps(rows, cell, name)
        for cell in (small, large)
        for name in RECIPES
        if runs_of(rows, cell, name)
    }
    assert max(abs(trained.mean - held_out.mean) for held_out, trained in found.values()) < 0.004
    gaps = {key: held_out.mean for key, (held_out, _) in found.items()}
    plain, own, eight = (gaps["150M", name] for name in ("tetrajet", OWN, "fp8"))
    assert abs(own - eight) < 0.001
    others = [means("fp8", "26M"), means("fp8", "60M")]
    assert all(loss < eight / 2 for both in others for loss in both)
    series = {row["configuration"]["recipe"]: dict(row["held_out"]) for row in rows[:4]}
    tokens = {size: 723 * SIZES[size].tokens / linears(size) for size in ("26M", "150M")}
    for text in (
        f"That of `tetrajet` is {gaps['26M', 'tetrajet']:.3f} at 26M and {plain:.3f} at 150M",
        f"that of `{OWN}` {gaps['26M', OWN]:.3f} and {own:.3f} (one seed each",
        f"at 150M the gap of `{OWN}` is {own / plain:.2f} times that of `tetrajet`",
        f"The two end {plain - own:.3f} apart",
        f"`fp8` is {eight:.3f} above it, more than in any other cell of this table",
        f"are {tokens['26M']:.1f} for each parameter of the layers at 26M, and "
        f"{tokens['150M']:.1f} at 150M",
        f"at 150M from {series['tetrajet'][362] - series[BF16][362]:.3f} after "
        f"{362 * SIZES['150M'].tokens / 1e6:.0f}M tokens to {plain:.3f}.",
        f"`{OWN}` and `fp8` end {own:.3f} above BF16 and `tetrajet` {plain:.3f} (one seed).",
    ):
        assert text in RECIPES_PAGE, text
    assert (
        f"`fp8` and `{OWN}` end {own:.3f} above BF16 and `tetrajet` {plain:.3f}, which one seed "
        "does not tell apart."
    ) in prose("README.md")
    assert "gaps in training loss, which are within 0.004 of these" in STUDY_PAGE


def test_the_order_is_the_same_in_both_losses() -> None:
    for size in ("26M", "60M"):
        found = {name: means(name, size) for name in RECIPES if size == "26M" or name in NO_NVFP4}
        held_out, trained = (sorted(found, key=lambda name: found[name][i]) for i in (0, 1))
        assert held_out == trained == [*found]
    assert "the order at 26M and 60M is the same in both losses" in RECIPES_PAGE


def test_the_longest_pair() -> None:
    (held_out, trained), whole = gaps_of(OWN, "150M"), prose("README.md")
    assert [*held_out.by_seed] == [1]
    plain, loss = curve(BF16, "150M", "held_out"), curve(BF16, "150M", "train")
    [before, last] = [*plain][-2:]
    early = curve(OWN, "150M", "held_out")[before] - plain[before]
    assert before / CELLS["150M"].steps < 0.8
    for text in (
        f"ends {-held_out.mean:.3f} below BF16 in held-out loss, and {trained.mean:.3f} above it "
        "in training loss (one seed).",
        f"training loss falls from {at(loss, before):.3f} to {at(loss, last):.3f}, and its "
        f"held-out loss from {plain[before]:.3f} to {plain[last]:.3f}",
    ):
        assert text in RECIPES_PAGE, text
    times = {row["configuration"]["recipe"]: row["milliseconds"] for row in rows_of("largest")}
    [ratio] = [ms / times[BF16] for recipe, ms in times.items() if recipe != BF16]
    for text in (
        f"ends {-held_out.mean:.4f} below BF16 in held-out loss, and {trained.mean:.4f} above it",
        f"After {before:,} steps, before its last fifth in `fp8`, it is {early:.4f} above BF16",
        f"Its median step takes {ratio:.2f} times BF16's",
    ):
        assert text in STUDY_PAGE, text
    tokens = CELLS["150M"].steps * SIZES["150M"].tokens
    assert f"at 150M parameters and {tokens / 1e6:.0f}M tokens, with one seed." in whole


def test_the_matrix_of_one_epoch_reads_no_text_twice() -> None:
    study, text = matrix.read("one-epoch"), rows_of("largest")[0]["text"]
    for point in study.points():
        tokens = point.steps * SIZES[point.size].tokens
        left = text["train"]["tokens"] - tokens
        assert 0 <= left == 33_389 < SIZES[point.size].tokens
