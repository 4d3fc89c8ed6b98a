"""Combinations that differ in one word from a combination of factorial.py.

Words are values of axes that the factorial does not have: other rules for scales, other transforms,
other operands that are rounded. Each is compared in at least four pairs, which go through all
stages of every sweep whose sizes they fit: MS-EDEN has groups of 128, of which the last stage's
model is no multiple. A word may also change combinations that another word has made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

from tools.sweep.axes import AXES, Combination
from tools.sweep.factorial import BACKWARD, E4M3, E8M0, HADAMARD, STOCHASTIC, TENSOR, UE5M3

STAR = "words"  # in place of a star's key, in results


@dataclass(frozen=True)
class Word:
    """One change of a recipe, made in several combinations to see what it does to their scores.

    A combination is a recipe of the sweep, given by the values of all axes. In most cases a change
    sets one axis to another value.

    what, where: for the tables, in words: the change, and the combinations in which it is made.
    bases: these combinations, without the change. They are in factorial.py, or are what a word that
        comes earlier in WORDS makes.
    values: the axes that the change sets, with their new values.
    """

    what: str
    where: str
    bases: tuple[Combination, ...]
    values: Mapping[str, str]

    @property
    def pairs(self) -> list[tuple[Combination, Combination]]:
        """Each base, and the combination that the change makes of it."""
        return [(base, replace(base, **self.values)) for base in self.bases]

    def differences(self, scores: Mapping[Combination, float]) -> list[float]:
        """For each pair that has scores the score with the change less that without it."""
        return [
            scores[changed] - scores[base]
            for base, changed in self.pairs
            if base in scores and changed in scores
        ]


def combinations() -> list[Combination]:
    """The combinations with a word, each once."""
    return list(dict.fromkeys(changed for word in WORDS for _, changed in word.pairs))


def bases() -> dict[Combination, Combination]:
    """For each combination that a word makes, the combination of factorial.py that it differs from.

    Where a word changes what an earlier word made, this is the one that the earlier word changed.
    Where several words make the same combination, the first of them counts.
    """
    found: dict[Combination, Combination] = {}
    for word in WORDS:
        for base, changed in word.pairs:
            found.setdefault(changed, found.get(base, base))
    return found


def _bases(
    scales: tuple[Mapping[str, str], ...],
    blocks: tuple[str, ...] = ("32", "16"),
    others: tuple[Mapping[str, str], ...] = (STOCHASTIC,),
) -> tuple[Combination, ...]:
    """All combinations of formats of scales, blocks and values of other axes."""
    every = product(scales, blocks, others)
    return tuple(Combination(block=block, **scale, **other) for scale, block, other in every)


_UNDER_TENSOR = (E4M3 | TENSOR, UE5M3 | TENSOR)
# Four formats of scales, with stochastic rounding of dY.
FORMATS = _bases((E8M0,)) + _bases(_UNDER_TENSOR, blocks=("16",))
_TRANSFORMED = tuple(replace(each, **HADAMARD) for each in FORMATS)
_ROUNDED = tuple(replace(each, **BACKWARD) for each in FORMATS)
_OF_E8M0 = _bases((E8M0,), others=(STOCHASTIC, {}))
_OF_E8M0_NEAREST = _bases((E8M0,), others=(HADAMARD, {}))
_OF_TENSOR = _bases(_UNDER_TENSOR)
_OF_TENSOR_NEAREST = _bases(_UNDER_TENSOR, others=({},))
_DGE = {"estimator": "dge"}
_DGE_OF_TENSOR = _bases(_UNDER_TENSOR, ("16",), (STOCHASTIC | _DGE,))
_DGE_OF_ANY = _bases((E8M0,), ("16",), (STOCHASTIC | _DGE, _DGE)) + _DGE_OF_TENSOR
_ESTIMATED_OF_TENSOR = _DGE_OF_TENSOR + _bases(
    _UNDER_TENSOR, ("16",), (STOCHASTIC | {"maximum": "absmax"},)
)
# Unit gain in the groups of the transform: the backward pass of arXiv 2601.22813, but for its
# operands, which are the X and W of fprop there.
MS_EDEN = HADAMARD | {"group": "128", "backward_rule": "unit-gain"}
_OF_FPROP = {"operands": "forward"}
_ANY = "E8M0, E4M3, UE5M3"
_SCALED = "E4M3, UE5M3, tensor scale"


_UNQUANTIZED = {"backward": "bf16", "backward_rule": "floor", "rounding": "nearest"}
# Changes that go with every format of scales.
_CHANGES: dict[str, Mapping[str, str]] = {
    "fprop in BF16": {"forward": "bf16", "rule": "floor"},
    "dgrad and wgrad in BF16": _UNQUANTIZED,
    "dY in FP8, X and W of the backward pass in BF16": _UNQUANTIZED | {"backward": "fp8"},
    "elements in E1M2": {"element": "e1m2"},
    "square blocks of W": {"weight_block": "square"},
    "the mean of X subtracted": {"x_mean": "subtracted"},
    "the backward pass with the X and W of fprop": {"operands": "forward"},
    "stochastic rounding of X too": {"rounding": "gradients-and-x"},
    "stochastic rounding of X and W too": BACKWARD,
    "stochastic rounding everywhere": {"rounding": "all"},
    "a Hadamard transform of fprop": {"hadamard": "forward", "group": "32"},
    "a Hadamard transform of wgrad": {"hadamard": "wgrad", "group": "32"},
    "a Hadamard transform of all GEMMs": {"hadamard": "all", "group": "32"},
    "StableSPAM in place of AdamW": {"optimizer": "stable-spam"},
}


def _of_all_formats() -> Iterator[Word]:
    for what, values in _CHANGES.items():
        yield Word(what, _ANY, FORMATS, values)


def _of_transforms() -> Iterator[Word]:
    """Groups and signs of the transform, and what it does beside stochastic rounding."""
    for axis in ("group", "signs"):
        for value in AXES[axis]:
            if value not in ("32", "128", "random"):  # 128 does not fit the last stage's model
                what = f"groups of {value} in place of 32" if axis == "group" else f"signs {value}"
                yield Word(what, f"{_ANY}, Hadamard", _TRANSFORMED, {axis: value})
    yield Word("stochastic rounding of X and W too", f"{_ANY}, Hadamard", _TRANSFORMED, BACKWARD)
    where = f"{_ANY}, stochastic rounding of dY, X and W"
    yield Word("a Hadamard transform of the backward pass", where, _ROUNDED, HADAMARD)


def _of_estimators() -> Iterator[Word]:
    for value in AXES["estimated"][1:]:
        yield Word(f"DGE of {value} in place of W", _ANY, _DGE_OF_ANY, {"estimated": value})
    yield Word(
        "the gradient of the outer scale", _SCALED, _ESTIMATED_OF_TENSOR, {"outer_gradient": "kept"}
    )


def _of_outer_scales() -> Iterator[Word]:
    yield Word("a row scale", "E8M0", _OF_E8M0, {"outer_scale": "row"})
    yield Word(
        "a row scale in place of a tensor scale", _SCALED, _OF_TENSOR, {"outer_scale": "row"}
    )


def _of_rules() -> Iterator[Word]:
    """Rules for scales: of E8M0, then of the formats that have a tensor scale."""
    for rule in ("floor", "mse"):
        yield Word(f"rule {rule} of fprop in place of ceil", "E8M0", _OF_E8M0, {"rule": rule})
    for rule, bases in (
        ("floor", _OF_E8M0), ("three-quarters", _OF_E8M0), ("mse", _OF_E8M0_NEAREST),
    ):  # fmt: skip
        what = f"rule {rule} of the backward pass in place of ceil"
        yield Word(what, "E8M0", bases, {"backward_rule": rule})
    for rule in ("up", "inflated", "four-over-six"):
        what = f"rule {rule} of fprop in place of nearest"
        yield Word(what, _SCALED, _OF_TENSOR, {"rule": rule})
    for rule, bases in (
        ("nearest", _OF_TENSOR), ("up", _OF_TENSOR), ("unit-gain", _OF_TENSOR_NEAREST),
    ):  # fmt: skip
        what = f"rule {rule} of the backward pass in place of inflated"
        yield Word(what, _SCALED, bases, {"backward_rule": rule})


def _ms_eden() -> Iterator[Word]:
    """MS-EDEN against nearest rounding, and against stochastic rounding of all operands in the same
    groups. Its rule and group are one word: unit gain needs the transform in its own groups."""
    nearest = _bases(_UNDER_TENSOR, others=(HADAMARD,))
    of_gradients = _bases(_UNDER_TENSOR, others=(HADAMARD | STOCHASTIC,))
    rounded = BACKWARD | _OF_FPROP | {"group": "128"}
    of_all = tuple(replace(each, **rounded) for each in of_gradients)
    where = f"{_SCALED}, Hadamard"
    yield Word("MS-EDEN, in groups of 128", where, nearest, MS_EDEN)
    yield Word(
        "MS-EDEN of the X and W of fprop, in groups of 128", where, nearest, MS_EDEN | _OF_FPROP
    )
    what = "stochastic rounding of the X and W of fprop too, in groups of 128"
    yield Word(what, f"{where}, stochastic rounding of dY", of_gradients, rounded)
    what = "MS-EDEN in place of stochastic rounding of dY, X and W"
    where = f"{where} in groups of 128, X and W of fprop"
    yield Word(what, where, of_all, MS_EDEN | {"rounding": "nearest"})


WORDS = (
    *_of_all_formats(),
    *_of_transforms(),
    *_of_estimators(),
    *_of_outer_scales(),
    *_of_rules(),
    *_ms_eden(),
)
