"""The table of the papers' claims in docs/paper-claims.md."""

from __future__ import annotations

from pathlib import Path

from benchmarks.study import tables
from benchmarks.study.claims import CLAIMS, SPACE
from benchmarks.study.committed import RESULTS, earlier_numerics, runs_of_study
from benchmarks.study.errors import StudyError
from benchmarks.study.gap_words import NOT_RUN, gap_and_seeds, label
from benchmarks.study.gaps import Cell, cell_of, gap
from benchmarks.study.papers import PAPERS
from benchmarks.study.verdicts import Claim, Pair, effect_of, verdict, verdict_of_effect
from tools.pages import table
from tools.rows import Row

DOCS = RESULTS.parents[1] / "docs"


def claims_table(rows: list[Row], first: Cell) -> list[str]:
    """What papers claim, what was seen, and whether the claim held.

    rows: the finished runs of the page's comparison. first: its first cell.
    """
    space = (DOCS / SPACE).read_text()
    body = []
    for claim in CLAIMS:
        source = f"{PAPERS[claim.paper]}, [{claim.paper}](https://arxiv.org/abs/{claim.paper})"
        if claim.pair is not None:
            seen = seen_of_pair(rows, first, claim, claim.pair)
        elif claim.effects:
            seen = seen_of_effects(space, claim)
        else:
            seen = [f"[{claim.page}]({claim.page}): {claim.seen}", claim.verdict]
        body.append([source, claim.text, *seen])
    return table(["paper", "claim", "seen here", "the claim is"], body)


def seen_of_pair(rows: list[Row], first: Cell, claim: Claim, pair: Pair) -> list[str]:
    """[what was seen of the claim of a pair, its verdict]."""
    where, own, cell = place_of(rows, first, pair)
    names = f"{_short(pair.recipe)} minus {_short(pair.against)}, {where}"
    found = None if cell is None else gap(own, cell, pair.recipe, pair.against)
    if cell is None or found is None:
        return [f"{names}: {NOT_RUN}", NOT_RUN]
    told = verdict(found, claim.expects, claim.most, cell.size)
    return [f"{names}: {gap_and_seeds(found)}", told]


def seen_of_effects(space: str, claim: Claim) -> list[str]:
    """[what was seen of a claim with effects, its verdict]. space: the text of design-space.md."""
    found = {row: effect_of(space, row, claim.stage) for row in claim.effects}
    seen = [
        f"*{row.replace(' | ', ', ')}*: {each.mean:+.4f} ({each.low:+.4f} to {each.high:+.4f}), "
        f"{each.pairs} pairs"
        for row, each in found.items()
    ]
    seen += [claim.seen] if claim.seen else []
    verdicts = dict.fromkeys(verdict_of_effect(each, claim.expects) for each in found.values())
    place = f"[{SPACE}]({SPACE}#results), `{claim.stage}`"
    return [f"{place}: {'; '.join(seen)}", claim.verdict or "; ".join(verdicts)]


def place_of(rows: list[Row], first: Cell, pair: Pair) -> tuple[str, list[Row], Cell | None]:
    """Where the two recipes of a pair are compared.

    rows, first: the runs and the cell of a pair that names no study, as in `claims_table`.

    Returns (words, runs, cell). words: as in "`recipes-3M`, 3M, 25M tokens, rate 0.0015"; of a
    study without runs its name alone. runs: the finished ones of the study. cell: that of its
    longest runs of the newest numerics version with the pair's learning rate; None of a study
    without runs. Raises StudyError if there are several.
    """
    if not pair.study:
        return label(first), rows, first
    own, _ = runs_of_study(pair.study)
    cells = [cell for cell in tables.cells(own) if pair.rate in (None, cell.learning_rate)]
    study = f"[`{pair.study}`](study.md#run-a-matrix)"
    if not cells:  # no run of the study has finished
        return study, own, None
    last = max((cell.numerics, cell.steps) for cell in cells)
    longest, *others = [cell for cell in cells if (cell.numerics, cell.steps) == last]
    if others:
        raise StudyError(f"a claim on {pair.recipe} names one of several cells of {pair.study}")
    of_it = [row for row in own if cell_of(row) == longest]
    return f"{study}{earlier_numerics(of_it)}, {label(longest)}", own, longest


def _short(entry: str) -> str:
    """A recipe of a matrix by its name: a file's without its folder, a combination's words."""
    name = Path(entry).stem if entry.endswith(".yaml") else entry
    return f"`{name.removeprefix('tools.sweep.building:combined,')}`"
