"""The axes of the design space, and a combination of one value on each.

A combination is data: `building.recipe_of` makes a recipe of it. Axes on which a combination does
not depend, such as the group of a Hadamard transform that it does not have, are at their first
value, so that equal recipes are one combination.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property

from megatron_fp4.errors import ConfigError

# The axes, each with its values. The first value is the plainest, and that of a combination which
# does not depend on the axis.
AXES: dict[str, tuple[str, ...]] = {
    "forward": ("fp4", "bf16"),
    "backward": ("fp4", "fp8", "bf16"),
    "element": ("e2m1", "e1m2"),
    "scale": ("e8m0", "e4m3", "ue5m3", "fp32"),
    "block": ("32", "16"),
    "weight_block": ("line", "square"),
    "rule": (
        *("floor", "ceil", "mse"),
        *("nearest", "up", "inflated", "four-over-six", "mse-fp8", "absmax"),
    ),
    "backward_rule": (
        *("floor", "ceil", "mse", "three-quarters"),
        *("nearest", "up", "inflated", "unit-gain", "mse-fp8", "absmax"),
    ),
    "outer_scale": ("none", "tensor", "row"),
    "rounding": ("nearest", "gradients", "gradients-and-x", "backward", "all"),
    "operands": ("raw", "forward"),
    "hadamard": ("none", "forward", "backward", "wgrad", "all"),
    "group": ("16", "32", "64", "128"),
    "signs": ("random", "fixed", "none"),
    "estimator": ("straight-through", "dge", "spline", "sigmoid"),
    "maximum": ("straight-through", "absmax", "vjp", "softmax"),
    "scale_estimator": ("straight-through", "dge", "spline", "sigmoid"),
    "outer_gradient": ("ignored", "kept"),
    "estimated": ("w", "x", "both"),
    "x_mean": ("kept", "subtracted"),
    "outliers": ("none", "hot-channels"),
    "loss_scale": ("1", "65536"),
    "optimizer": ("adam", "stable-spam"),
}
WHAT = {
    "forward": "fprop's operands X and W",
    "backward": "dgrad's and wgrad's operands; fp8: dY alone, in E5M2 with a scale a row",
    "element": "the grid of FP4 elements: e2m1, or e1m2, which is uniform",
    "scale": "the format of block scales",
    "block": "elements that share a scale",
    "weight_block": "blocks of W: of one row, or as many rows as columns",
    "rule": (
        "how a block scale follows from the block's maximum, in fprop; inflated: times 17/16; "
        "mse-fp8: the best of those that FP8 GEMMs take"
    ),
    "backward_rule": (
        "the same in dgrad and wgrad; three-quarters: floor, values times 3/4; unit-gain: as in "
        "MS-EDEN (arXiv 2601.22813), nearest codes and scales rounded stochastically"
    ),
    "outer_scale": "a float32 scale above the block scales, of the tensor or of each row",
    "rounding": "which operands are rounded stochastically; gradients: dY",
    "operands": "X and W of backward: unquantized, or as fprop multiplied them",
    "hadamard": "the GEMMs whose operands are transformed",
    "group": "the size of the Hadamard transform",
    "signs": "the signs of the Hadamard transform",
    "estimator": "the gradient through a quantizer's rounding",
    "maximum": "the gradient through the block's maximum, from which its scale follows",
    "scale_estimator": "the gradient through the rounding of a block scale to nearest",
    "outer_gradient": "the gradient through the outer scale; zero with maximum vjp alone",
    "estimated": "the operands of fprop with an estimator, or a gradient through a scale",
    "x_mean": "whether the mean of X over tokens is multiplied apart, and only the rest quantized",
    "outliers": "what is split off X in fprop: of each 32 channels the hottest (arXiv 2602.02047)",
    "loss_scale": "what multiplies the loss, and divides the gradients",
    "optimizer": "AdamW, or StableSPAM (arXiv 2502.17055)",
}
# Values that are younger than the committed sample. No star has them: the sample of a seed, and so
# what of it has results, would be another one. `try`, `run axis=value` and words take them.
UNDRAWN = {
    "rule": ("mse-fp8",),
    "backward_rule": ("mse-fp8",),
    "scale_estimator": ("dge", "spline", "sigmoid"),
    "outliers": ("hot-channels",),
}
UNDRAWN_RULES = {"e8m0": ("nearest",)}  # likewise rules, beside a format that drew no such rule
_OF_SCALE = {
    "e8m0": ("floor", "ceil", "mse", "three-quarters", "nearest"),
    "e4m3": ("nearest", "up", "inflated", "four-over-six", "unit-gain", "mse-fp8"),
    "ue5m3": ("nearest", "up", "inflated", "four-over-six", "unit-gain", "mse-fp8"),
    "fp32": ("absmax",),
}
_OUTER = {"e8m0": ("none", "row"), "fp32": ("none",)}
_OF_E2M1_ROWS = (
    "four-over-six",
    "unit-gain",
    "mse-fp8",
)  # rules of E2M1 in blocks of one row alone
_TO_NEAREST = ("mse", "four-over-six", "unit-gain", "mse-fp8")  # rules without stochastic rounding
_ROUNDING_SCALES = ("nearest", "inflated")  # rules that round a block scale to nearest
_OF_FP4 = (
    *("element", "scale", "block", "weight_block", "outer_scale"),
    *("rounding", "hadamard", "x_mean"),
)
_ESTIMATING = ("estimator", "maximum", "outer_gradient")  # gradients through a quantizer
# Axes that no recipe has: of the training around it.
TRAINING = ("loss_scale", "optimizer")


@dataclass(frozen=True)
class Combination:
    """One value on each of AXES. Raises ConfigError for a value that an axis does not have."""

    forward: str = "fp4"
    backward: str = "fp4"
    element: str = "e2m1"
    scale: str = "e8m0"
    block: str = "32"
    weight_block: str = "line"
    rule: str = "floor"
    backward_rule: str = "floor"
    outer_scale: str = "none"
    rounding: str = "nearest"
    operands: str = "raw"
    hadamard: str = "none"
    group: str = "16"
    signs: str = "random"
    estimator: str = "straight-through"
    maximum: str = "straight-through"
    scale_estimator: str = "straight-through"
    outer_gradient: str = "ignored"
    estimated: str = "w"
    x_mean: str = "kept"
    outliers: str = "none"
    loss_scale: str = "1"
    optimizer: str = "adam"

    def __post_init__(self) -> None:
        for axis, values in AXES.items():
            if (value := getattr(self, axis)) not in values:
                raise ConfigError(f"{axis} has no value {value!r}: {', '.join(values)}")

    @property
    def chosen(self) -> dict[str, str]:
        """The axes that are not at their first value: an axis that is added later, whose first
        value is how things were, changes no combination."""
        return {axis: value for axis in AXES if (value := getattr(self, axis)) != first(axis)}

    @cached_property
    def key(self) -> str:
        """16 hexadecimal digits of the SHA-256 of `chosen`."""
        text = json.dumps(self.chosen, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def in_fp4(self) -> bool:
        """Whether any operand is in FP4."""
        return "fp4" in (self.forward, self.backward)

    @property
    def quantized(self) -> bool:
        """Whether any operand is quantized."""
        return self.in_fp4 or self.backward == "fp8"

    def __str__(self) -> str:
        """What differs from the first values, as "axis=value axis=value"; "plain" for nothing."""
        return " ".join(f"{axis}={value}" for axis, value in self.chosen.items()) or "plain"


def first(axis: str) -> str:
    """The value of an axis on which a combination does not depend."""
    return AXES[axis][0]


def with_values(chosen: Mapping[str, str]) -> Combination:
    """The combination with these values by axis, and the first value on all other axes. Raises
    ConfigError for an axis that does not exist, and a value that the axis does not have."""
    if unknown := set(chosen) - set(AXES):
        raise ConfigError(f"no axis {min(unknown)}: {', '.join(AXES)}")
    return Combination(**chosen)


def without_training(combination: Combination) -> Combination:
    """The combination with the first value on each axis of TRAINING, so that it says nothing of the
    training around the recipe."""
    return replace(combination, **{axis: first(axis) for axis in TRAINING})


def check_of_recipe(combination: Combination, what: str) -> None:
    """Raises ConfigError if the combination has another value than the first on an axis of
    TRAINING. what: in words, for the message, what does not depend on these axes."""
    for axis in TRAINING:
        if (value := getattr(combination, axis)) != first(axis):
            told = f"{axis}={value} is of the training around a recipe"
            raise ConfigError(f"{told}, on which {what} does not depend: leave it out")


def values(combination: Combination, axis: str) -> tuple[str, ...]:
    """The values that the axis may have beside the other values of the combination: one value if
    the recipe does not depend on the axis."""
    if _without_effect(combination, axis):
        return AXES[axis][:1]
    return tuple(value for value in AXES[axis] if not _against(combination, axis, value))


def _without_effect(c: Combination, axis: str) -> tuple[str, ...]:
    """The axes that make `axis` meaningless: with their values, no value on `axis` changes the
    recipe. An empty tuple if the recipe depends on `axis`."""
    forward = {"forward": c.forward == "fp4"}
    permits: dict[str, dict[str, bool]] = {
        **dict.fromkeys(_OF_FP4, dict.fromkeys(("forward", "backward"), c.in_fp4)),
        **dict.fromkeys(("rule", "estimator", "maximum", "outliers"), forward),
        **dict.fromkeys(("group", "signs"), {"hadamard": c.hadamard != "none"}),
        "backward_rule": {"backward": c.backward == "fp4"},
        "operands": {**forward, "backward": c.backward != "bf16"},
        "scale_estimator": {**forward, "maximum": c.maximum != "straight-through"},
        "outer_gradient": {
            **forward,
            "outer_scale": c.outer_scale != "none",
            "maximum": c.maximum != "vjp" or c.scale_estimator != first("scale_estimator"),
        },
        "estimated": dict.fromkeys(_ESTIMATING, estimates(c)),
    }
    return tuple(other for other, permitted in permits.get(axis, {}).items() if not permitted)


def _against(c: Combination, axis: str, value: str) -> tuple[str, ...]:
    """The axes that exclude `value` on `axis`: with their values there is no such recipe, or
    another value makes the same recipe. An empty tuple if nothing excludes it."""
    if axis in ("rule", "backward_rule"):
        if value not in _OF_SCALE[c.scale]:
            return ("scale",)
        needed = {"element": "e2m1", "weight_block": "line"} if value in _OF_E2M1_ROWS else {}
        return tuple(other for other, own in needed.items() if getattr(c, other) != own)
    if axis == "outer_scale":
        if value not in _OUTER.get(c.scale, AXES[axis]):
            return ("scale",)
        return ("weight_block",) if c.weight_block == "square" and value == "row" else ()
    if axis == "rounding":
        return _against_rounding(c, value)
    if axis == "hadamard" and value != "none":  # it must differ from those of fewer GEMMs
        gemms = {"all": ("forward", "backward"), "forward": ("forward",)}
        needs = gemms.get(value, ("backward",))
        return tuple(other for other in needs if getattr(c, other) != "fp4")
    if axis == "scale_estimator" and value != first(axis):
        return () if c.rule in _ROUNDING_SCALES else ("rule",)
    if axis == "x_mean" and value != "kept" and estimates(c) and c.estimated != "w":
        return ("estimated",)  # an estimator of X would be of X without its mean
    if axis == "outliers" and value != "none":
        return _against_outliers(c)
    return ()


def _against_rounding(c: Combination, rounding: str) -> tuple[str, ...]:
    """`_against` of the axis rounding."""
    if rounding == "all" and c.forward == "fp4" and c.rule in _TO_NEAREST:
        return ("rule",)
    if c.backward != "fp4":
        return () if rounding in ("nearest", "all") else ("backward",)
    if rounding != "nearest" and c.backward_rule in _TO_NEAREST:
        return ("backward_rule",)
    return ("forward",) if rounding == "all" and c.forward != "fp4" else ()


def _against_outliers(c: Combination) -> tuple[str, ...]:
    """`_against` of hot channels: they go with no estimator of X, and with X as it is."""
    excluded = {"estimated": estimates(c) and c.estimated != "w", "x_mean": c.x_mean != "kept"}
    return tuple(other for other, excludes in excluded.items() if excludes)


def estimates(c: Combination) -> bool:
    """Whether the combination has an estimator: whether any of its gradients through a quantizer
    differs from the straight-through one."""
    return any(getattr(c, axis) != first(axis) for axis in _ESTIMATING)


def settled(
    combination: Combination,
    possible: Callable[[Combination, str], tuple[str, ...]] = values,
) -> Combination:
    """The combination after each value that is not possible is replaced by the first possible one.

    A value is not possible if it changes nothing beside the values on the axes before it, or
    contradicts them. possible: the function that gives the possible values of an axis: `values`,
    or `drawn` for those that a sample may have.
    """
    for axis in AXES:
        allowed = possible(combination, axis)
        if getattr(combination, axis) not in allowed:
            combination = replace(combination, **{axis: allowed[0]})
    return combination


def check(combination: Combination) -> None:
    """Raises ConfigError if any value contradicts others or changes nothing beside them: names all
    such values, the values that exclude them, and what to give."""
    wrong = [_contradiction(combination, axis) for axis in AXES]
    if found := "; ".join(filter(None, wrong)):
        raise ConfigError(found)


def _contradiction(c: Combination, axis: str) -> str:
    """Why the combination cannot have its value on the axis, and what to give; "" if it can."""
    value, allowed = getattr(c, axis), values(c, axis)
    if value in allowed:
        return ""
    if others := _without_effect(c, axis):
        reason, change = "has no effect with", f"leave it out, or change {' or '.join(others)}"
    else:
        others = _against(c, axis, value)
        reason, change = "does not go with", f"give {axis}={' or '.join(allowed)}"
    beside = " and ".join(_told(c, other) for other in others)
    return f"{_told(c, axis)} {reason} {beside}: {change}"


def _told(c: Combination, axis: str) -> str:
    """The value on an axis, as "axis=value", and whether it is the default."""
    value = getattr(c, axis)
    return f"{axis}={value}{' (the default)' if value == first(axis) else ''}"


def drawn(combination: Combination, axis: str) -> tuple[str, ...]:
    """Those of `values` that stars have."""
    own: tuple[str, ...] = UNDRAWN.get(axis, ())
    if axis in ("rule", "backward_rule"):
        own += UNDRAWN_RULES.get(combination.scale, ())
    return tuple(value for value in values(combination, axis) if value not in own)


def draw(source: random.Random) -> Combination:
    """A combination at random: on each axis in turn one of the values of `drawn` beside those that
    were drawn before, each with the same probability."""
    found = Combination()
    for axis in AXES:
        if AXES[axis][1:] != UNDRAWN.get(axis):  # a younger axis must not shift the draws after it
            found = replace(found, **{axis: source.choice(drawn(found, axis))})
    return found


@cache
def line(center: Combination, axis: str) -> dict[str, Combination]:
    """By value of the axis, of those that stars have, the combinations that differ from the center
    on this axis, and the center itself. On other axes they differ only where the center's value
    contradicts the axis: another format of scales has other rules, of which each has the first."""
    found = {value: replace(center, **{axis: value}) for value in drawn(center, axis)}
    return {value: settled(each, drawn) for value, each in found.items()}
