"""The tables of a sweep's results, as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Container, Iterable
from itertools import combinations
from pathlib import Path

from tools.pages import table
from tools.rows import Row
from tools.sweep import factorial, llama, words
from tools.sweep.agreement import Agreement, Correlation, agreement, agreement_of_designed
from tools.sweep.axes import AXES, WHAT, Combination, without_training
from tools.sweep.bias import bias_table
from tools.sweep.effects import Effect, effects
from tools.sweep.findings import FINDINGS, summary
from tools.sweep.main_effects import MAIN_EFFECTS, main_effects_table
from tools.sweep.pareto import Point, points
from tools.sweep.points_tables import points_section
from tools.sweep.promotion import (
    DESIGNED,
    WITHOUT_TRAINING,
    evaluated,
    level_of,
    lines_of,
    stars_of,
)
from tools.sweep.provenance import provenance
from tools.sweep.results import BF16, SCORES, scores, seeds_of
from tools.sweep.running import FAILED, FINISHED
from tools.sweep.stages import STAGES

# A column of a table of effects: a stage, a figure, and what it is.
Column = tuple[str, str, str]
OPERANDS: list[Column] = [
    ("products", f"{operand} {figure}", f"{text} of {name}")
    for operand, name in (("x", "X"), ("w", "W"), ("dy", "dY"))
    for figure, text in (("error", "error"), ("zeros", "zeros"))
]
PRODUCTS: list[Column] = [
    ("products", "y error", "error of Y"),
    ("products", "dx error", "error of dX"),
    ("products", "dw error", "error of dW"),
    ("draws", "dx bias", "bias of dX"),
    ("draws", "dx variance", "variance of dX"),
    ("draws", "dw bias", "bias of dW"),
    ("draws", "dw variance", "variance of dW"),
]
LOSSES: list[Column] = [
    ("regression", "loss", "regression"),
    ("digits", "loss", "digits"),
    ("diffusion", "loss", "diffusion"),
    (llama.NAME, "loss", "LLaMA"),
]
TRAINED = [stage for stage, *_ in LOSSES]


def section(rows: list[Row], study: Path | None) -> str:
    """All tables. rows: of a result file. study: that of the last stage's runs; None if the rows
    have none. Raises ValueError if there are no rows."""
    if not rows:
        raise ValueError("there are no results: python -m tools.sweep run products")
    parts = [stages_table(rows), missing(rows), left_out(rows)]
    parts += [["Where they ran:"], provenance(rows, study)]
    rows = compared(rows)
    parts += [agreement_table(rows)]
    if designed := designed_table(rows):
        what = "How the stages rank the combinations of the two designs, as the last stage does"
        parts += [[f"{what}; the bootstrap is over bases:"], designed]
    parts += [findings_table(rows)]
    if columns_of_factorial := of_factorial(rows):
        parts += [["What each change does, over all pairs of the factorial:"]]
        parts += [main_effects_table(MAIN_EFFECTS, columns_of_factorial)]
    if words.STAR in stars_of(rows).values():
        parts += [["What each word does, in pairs that are alike but for it:"]]
        parts += [main_effects_table(words.WORDS, of_design(rows, DESIGNED))]
    if biases := bias_table(rows):
        what = (
            "The bias of gradients in `draws` (relative, squared), by what the backward pass does"
        )
        parts += [[f"{what}; SR is stochastic rounding:"], biases]
    for what, columns in (
        ("losses", LOSSES),
        ("products and gradients", PRODUCTS),
        ("operands", OPERANDS),
    ):
        found = effects_table(rows, columns)
        parts += [[f"What each value does to {what}:"], found] if found else []
    if stage := last_stage(rows):
        parts += points_section(points_of(rows, stage), stage)
    return "\n\n".join("\n".join(part) for part in parts if part)


def without_bf16(rows: list[Row]) -> list[str]:
    """The stages that train a model and have results, but none of BF16, from which scores there
    are differences."""
    finished = [row for row in rows if row["status"] == FINISHED]
    own = {stage: evaluated(finished, stage) for stage in TRAINED}
    return [stage for stage in TRAINED if own[stage] and own[stage].isdisjoint(BF16.values())]


def compared(rows: list[Row]) -> list[Row]:
    """The rows without those of `without_bf16`, whose losses would be taken for scores."""
    others = without_bf16(rows)
    return [row for row in rows if row["stage"] not in others]


def left_out(rows: list[Row]) -> list[str]:
    """The page's sentence about stages that its tables leave out. A score is a loss minus BF16's,
    so a stage without results of BF16 has no scores. [] if no stage is left out."""
    names = ", ".join(f"`{stage}`" for stage in without_bf16(rows))
    why = "BF16, less which scores are, has no results there yet"
    return [f"Left out of the tables below: {names}. {why}."] if names else []


def last_stage(rows: list[Row]) -> str | None:
    """The last stage that has scores; None if there is none."""
    return next((stage for stage in reversed(SCORES) if scores(rows, stage)), None)


def points_of(rows: list[Row], stage: str) -> list[Point]:
    """The recipes of a stage, with their scores and times."""
    own, errors = _of_recipes(scores(rows, stage), stage), standard_errors(rows, stage)
    return points(own, errors, len(seeds_of(rows, stage)))


def _of_recipes(every: dict[Combination, float], stage: str) -> dict[Combination, float]:
    """The scores of a stage, without repeats of the same recipe.

    Some stages (`WITHOUT_TRAINING`) do not depend on the axes of training, such as the optimizer.
    Combinations that differ only in these axes have the same score there. It is kept once, under
    the combination that has the first value of each of these axes.

    every: the score of each combination. stage: a key of SCORES.
    """
    if stage not in WITHOUT_TRAINING:
        return every
    return {without_training(each): score for each, score in every.items()}


def _by_seed(rows: list[Row], stage: str) -> list[dict[Combination, float]]:
    """The scores of each seed by itself, as `_of_recipes` has them."""
    return [_of_recipes(scores(rows, stage, [seed]), stage) for seed in seeds_of(rows, stage)]


def missing(rows: list[Row]) -> list[str]:
    """One line that names the stages without results in `rows`; [] if every stage has some.

    A combination has a result of a stage once all its seeds have run.
    """
    found = {row["stage"] for row in rows}
    names = [f"`{stage}`" for stage in SCORES if stage not in found]
    return [f"Not complete yet: {', '.join(names)}."] if names else []


def axes_table() -> list[str]:
    """The axes, what they are, and their values."""
    values = [", ".join(f"`{value}`" for value in found) for found in AXES.values()]
    rows = [[f"`{a}`", WHAT[a], v] for a, v in zip(AXES, values, strict=True)]
    return table(["axis", "what it is", "values"], rows)


def stages_table(rows: list[Row]) -> list[str]:
    """How many combinations each stage evaluated, and what this took."""
    lines = []
    for name in SCORES:
        own = [row for row in rows if row["stage"] == name]
        if own:
            what = STAGES[name].what if name in STAGES else llama.WHAT
            failed = sum(row["status"] == FAILED for row in own)
            taken = [row["seconds"] for row in own]
            numbers = [f"{len(own):,}", str(failed), str(len(seeds_of(rows, name)))]
            times = [f"{statistics.median(taken):.1f}", f"{sum(taken) / 3600:.2f}"]
            lines.append([f"`{name}`", what, *numbers, *times])
    head = ["stage", "what it measures", "combinations", "failed", "seeds", "seconds each", "hours"]
    return table(head, lines)


def agreement_table(rows: list[Row]) -> list[str]:
    """How each stage ranks combinations as the others of its level and those of the next do."""
    lines = []
    for first, second in combinations(SCORES, 2):
        if level_of(second) - level_of(first) <= 1:
            found = agreement(rows, first, second)
            if found is not None:
                lines.append([f"`{first}`", f"`{second}`", *_cells(found)])
    if not lines:
        return []
    head = ["stage", "later stage", "combinations", "rank correlation", "ceiling"]
    return table([*head, "same GEMMs", "better half", "it predicts"], lines)


def _cells(found: Agreement) -> list[str]:
    every, *others = map(correlation, (found.every, found.alike, found.better_half))
    told = "yes" if found.every.above_0 else "no"
    return [str(found.number), every, _ceiling(found.ceiling), *others, told]


def designed_table(rows: list[Row]) -> list[str]:
    """A table of how well each stage predicts the last one, over the combinations of factorial.py
    and words.py, and over the half of them that the stage prefers (`agreement_of_designed`).

    A stage has a line if enough of them have results of it and of the last stage.
    """
    lines = []
    for first in STAGES:
        if found := agreement_of_designed(rows, first, llama.NAME):
            half, ceiling = correlation(found.better_half), _ceiling(found.ceiling_of_half)
            cells = [str(found.number), correlation(found.every), _ceiling(found.ceiling)]
            told = "yes" if found.better_half.above_0 else "no"
            lines.append([f"`{first}`", *cells, half, ceiling, told])
    head = ["stage", "combinations", "rank correlation", "ceiling", "better half"]
    head += ["ceiling of the half", "it tells which good ones are best"]
    return table(head, lines) if lines else []


def correlation(found: Correlation) -> str:
    """A correlation as text, with its interval: "0.53 (0.25 to 0.69)"."""
    low, high = found.interval
    return f"{found.value:.2f} ({low:.2f} to {high:.2f})"


def _ceiling(found: float | None) -> str:
    return "one seed" if found is None else f"{found:.2f}"


def findings_table(rows: list[Row]) -> list[str]:
    """A line for each claim of findings.py: its differences in each stage that trains a model, and
    the verdict of the last of these stages. No lines without results of the factorial."""
    if not of_factorial(rows):
        return []
    columns = of_design(rows, DESIGNED)
    last, own = list(columns.items())[-1]
    by_seed = [{each: every[each] for each in own} for every in _by_seed(rows, last)]
    lines = []
    for finding in FINDINGS:
        differences = [finding.differences(found) for found in columns.values()]
        verdict = finding.verdict(own, by_seed)
        lines.append([finding.claim, *map(summary, differences), verdict])
    return table(["claim", *(f"`{stage}`" for stage in columns), "verdict"], lines)


def of_factorial(rows: list[Row]) -> dict[str, dict[Combination, float]]:
    """The scores of the factorial's combinations, by stage that trains a model and has some."""
    return of_design(rows, (factorial.STAR,))


