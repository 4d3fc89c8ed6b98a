"""Describes a recipe in words, derived from its fields.

The start table of a training run and `python -m megatron_fp4 info` print the description.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_fp4.arithmetic.estimators import Estimator
from megatron_fp4.arithmetic.hadamard import Hadamard
from megatron_fp4.arithmetic.hot_channels import HotChannels
from megatron_fp4.arithmetic.outliers import OutlierClamp
from megatron_fp4.arithmetic.quantizer import WHOLE_AXIS, Quantizer
from megatron_fp4.gemms import GEMMS, LETTERS, OPERANDS
from megatron_fp4.recipe import Layers, Recipe
from megatron_fp4.recipes import get_recipe, list_recipes

_ROUNDING = {"nearest": "nearest", "stochastic": "stochastic", "ema": "towards an average"}


def describe(recipe: Recipe) -> list[str]:
    """The lines that describe a recipe.

    The first line has the recipe's name, and its paper as `paper_of` returns it. Indented lines
    follow: one for each GEMM, with the formats, scales and rounding of its operands, and one each
    for outliers, mean of X, estimators, weight average, updates of W and bias gradient where the
    recipe has them. Then the lines of each phase's recipe, indented further, and the names of the
    recipes of some layers.
    """
    paper = paper_of(recipe)
    lines = [f"recipe {recipe.name}{f' ({paper})' if paper else ''}"]
    lines += [f"  {gemm}: {_gemm(recipe, gemm)}" for gemm in GEMMS]
    if recipe.outliers is not None:
        lines.append(f"  outliers of X in fprop: {_outliers(recipe.outliers)}")
    if recipe.x_mean == "subtracted":
        lines.append(
            "  mean of X over tokens: subtracted before X is quantized, and multiplied in high "
            "precision; not in evaluation"
        )
    if recipe.estimator is not None:
        lines.append(f"  gradient of W: {estimator_words(recipe.estimator)}")
    if recipe.x_estimator is not None:
        lines.append(f"  gradient of X: {estimator_words(recipe.x_estimator)}")
    if recipe.weight_average is not None:
        lines.append(f"  average of W: of the FP32 weights, {recipe.weight_average}")
    if recipe.ramping is not None:
        lines.append(f"  updates of W: {recipe.ramping}")
    if recipe.bias_gradient == "quantized":
        lines.append("  gradient of the bias: the sum of dgrad's quantized dY")
    for phase in recipe.phases:
        first, *rest = describe(phase.recipe)
        lines.append(f"  after {phase.after:.4g} of training: {first}")
        lines += [f"  {line}" for line in rest]
    for layers in recipe.layers:
        lines.append(f"  {place_of(layers)}: recipe {layers.recipe.name}")
    return lines


def titled(recipe: Recipe) -> Iterator[tuple[str, Recipe]]:
    """Yields a title and a recipe for all that linears follow, each recipe once: the recipe itself,
    its phases, and the recipes of its layers with their phases. A title is a line to print before
    what is said of its recipe, with an empty line above; that of the recipe itself is empty."""
    places: dict[Recipe, list[str]] = {recipe: []}
    for place, own in [("", recipe), *((place_of(x), x.recipe) for x in recipe.layers)]:
        if place:
            places.setdefault(own, []).append(place)
        for phase in own.phases:
            when = f"{place} after {phase.after:.4g} of training"
            places.setdefault(phase.recipe, []).append(when.strip())
    for own, words in places.items():
        yield f"\n{'; '.join(words)}\n" if words else "", own


def place_of(layers: Layers) -> str:
    """Which linears `layers` is of, in words."""
    if layers.modules:
        return f"linears {layers.modules}"
    which, count = ("first", layers.first) if layers.first else ("last", layers.last)
    return f"the {which} layer" if count == 1 else f"the {which} {count} layers"


def paper_of(recipe: Recipe) -> str:
    """The recipe's `paper`, or "" where it was inherited and no longer describes the recipe.

    A recipe that is derived from a registered one inherits its `paper`. The paper of a registered
    recipe is returned only if the recipe equals the registered one in every field. A paper that no
    registered recipe has was given by the user, and is returned as it is.
    """
    registered = {name: get_recipe(name) for name in list_recipes()}
    if any(recipe.paper == other.paper for other in registered.values()):
        return recipe.paper if recipe == registered.get(recipe.name) else ""
    return recipe.paper


def _gemm(recipe: Recipe, gemm: str) -> str:
    wanted = recipe.gemm(gemm)
    (first, a), (second, b) = ((_operand(recipe, gemm, o), recipe.quantizer(gemm, o))
                               for o in OPERANDS[gemm])  # fmt: skip
    if a == b is not None:
        text = f"{first} and {second} in {quantizer_words(a)}"  # type: ignore[arg-type]
    else:
        parts = [(first, a), (second, b)]
        text = "; ".join(
            name if q is None else f"{name} in {quantizer_words(q)}" for name, q in parts
        )
    if not wanted.quantized and "as fprop" not in text:
        text = "high precision"
    if wanted.hadamard is not None:
        text += f"; after a Hadamard transform {transform_words(wanted.hadamard)}"
    if wanted.correction != 1.0:
        text += f"; the product times {wanted.correction:.4g}"
    return text


def _operand(recipe: Recipe, gemm: str, operand: str) -> str:
    """The operand's letter, with a note where it is made from fprop's codes (backward GEMMs)."""
    letter = LETTERS[operand]
    if gemm == "fprop" or operand == "dy":
        return letter
    requantizes = recipe.backward == "forward" and recipe.quantizer("fprop", operand) is not None
    return f"{letter} (as fprop quantized it)" if requantizes else letter


def transform_words(hadamard: Hadamard) -> str:
    """A Hadamard transform in words, as in "in groups of 64 with random signs"."""
    signs = "no" if hadamard.signs == "none" else hadamard.signs
    return f"in groups of {hadamard.group} with {signs} signs"


def quantizer_words(q: Quantizer) -> str:
    """A quantizer in words, as in "E2M1, E8M0 scales (ceil) for blocks of 32, nearest"."""
    words = [q.element.upper(), _scales(q), _ROUNDING[q.rounding]]
    if q.prescale != 1.0:
        words.append(f"values times {q.prescale:.4g}")
    return ", ".join(words)


def _scales(q: Quantizer) -> str:
    height, length = q.block
    if length == WHOLE_AXIS:
        return f"{q.scale.upper()} scale of the {'row' if height else 'tensor'}"
    rule: list[str] = [q.rule]
    if q.tensor_max:
        rule.append(f"tensor scale for {q.tensor_max:g}")
    if q.row_max:
        rule.append(f"row scale for {q.row_max:g}")
    if q.inflate != 1.0:
        rule.append(f"times {q.inflate:.4g}")
    if q.unit_gain:
        how = _ROUNDING[q.scale_rounding]
        rule.append(f"then to a gain of 1 in groups of {q.unit_gain}, {how}")
    size = f"{length}" if height == 1 else f"{height} x {length}"
    return f"{q.scale.upper()} scales ({', '.join(rule)}) for blocks of {size}"


def estimator_words(estimator: Estimator) -> str:
    """An estimator in words, as in "times the slope of a spline (width 0.5)"."""
    by_form = {
        "dge": f"times DGE's factor (k {estimator.k:g}, clip {estimator.clip:g})",
        "spline": f"times the slope of a spline (width {estimator.width:g})",
        "sigmoid": f"times the slope of a sigmoid (k {estimator.k:g})",
        "straight-through": "straight through",
    }
    words = by_form[estimator.form]
    if estimator.beyond != "continued":
        words += f", {'0' if estimator.beyond == 'zero' else '1'} beyond the grid"
    if estimator.maximum != "straight-through":
        words += f", and through the maximum of a block ({estimator.maximum}"
        if estimator.maximum == "softmax":
            words += f" at temperature {estimator.temperature:g}"
        if estimator.scale_form != "straight-through":
            words += f", {by_form[estimator.scale_form]} of its scale"
        words += ")"
    if estimator.outer_scale != "straight-through":
        words += ", and through the outer scale"
    return words


def _outliers(outliers: OutlierClamp | HotChannels) -> str:
    if isinstance(outliers, HotChannels):
        return (
            f"of each {outliers.group} channels the {outliers.count} with the largest norm over "
            "the microbatch's tokens, multiplied in high precision, also in wgrad"
        )
    clamp = outliers
    low, high = f"{1 - clamp.alpha:.4g}", f"{clamp.alpha:.4g}"
    text = f"clamped to the {low} and {high} quantiles of the rank's part of a {clamp.scope}"
    if clamp.compensate:
        text += ", the rest multiplied in high precision"
        text += ", also in wgrad" if clamp.residual_in_wgrad else ""
    return text
