"""A paper's claim of docs/paper-claims.md, what of this project tests it, and the verdict on it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from benchmarks.study.errors import StudyError
from benchmarks.study.gaps import ENOUGH, Gap

# Twice the range of three runs of `tetrajet` at MEASURED_AT that differ in rounding noise alone
# (0.0051). Single runs of smaller models are further apart.
NOISE = 0.01
MEASURED_AT = "26M"
NO_DIFFERENCE, NOT_DECIDED = "no difference above the spread", "not decided"
Expected = Literal["lower", "higher", "equal"]


@dataclass(frozen=True)
class Pair:
    """The held-out loss of a recipe minus that of another one.

    study: of which results; "" is the page's first comparison. rate: its learning rate, where a
    study has several; of several lengths the longest is meant.
    """

    recipe: str
    against: str
    study: str = ""
    rate: float | None = None


@dataclass(frozen=True)
class Effect:
    """What a change does to the loss, in a table of docs/design-space.md.

    mean: over pairs of combinations that are alike but for the change. low, high: Student's
    interval of 95%.
    """

    mean: float
    low: float
    high: float
    pairs: int


@dataclass(frozen=True)
class Claim:
    """A claim of a paper, a key of PAPERS.

    pair: the comparison that tests it. effects: in place of one, the first cells of rows of
        docs/design-space.md, of the column of `stage`.
    expects: what the paper says of the difference: "lower", "higher", or "equal", none above
        `most`, which is what the paper itself saw.
    seen: what else is to be said of `effects`. Without `pair` and `effects` it is what `page` says.
    verdict: what follows, where it is not that of each of `effects`; the verdict on a `pair` is
        always computed.
    """

    paper: str
    text: str
    pair: Pair | None = None
    expects: Expected = "lower"
    most: float = 0.0
    effects: tuple[str, ...] = ()
    stage: str = "llama"
    seen: str = ""
    page: str = ""
    verdict: str = ""


def verdict(found: Gap, expects: Expected, most: float = 0.0, size: str = MEASURED_AT) -> str:
    """Whether a paper's claim held, in the words of the table: the first of these rules that fits.

    - "held": the claim has a `most` above 0, there are ENOUGH seeds, and the whole bootstrap
      interval is at or below `most`.
    - "not decided": the mean differs from `most` by no more than the spread of the seeds. Of a
      claim of "equal" without a `most` it is then NO_DIFFERENCE.
    - "not decided": there are fewer seeds than ENOUGH, and the mean differs from `most` by less
      than NOISE.
    - "not decided": there is one seed, of another size than MEASURED_AT.
    - "held" or "not held", by the side of `most` on which the mean is; of one seed ", one seed"
      follows.

    found: the held-out loss of a recipe minus that of another one, by seed. expects: "lower" or
    "higher", if the claim is that the differences are below or above 0; "equal", if it is that
    they are not above `most`. size: of the model, a name of SIZES.
    """
    seeds = len(found.by_seed)
    enough = seeds >= ENOUGH
    sign = -1 if expects == "higher" else 1
    excess = Gap({seed: sign * gap - most for seed, gap in found.by_seed.items()})
    if most and enough and excess.interval is not None and excess.interval[1] <= 0:
        return "held"
    if excess.verdict == "within the spread":
        return NO_DIFFERENCE if expects == "equal" and not most else NOT_DECIDED
    near = not enough and abs(excess.mean) < NOISE
    if near or (seeds == 1 and size != MEASURED_AT):
        return NOT_DECIDED
    held = "not held" if excess.mean > 0 else "held"
    return held + (", one seed" if seeds == 1 else "")


def verdict_of_effect(found: Effect, expects: Expected) -> str:
    """The same of an effect: nothing is told of one whose interval contains 0."""
    if found.low <= 0 <= found.high:
        return NO_DIFFERENCE if expects == "equal" else NOT_DECIDED
    held = (found.mean > 0) == (expects == "higher")
    return f"{'held' if held else 'not held'} in 300 steps"


def effect_of(page: str, row: str, stage: str) -> Effect:
    """The effect in the column of `stage`, of the row of a Markdown table that begins with the
    cells `row`, as in "a row scale | E8M0". page: the text. Raises StudyError if it has no such
    row."""
    column = -1
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if f"`{stage}`" in cells:
            column = cells.index(f"`{stage}`")
        if line.startswith(f"| {row} |") and 0 < column < len(cells):
            found = re.fullmatch(r"(\S+) \((\S+) to (\S+); (\d+)\)", cells[column])
            if found is not None:
                return Effect(float(found[1]), float(found[2]), float(found[3]), int(found[4]))
    raise StudyError(f"docs/design-space.md has no row {row!r} with a mean of {stage}")
