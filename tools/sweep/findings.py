"""What a paper found, as comparisons with combinations of factorial.py, and what they say here."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from scipy.stats import t as student

from tools.sweep import factorial
from tools.sweep.agreement import CONFIDENCE
from tools.sweep.axes import AXES, Combination, first
from tools.sweep.factorial import (
    BACKWARD,
    E4M3,
    E8M0,
    FP32,
    HADAMARD,
    LOSS_SCALE,
    STOCHASTIC,
    TENSOR,
    UE5M3,
)

Values = Mapping[str, str]
Scores = Mapping[Combination, float]
FEWEST = 3  # pairs from which something is concluded
_BASES = frozenset(factorial.combinations())
_PLAIN = ("estimator", "maximum", "loss_scale")  # at their first values unless a claim names them


@dataclass(frozen=True)
class Finding:
    """A claim about one change, which is tested on pairs of combinations: with and without it.

    The combinations without the change are those of factorial.py.

    claim: the claim in words.
    change: axes with the values that they have with the change.
    against: the values of these axes without the change; the first value where none is given.
    among: values of other axes, to which the comparison is limited. Estimators are straight-through
        and the loss is not scaled unless these axes are named here or in `change`.
    helps: True if the claim is that the change lowers the loss, False if it is that it does not.
    """

    claim: str
    change: Values
    against: Values = field(default_factory=dict)
    among: Values = field(default_factory=dict)
    helps: bool = True

    def differences(self, scores: Scores) -> list[float]:
        """For each pair the score with the change less that without it. Scores are losses, so that
        the change helps where the difference is below 0."""
        plain = {axis: first(axis) for axis in (*_PLAIN, *self.change)}
        values, found = {**plain, **self.among, **self.against}, []
        for each, score in scores.items():
            if each not in _BASES or not _has(each, values):
                continue
            changed = replace(each, **self.change)
            if changed in scores:
                found.append(scores[changed] - score)
        return found

    def verdict(self, scores: Scores, by_seed: Sequence[Scores]) -> str:
        """Whether scores support the claim: see `verdict_of`. by_seed: the scores of each seed."""
        differences = self.differences(scores)
        if len(differences) < FEWEST:
            return "not decided"
        means = [statistics.mean(self.differences(each)) for each in by_seed]
        return verdict_of(differences, means, helps=self.helps)


def verdict_of(differences: list[float], means: list[float], *, helps: bool = True) -> str:
    """Whether a claim about a change of the recipe holds: "held", "not held" or "not decided".

    The change helps if the whole interval of the mean difference is below 0, and the mean of each
    seed is below 0 too. It harms if they are all above 0. Otherwise nothing is decided. The claim
    that it helps is held if it helps, and not held if it harms. The claim that it does not help is
    held if it harms, and not held if it helps.

    differences: the loss with the change minus that without it, of each pair of combinations;
    FEWEST or more pairs. means: the mean of the differences with each seed. helps: whether the
    claim is that the change helps.
    """
    low, high = interval_of_mean(differences)
    if high < 0 and max(means) < 0:
        return "held" if helps else "not held"
    if low > 0 and min(means) > 0:
        return "not held" if helps else "held"
    return "not decided"


def _has(combination: Combination, values: Values) -> bool:
    return all(getattr(combination, axis) == value for axis, value in values.items())


def interval_of_mean(differences: list[float]) -> tuple[float, float]:
    """Student's interval of the mean, over pairs. Seeds are the same for all pairs, so that what
    other seeds would change is not in it."""
    mean, number = statistics.mean(differences), len(differences)
    error = statistics.stdev(differences) / number**0.5
    half = float(student.ppf((1 + CONFIDENCE) / 2, number - 1)) * error
    return mean - half, mean + half


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
    Finding(f"{_LIMITS}: scales in float32 help", FP32, E8M0),
    Finding(f"{_LIMITS}: E4M3 under a tensor scale helps", E4M3 | TENSOR, E8M0),
    Finding(f"{_LIMITS}: UE5M3 under a tensor scale helps", UE5M3 | TENSOR, E8M0),
    Finding(f"{_LIMITS}: UE5M3 is better than E4M3", UE5M3, E4M3, TENSOR),
    Finding("UE5M3 needs a tensor scale", TENSOR, among=UE5M3),
    Finding(
        "UE5M3 needs a tensor scale, where the loss is scaled", TENSOR, among=UE5M3 | LOSS_SCALE
    ),
    Finding("UE5M3 needs stochastic rounding of dY", STOCHASTIC, among=UE5M3 | TENSOR),
    Finding("E8M0 needs stochastic rounding of dY", STOCHASTIC, among=E8M0),
    Finding("Stochastic rounding of all operands of the backward pass helps", BACKWARD),
    Finding("Under a tensor scale stochastic rounding of dY helps", STOCHASTIC, among=TENSOR),
    Finding("Under a tensor scale a Hadamard transform helps", HADAMARD, among=TENSOR),
    Finding("Under a tensor scale both of them together help", STOCHASTIC | HADAMARD, among=TENSOR),
)
