"""What each change does to the combinations that go through all stages, over all pairs.

The main effects of the factorial design, and the words beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tools.pages import table
from tools.sweep.factorial import E4M3, E8M0, FP32, HADAMARD, LOSS_SCALE, STOCHASTIC, TENSOR, UE5M3
from tools.sweep.findings import Finding, Scores, Values, summary
from tools.sweep.words import Word

WITHOUT = {"outer_scale": "none"}
# Formats of scales, by whether they have a tensor scale or need none.
IN_RANGE = (E8M0, FP32, E4M3 | TENSOR, UE5M3 | TENSOR)
OUT_OF_RANGE = (E4M3 | WITHOUT, UE5M3 | WITHOUT)


@dataclass(frozen=True)
class MainEffect:
    """A change of one factor, over pairs of combinations that are alike but for this change.

    what, where: the change, and the combinations in which it is compared, in words.
    pairs: one for each group of combinations; the groups have no pair in common.
    """

    what: str
    where: str
    pairs: tuple[Finding, ...]

    def differences(self, scores: Scores) -> list[float]:
        """For each pair the score with the change less that without it."""
        return [each for pair in self.pairs for each in pair.differences(scores)]


def _effect(
    what: str,
    where: str,
    change: Values,
    among: tuple[Values, ...] = ({},),
    against: Values | None = None,
) -> MainEffect:
    pairs = tuple(Finding(what, change, against or {}, values) for values in among)
    return MainEffect(what, where, pairs)


_GROUPS = (("E8M0, float32, tensor scale", IN_RANGE), ("E4M3, UE5M3 alone", OUT_OF_RANGE))
MAIN_EFFECTS = (
    *(
        _effect(f"scales in {name}", "in place of E8M0", change, against=E8M0)
        for name, change in (
            ("float32", FP32),
            ("E4M3", E4M3),
            ("UE5M3", UE5M3),
            ("E4M3 under a tensor scale", E4M3 | TENSOR),
            ("UE5M3 under a tensor scale", UE5M3 | TENSOR),
        )
    ),
    _effect("scales in UE5M3", "in place of E4M3, tensor scale", UE5M3, (TENSOR,), E4M3),
    *(
        _effect("a tensor scale", name, TENSOR, (scale,))
        for name, scale in (("E4M3", E4M3), ("UE5M3", UE5M3))
    ),
    *(
        _effect("a loss scale of 65536", name, LOSS_SCALE, (UE5M3 | outer,))
        for name, outer in (("UE5M3", WITHOUT), ("UE5M3, tensor scale", TENSOR))
    ),
    *(
        _effect(what, where, change, among)
        for what, change in (
            ("blocks of 16 in place of 32", {"block": "16"}),
            ("stochastic rounding of dY", STOCHASTIC),
            ("a Hadamard transform of the backward pass", HADAMARD),
        )
        for where, among in _GROUPS
    ),
)


def main_effects_table(
    changes: Iterable[MainEffect | Word], columns: Mapping[str, Scores]
) -> list[str]:
    """The mean difference of each change in each stage, with Student's interval and the number of
    pairs. columns: the scores of the combinations, by stage."""
    lines = [
        [each.what, each.where, *(summary(each.differences(own)) for own in columns.values())]
        for each in changes
    ]
    return table(["change", "where", *(f"`{stage}`" for stage in columns)], lines)
