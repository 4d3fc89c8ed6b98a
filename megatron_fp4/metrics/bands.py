"""Early warnings: rates that leave the band in which they usually are.

A rate is outside of its band if it is more than FACTOR times its median over the last KEPT reports,
and has risen by more than its `Watched.least`. There is no band before ENOUGH reports; until then a
rate above its `Watched.limit` is told of, once. After a warning the band begins anew, so that a
change is told of once, also where the rate stays high.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from statistics import median
from typing import NamedTuple

from megatron_fp4.metrics.records import Record

KEPT = 9
ENOUGH = 5
FACTOR = 2.0


class Watched(NamedTuple):
    """A rate of which early warnings tell: when, and in which words.

    words: what elements it is the rate of. least: a warning needs a rise by more than this above
    the median. advice: what the user may try; {layer} stands for the linear's name. limit: what is
    too much also before there is a band.
    """

    words: str
    least: float
    advice: str
    limit: float = math.inf


# A checkpoint of other recipes is loaded with the second flag alone.
_IN_BF16 = "--fp4-module-recipe '{layer}=bf16' (resume with --fp4-load-anyway)"
WATCHED = {  # by kind of record and metric
    ("operand", "zeros"): Watched(
        "elements that became zero",
        0.01,
        "large elements hide the others of their blocks: try a recipe with a Hadamard transform, "
        f"if this one has none, or {_IN_BF16}",
    ),
    ("operand", "clipped"): Watched(
        "clipped elements",
        0.01,
        f"try a recipe whose scales are rounded up, if these are not, or {_IN_BF16}",
    ),
    ("operand", "outside_carrier"): Watched(
        "elements outside the FP8 carriers' window",
        0.0001,
        f"the scales of a row lie too far apart: look for outliers, or try {_IN_BF16}",
        limit=0.01,
    ),
    ("weight", "oscillating"): Watched(
        "oscillating elements",
        0.01,
        f"nothing to do while the loss falls; if it stalls try a phase in FP8, or {_IN_BF16}",
    ),
    ("gradient", "zeros"): Watched(
        "zeros",
        0.01,
        "gradients vanish: look at the loss and its scale (--initial-loss-scale in FP16), or try "
        f"{_IN_BF16}",
    ),
}


class _Rate(NamedTuple):
    """Which rate: of this layer and kind of record. operand: as "fprop.w", else the kind."""

    layer: str
    kind: str
    operand: str
    metric: str

    @property
    def watched(self) -> Watched:
        return WATCHED[self.kind, self.metric]


class Bands:
    """The usual values of each rate of each layer."""

    def __init__(self) -> None:
        self._past: dict[_Rate, deque[float]] = defaultdict(lambda: deque(maxlen=KEPT))
        self._told: set[_Rate] = set()  # of which there was a warning

    def judge(self, records: list[Record]) -> list[Record]:
        """The warnings about a report, records of kind "warning". The report is remembered.

        records: those of operands, weights and gradients of a step.
        """
        warnings = []
        for record in records:
            for rate, value in _rates(record):
                if (unusual := self._unusual(rate, value)) is not None:
                    warnings.append(_warning(record["step"], rate, value, *unusual))
        self.remember([*warnings, *records])
        return warnings

    def _unusual(self, rate: _Rate, value: float) -> tuple[float, str] | None:
        """The usual value or limit that `value` exceeds, as a number and in the words of a
        warning; None if nothing is unusual."""
        past, watched = self._past[rate], rate.watched
        if len(past) >= ENOUGH:
            usual = median(past)
            if value > FACTOR * usual and value - usual > watched.least:
                return usual, f"usually {usual:.3g}"
        elif value > watched.limit and rate not in self._told:
            return watched.limit, f"more than {watched.limit:g}"
        return None

    def remember(self, records: Iterable[Record]) -> None:
        """Takes up records without judging them; a warning comes before the report it is about."""
        for record in records:
            if record["kind"] == "warning":
                kind = record["operand"] if "." not in record["operand"] else "operand"
                rate = _Rate(record["layer"], kind, record["operand"], record["metric"])
                self._past.pop(rate, None)
                self._told.add(rate)
            else:
                for rate, value in _rates(record):
                    self._past[rate].append(value)


def _rates(record: Record) -> Iterator[tuple[_Rate, float]]:
    """The rates of a record that have a band; missing values are left out."""
    kind = record["kind"]
    operand = f"{record['gemm']}.{record['operand']}" if kind == "operand" else kind
    for metric, value in record["metrics"].items():
        if (kind, metric) in WATCHED and value is not None:
            yield _Rate(record["layer"], kind, operand, metric), value


def _warning(step: int, rate: _Rate, value: float, usual: float, words: str) -> Record:
    """words: what `usual` is, for the line."""
    watched, layer = rate.watched, rate.layer
    what = rate.operand if rate.kind == "operand" else f"the {rate.kind}"
    return {
        "kind": "warning",
        "step": step,
        "layer": layer,
        "operand": rate.operand,
        "metric": rate.metric,
        "value": value,
        "usual": usual,
        "line": f"step {step}: {watched.words} in {what} of {layer}: {value:.3g}, {words}; "
        f"{watched.advice.format(layer=layer)}",
    }


def summary(warnings: Iterable[Record]) -> list[str]:
    """Lines for the log: one for each metric and operand, of the layer where it rose the most."""
    events: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for warning in warnings:
        events[warning["metric"], warning["operand"]].append(warning)
    lines = []
    for found in events.values():
        worst = max(found, key=lambda each: float(each["value"] - each["usual"]))
        rest = len(found) - 1
        others = f" (and {rest} other layer{'s' if rest > 1 else ''})" if rest else ""
        lines.append(worst["line"] + others)
    return lines
