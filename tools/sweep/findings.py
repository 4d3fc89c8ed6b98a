"""What a paper found, as comparisons of combinations of factorial.py, and what they say here."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from tools.sweep.agreement import DRAWS, FIRST, interval
from tools.sweep.axes import AXES, Combination, first
from tools.sweep.factorial import E4M3, E8M0, HADAMARD, STOCHASTIC, TENSOR, UE5M3

Values = Mapping[str, str]
FEWEST = 3  # pairs from which something is concluded


@dataclass(frozen=True)
class Finding:
    """A claim about one change, which is tested on pairs of combinations: with and without it.

    claim: the claim in words.
    change: axes with the values that they have with the change.
    against: the values of these axes without the change; the first value where none is given.
    among: values of other axes, to which the comparison is limited. Estimators are straight-through
        unless they are named here or in `change`.
    helps: True if the claim is that the change lowers the loss, False if it is that it does not.
    """

    claim: str
    change: Values
    against: Values = field(default_factory=dict)
    among: Values = field(default_factory=dict)
    helps: bool = True

    def differences(self, scores: Mapping[Combination, float]) -> list[float]:
        """For each pair the score with the change less that without it. Scores are losses, so that
        the change helps where the difference is below 0."""
        plain = {axis: first(axis) for axis in ("estimator", "maximum", *self.change)}
        values, found = {**plain, **self.among, **self.against}, []
        for each, score in scores.items():
            if not _has(each, values):
                continue
            changed = replace(each, **self.change)
            if changed in scores:
                found.append(scores[changed] - score)
        return found

    def verdict(self, differences: list[float]) -> str:
        """Whether the differences support the claim, by the interval of their mean.

        A claim that the change helps is "held" if the whole interval is below 0, "not held" if it
        is above 0, and else "not decided". A claim that it does not help is "not held" if the
        interval is below 0, and else "held". With fewer than FEWEST pairs nothing is decided.
        """
        if len(differences) < FEWEST:
            return "not decided"
        low, high = interval_of_mean(differences)
        if not self.helps:
            return "held" if high >= 0 else "not held"
        return "held" if high < 0 else "not held" if low > 0 else "not decided"


def _has(combination: Combination, values: Values) -> bool:
    return all(getattr(combination, axis) == value for axis, value in values.items())


def interval_of_mean(differences: list[float]) -> tuple[float, float]:
    """The bootstrap's interval of the mean, over pairs."""
    values, source = np.array(differences), np.random.default_rng(FIRST)
    return interval(source.choice(values, (DRAWS, len(values))).mean(1))


def summary(differences: list[float]) -> str:
    """The mean, its interval if there are pairs enough, and the number of pairs."""
    if not differences:
        return ""
    mean, number = statistics.mean(differences), len(differences)
    if number < FEWEST:
        return f"{mean:+.4f} ({number})"
    low, high = interval_of_mean(differences)
    return f"{mean:+.4f} ({low:+.4f} to {high:+.4f}; {number})"


_SUFFICES = "A straight-through estimator suffices"
_LIMITS = "The scale's format is the bottleneck"
FINDINGS = (
    *(
        Finding(f"{_SUFFICES}: {form} does not help", {"estimator": form}, helps=False)
        for form in AXES["estimator"][1:]
    ),
    *(
        Finding(f"{_SUFFICES}: {form} of the maximum does not help", {"maximum": form}, helps=False)
        for form in AXES["maximum"][1:]
    ),
    Finding(f"{_LIMITS}: blocks of 16 help E8M0", {"block": "16"}, among=E8M0),
    Finding(f"{_LIMITS}: E4M3 under a tensor scale helps", E4M3 | TENSOR, E8M0),
    Finding(f"{_LIMITS}: UE5M3 under a tensor scale helps", UE5M3 | TENSOR, E8M0),
    Finding(f"{_LIMITS}: UE5M3 is better than E4M3", UE5M3, E4M3, TENSOR),
    Finding("UE5M3 needs a tensor scale", TENSOR, among=UE5M3),
    Finding("UE5M3 needs stochastic rounding of dY", STOCHASTIC, among=UE5M3),
    Finding("E8M0 needs stochastic rounding of dY", STOCHASTIC, among=E8M0),
    Finding("Under a tensor scale stochastic rounding helps", STOCHASTIC, among=TENSOR),
    Finding("Under a tensor scale a Hadamard transform helps", HADAMARD, among=TENSOR),
    Finding("Under a tensor scale both together help", STOCHASTIC | HADAMARD, among=TENSOR),
    Finding("All three together help", TENSOR | STOCHASTIC | HADAMARD),
)
