"""Which recipes multiply nothing of W but the codes and scales of fprop."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_fp4.recipe import GEMMS, Recipe


def reads_average(recipe: Recipe, sent_w: bool) -> bool:
    """Whether a linear rounds W towards its average in any phase. sent_w: see `Setting.sent_w`."""
    gemms = [gemm for gemm in GEMMS if not (sent_w and gemm == "fprop")]
    quantizers = [each.gemm(gemm).b for each in recipe.in_turn for gemm in gemms]
    return any(w is not None and w.rounding == "ema" for w in quantizers)


def reader_of_w(recipe: Recipe) -> str | None:
    """What reads more of W than fprop's codes and scales, in words that follow "because".

    None: nothing does. The ranks that own parts of W can then quantize them, and send the codes and
    scales of their parts in place of W (`Setting.sent_w`). A part may begin anywhere in a row of W,
    so that no scale may belong to a whole row, and rounding may draw no random bits.
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
    for phase in recipe.phases:
        late = f"recipe {phase.recipe.name} of a phase"
        if (why := reader_of_w(phase.recipe)) is not None:
            return f"of {late}: {why}"
        if phase.recipe.fprop.b != w:
            return f"{late} quantizes W otherwise"
    return None


def refusal(recipes: Sequence[Recipe], flag: str) -> str | None:
    """The message that refuses `flag`, which has W gathered as codes; None if it has an effect.

    W of a linear is gathered as codes if `reader_of_w` is None for its recipe, and in the model's
    dtype otherwise. If the launch's recipe quantizes anything, W must be codes there.

    recipes: the launch's first, then those of its layers and of single modules.
    """
    launch, *others = recipes
    judged = [launch] if launch.ever_quantized else [r for r in others if r.ever_quantized]
    readers = [(recipe.name, reader_of_w(recipe)) for recipe in judged or [launch]]
    name, reader = next((each for each in readers if each[1] is None), readers[0])
    if reader is None:
        return None
    return f"recipe {name} does not support {flag}, because {reader}: leave it out"