def of_design(rows: list[Row], own: Container[str]) -> dict[str, dict[Combination, float]]:
    """The scores of the combinations of the stars `own`, by stage that trains a model and has
    some."""
    stars, columns = stars_of(rows), {}
    for stage in TRAINED:
        every = scores(rows, stage)
        found = {each: score for each, score in every.items() if stars[each] in own}
        if found:
            columns[stage] = _of_recipes(found, stage)
    return columns


def effects_table(rows: list[Row], columns: Iterable[Column]) -> list[str]:
    """What each value of an axis changes, on lines that were promoted at random, so that it is no
    matter which were the best. No lines without results."""
    found, stars = {}, stars_of(rows)
    for stage, figure, name in columns:
        every = effects(scores(rows, stage, figure=figure), lines_of(stars, stage))
        if every:
            found[name] = {(e.axis, e.value, e.against): e for e in every}
    keys = dict.fromkeys(key for column in found.values() for key in column)
    lines = [
        [f"`{axis}`", f"`{value}`", f"`{against}`"]
        + [_effect(column.get((axis, value, against))) for column in found.values()]
        for axis, value, against in keys
    ]
    changed = [line for line in lines if any(cell not in ("", "0") for cell in line[3:])]
    return table(["axis", "value", "against", *found], changed) if changed else []


def _effect(effect: Effect | None) -> str:
    """The median, the quartiles, and the number of pairs; "0" where nothing changes."""
    if effect is None:
        return ""
    if not any(effect.differences):
        return "0"
    if len(effect.differences) == 1:
        return f"{effect.median:+.2g} (1)"
    low, high = effect.quartiles
    return f"{effect.median:+.2g} ({low:+.2g} to {high:+.2g}; {len(effect.differences)})"


def standard_errors(rows: list[Row], stage: str) -> dict[Combination, float]:
    """The standard error over the seeds of each combination's score; none of a single seed."""
    by_seed = _by_seed(rows, stage)
    if len(by_seed) < 2:
        return {}
    each_by_seed = {each: [own[each] for own in by_seed] for each in by_seed[0]}
    return {each: statistics.stdev(own) / len(own) ** 0.5 for each, own in each_by_seed.items()}
