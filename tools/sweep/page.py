"""The tables of a sweep's results, as Markdown."""

from __future__ import annotations

import statistics
from itertools import pairwise

from megatron_fp4.estimate.overhead import DEVICES
from tools.pages import table
from tools.rows import Row
from tools.sweep import factorial, llama
from tools.sweep.agreement import Agreement, agreement
from tools.sweep.axes import AXES, WHAT
from tools.sweep.effects import Effect, effects
from tools.sweep.findings import FINDINGS, summary
from tools.sweep.pareto import Point, frontier, points
from tools.sweep.promotion import LEVELS, lines_of, stars_of
from tools.sweep.results import SCORES, scores
from tools.sweep.running import FAILED
from tools.sweep.stages import STAGES

# Of which the effects have a column: a stage, a figure, and what it is.
FIGURES = (
    ("products", "y error", "error of Y"),
    ("products", "dw error", "error of dW"),
    ("draws", "dw bias", "bias of dW"),
    ("regression", "loss", "regression"),
    ("digits", "loss", "digits"),
    ("diffusion", "loss", "diffusion"),
    (llama.NAME, "loss", "LLaMA"),
)
TRAINED = ("regression", "digits", "diffusion", llama.NAME)  # stages whose score is a loss
BEST = 10  # combinations of a table of the best


def section(rows: list[Row]) -> str:
    """All tables. rows: of a result file. Raises ValueError if there are none."""
    if not rows:
        raise ValueError("there are no results: python -m tools.sweep run products")
    parts = [stages_table(rows), agreement_table(rows), findings_table(rows), effects_table(rows)]
    stage, every = last_scores(rows)
    parts += [[f"The best {BEST} of `{stage}` that quantize all three GEMMs:"], best_table(every)]
    for device in DEVICES:
        what = f"No combination is better in `{stage}` and needs less time on {device} than these:"
        parts += [[what], frontier_table(every, device)]
    return "\n\n".join("\n".join(part) for part in parts if part)


def last_scores(rows: list[Row]) -> tuple[str, list[Point]]:
    """The last stage that has results, and its combinations with scores and times."""
    stage = next(stage for stage in reversed(SCORES) if scores(rows, stage))
    return stage, points(scores(rows, stage))


def axes_table() -> list[str]:
    """The axes, what they are, and their values."""
    values = [", ".join(f"`{value}`" for value in found) for found in AXES.values()]
    rows = [[f"`{a}`", WHAT[a], v] for a, v in zip(AXES, values, strict=True)]
    return table(["axis", "what it is", "values"], rows)


def stages_table(rows: list[Row]) -> list[str]:
    """How many combinations each stage evaluated, and what one takes."""
    lines = []
    for stage in STAGES.values():
        own = [row for row in rows if row["stage"] == stage.name]
        if own:
            failed = sum(row["status"] == FAILED for row in own)
            seconds = statistics.median(row["seconds"] for row in own)
            cells = [f"`{stage.name}`", stage.what, f"{len(own):,}", str(failed)]
            lines.append([*cells, str(stage.seeds), f"{seconds:.1f}"])
    head = ["stage", "what it measures", "combinations", "diverged", "seeds", "seconds each"]
    return table(head, lines)


def agreement_table(rows: list[Row]) -> list[str]:
    """How each stage ranks combinations as a stage of the next level does."""
    lines = []
    for level, following in pairwise(LEVELS):
        for first in level.stages:
            for second in following.stages:
                found = agreement(rows, first, second)
                if found is not None:
                    lines.append([f"`{first}`", f"`{second}`", *_cells(found)])
    if not lines:
        return []
    head = ["stage", "next", "combinations", "rank correlation", "95% interval", "ceiling"]
    return table([*head, "it predicts"], lines)


def _cells(found: Agreement) -> list[str]:
    low, high = found.interval
    ceiling = "" if found.ceiling is None else f"{found.ceiling:.2f}"
    numbers = [str(found.number), f"{found.correlation:.2f}", f"{low:.2f} to {high:.2f}"]
    return [*numbers, ceiling, "yes" if found.predicts else "nothing that is certain"]


def findings_table(rows: list[Row]) -> list[str]:
    """A line for each claim of findings.py: its differences in each stage that trains a model, and
    the verdict of the last of these stages. No lines without results of the factorial."""
    stars, columns = stars_of(rows), {}
    for stage in TRAINED:
        every = scores(rows, stage)
        found = {each: score for each, score in every.items() if stars[each] == factorial.STAR}
        if found:
            columns[stage] = found
    if not columns:
        return []
    lines = []
    for finding in FINDINGS:
        differences = [finding.differences(found) for found in columns.values()]
        lines.append([finding.claim, *map(summary, differences), finding.verdict(differences[-1])])
    return table(["claim", *(f"`{stage}`" for stage in columns), "verdict"], lines)


def effects_table(rows: list[Row]) -> list[str]:
    """What each value of an axis changes, in combinations that differ on this axis alone.

    Only lines that were promoted at random count, so that it is no matter which were the best.
    """
    columns = {}
    stars = stars_of(rows)
    for stage, figure, name in FIGURES:
        every = scores(rows, stage, figure=figure)
        chosen = lines_of(stars, stage)
        found = {each: score for each, score in every.items() if each in chosen}
        if found:
            columns[name] = {(e.axis, e.value, e.against): e for e in effects(found)}
    keys = dict.fromkeys(key for column in columns.values() for key in column)
    lines = [
        [f"`{axis}`", f"`{value}`", f"`{against}`"]
        + [_effect(column.get((axis, value, against))) for column in columns.values()]
        for axis, value, against in keys
    ]
    return table(["axis", "value", "against", *columns], lines)


def _effect(effect: Effect | None) -> str:
    """The median, the quartiles, and the number of pairs."""
    if effect is None:
        return ""
    low, high = effect.quartiles
    return f"{effect.median:+.2g} ({low:+.2g} to {high:+.2g}; {len(effect.differences)})"


def best_table(every: list[Point]) -> list[str]:
    """The best combinations, among those that quantize all three GEMMs."""
    fp4 = [p for p in every if p.combination.forward == p.combination.backward == "fp4"]
    return _points_table(fp4[:BEST])


def frontier_table(every: list[Point], device: str) -> list[str]:
    """The combinations on the frontier of score and time on a device."""
    return _points_table(frontier(every, device))


def _points_table(found: list[Point]) -> list[str]:
    lines = [
        [
            f"{point.score:+.4f}",
            *(f"{point.times[device]:.2f}" for device in DEVICES),
            f"`{point.combination}`",
        ]
        for point in found
    ]
    return table(["score", *(f"time, {device}" for device in DEVICES), "combination"], lines)
