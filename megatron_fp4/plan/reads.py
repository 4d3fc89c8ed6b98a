"""What the GEMMs of a recipe read of X and W, and what is saved of them for backward.

The letter of an operand is "x", "w" or "dy".
"""

from __future__ import annotations

from typing import Literal

from megatron_fp4.arithmetic.estimators import Estimator
from megatron_fp4.plan.sizes import token_tile
from megatron_fp4.recipe import Recipe
from megatron_fp4.setting import Setting

# --- what is saved for backward -------------------------------------------------------------------


def from_fprop_codes(recipe: Recipe, letter: str) -> bool:
    """Whether backward GEMMs read W or X from fprop's codes, not from the model's tensor."""
    return recipe.backward == "forward" and recipe.quantizer("fprop", letter) is not None


def saves_w(recipe: Recipe, setting: Setting) -> Literal["operand", "model"]:
    """What the forward pass saves of W for the backward pass.

    "operand": W as fprop quantized it, if dgrad or a gradient estimator reads that. "model": W
    itself, if the backward pass reads no quantized W, or quantizes W for fprop again (`remakes_w`).
    """
    saves_codes = _reads_codes_of_w(recipe, setting) and not remakes_w(recipe, setting)
    return "operand" if saves_codes else "model"


def remakes_w(recipe: Recipe, setting: Setting) -> bool:
    """Whether the backward pass quantizes W for fprop again, in place of reading saved codes."""
    again = setting.keeps_w == "remade" and not setting.sent_w
    return again and _reads_codes_of_w(recipe, setting)


def _reads_codes_of_w(recipe: Recipe, setting: Setting) -> bool:
    reads_codes = setting.dx and from_fprop_codes(recipe, "w")
    return reads_codes or estimator_of(recipe, "w", setting) is not None


def estimator_of(recipe: Recipe, letter: str, setting: Setting) -> Estimator | None:
    """The estimator that is applied to dW or dX, by the letter of W or X."""
    if letter == "w":
        return recipe.estimator if setting.dw else None
    return recipe.x_estimator if setting.dx else None


def saves_x(recipe: Recipe, setting: Setting) -> Literal["operand", "packed", "model", ""]:
    """What the forward pass saves of X for the backward pass.

    "operand", the quantized X that fprop multiplied, if wgrad or a gradient estimator reads it. "",
    nothing, if neither needs X. "packed", wgrad's operand, if it can be made in the forward pass.
    Else "model", the matrix from which wgrad makes its operand.
    """
    if estimator_of(recipe, "x", setting) is not None:
        return "operand"
    if not setting.dw:
        return ""
    if from_fprop_codes(recipe, "x"):
        return "operand"
    tokens, _ = setting.shape("x", is_part=setting.has_part("x"))
    packs = setting.packs_x and recipe.wgrad.b is not None
    return "packed" if packs and tokens % token_tile(recipe, "wgrad", "x") == 0 else "model"


# --- outliers and mean of X -----------------------------------------------------------------------


def compensates(recipe: Recipe) -> bool:
    """Whether the outliers of X times W^T are added to Y."""
    return recipe.outliers is not None and recipe.outliers.compensate


def residual_in_dw(recipe: Recipe) -> bool:
    """Whether dY^T times the outliers is added to dW. It is not where wgrad reads the raw X, which
    still contains the outliers."""
    split = recipe.outliers
    wanted = split is not None and split.compensate and split.residual_in_wgrad
    return wanted and from_fprop_codes(recipe, "x")


def centered_x(recipe: Recipe, gemm: str) -> bool:
    """Whether X of fprop or wgrad is made from X without its mean, and not from fprop's codes."""
    if recipe.x_mean == "kept" or recipe.quantizer(gemm, "x") is None:
        return False
    return gemm == "fprop" or not from_fprop_codes(recipe, "x")


def mean_in_dw(recipe: Recipe, setting: Setting) -> bool:
    """Whether the term of the mean of X is added to dW."""
    if recipe.x_mean == "kept" or not setting.dw:
        return False
    return from_fprop_codes(recipe, "x") or centered_x(recipe, "wgrad")


def subtracts_mean(recipe: Recipe, setting: Setting) -> bool:
    """Whether the mean of X is computed."""
    return centered_x(recipe, "fprop") or mean_in_dw(recipe, setting)
