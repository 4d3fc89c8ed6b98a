"""Which recipes multiply nothing of W but the codes and scales of fprop, and in which phases."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from megatron_fp4.arithmetic.quantizer import Quantizer
from megatron_fp4.recipe import GEMMS, Recipe

# (share of training, whether W comes as codes from then on) at 0 and wherever that changes.
Times = tuple[tuple[float, bool], ...]


def reads_average(recipe: Recipe, sent_w: bool) -> bool:
    """Whether a linear rounds W towards its average in any phase. sent_w: whether W comes as codes
    in the phases of which `codes_in_turn` says so."""
    quantizers = [
        each.gemm(gemm).b
        for each, codes in zip(recipe.in_turn, codes_in_turn(recipe), strict=True)
        for gemm in GEMMS
        if not (sent_w and codes and gemm == "fprop")
    ]
    return any(w is not None and w.rounding == "ema" for w in quantizers)


def reader_of_w(recipe: Recipe) -> str | None:
    """What reads more of W than fprop's codes and scales, in words that follow "because".

    None: nothing does. The ranks that own parts of W can then quantize them, and send the codes and
    scales of their parts in place of W (`Setting.sent_w`). A part may begin anywhere in a row of W,
    so that no scale may belong to a whole row, and rounding may draw no random bits. Phases of the
    recipe do not count.
    """
    w = recipe.fprop.b
    if w is None:
        return "fprop multiplies W in high precision"
    if (w.element, w.scale, w.block[0], w.row_max) != ("e2m1", "e8m0", 1, 0.0):
        return "fprop's W is not E2M1 with an E8M0 scale for each block of a row"
    if w.stochastic:
        return "fprop rounds W stochastically"
    if recipe.backward != "forward":
        return "backward reads the unquantized W"
    if recipe.fprop.hadamard is not None:
        return "fprop transforms W"
    if recipe.estimator is not None:
        return "the gradient estimator reads the unquantized W"
    if recipe.outliers is not None and recipe.outliers.compensate:
        return "outliers of X are multiplied by the unquantized W"
    if recipe.x_mean == "subtracted" and recipe.fprop.a is not None:
        return "the mean of X is multiplied by the unquantized W"
    if recipe.ramping is not None:
        return "the calibrations of Q-Ramping quantize W"
    return None


@cache
def reads_codes(recipe: Recipe, w: Quantizer) -> bool:
    """Whether a recipe, without its phases, multiplies nothing of W but what `w` made of it for
    fprop."""
    return recipe.fprop.b == w and reader_of_w(recipe) is None


def codes_recipe(recipe: Recipe) -> Recipe | None:
    """Of a recipe and those of its phases the first one whose W can come as codes; None: there is
    none."""
    return next((each for each in recipe.in_turn if reader_of_w(each) is None), None)


def codes_in_turn(recipe: Recipe) -> list[bool]:
    """For each recipe of `Recipe.in_turn`, whether W can come as codes: those of one quantizer, the
    one of `codes_recipe`."""
    own = codes_recipe(recipe)
    w = None if own is None else own.fprop.b
    return [w is not None and reads_codes(each, w) for each in recipe.in_turn]


def times_of(recipe: Recipe) -> Times:
    """When W of a linear with this recipe can come as codes."""
    begins = [0.0, *(phase.after for phase in recipe.phases)]
    found: list[tuple[float, bool]] = []
    for after, codes in zip(begins, codes_in_turn(recipe), strict=True):
        if not found or codes != found[-1][1]:
            found.append((after, codes))
    return tuple(found)


def times_of_launch(recipes: Sequence[Recipe]) -> Times:
    """When the ranks of a launch gather W as codes. At other times they gather it in the model's
    dtype, and always for linears whose own recipe has other times.

    recipes: the launch's first, then those of its layers and of single modules. The launch's
    decides if it quantizes anything, else the first of the others whose W can come as codes.
    """
    judged = _judged(recipes)
    return times_of(next((r for r in judged if codes_recipe(r) is not None), judged[0]))


def refusal(recipes: Sequence[Recipe], flag: str) -> str | None:
    """The message that refuses `flag`, which has W gathered as codes; None if it has an effect.

    recipes: see `times_of_launch`.
    """
    judged = _judged(recipes)
    if any(codes_recipe(recipe) is not None for recipe in judged):
        return None
    name, reader = judged[0].name, reader_of_w(judged[0])
    return f"recipe {name} does not support {flag}, because {reader}: leave it out"


def _judged(recipes: Sequence[Recipe]) -> list[Recipe]:
    """The recipes that decide whether W comes as codes; see `times_of_launch`."""
    launch, *others = recipes
    judged = [launch] if launch.ever_quantized else [r for r in others if r.ever_quantized]
    return judged or [launch]
