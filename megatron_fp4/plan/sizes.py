"""Checks that the sizes of a linear are multiples of its recipe's blocks and Hadamard groups."""

from __future__ import annotations

import math
from functools import cache, lru_cache

from megatron_fp4.arithmetic.hot_channels import HotChannels
from megatron_fp4.arithmetic.quantizer import Quantizer
from megatron_fp4.errors import SizeError
from megatron_fp4.recipe import GEMMS, OPERANDS, GemmRecipe, Recipe

# The contracted axis of each operand as the model holds it: X [tokens, in], W [out, in],
# dY [tokens, out].
CONTRACTED = {
    ("fprop", "x"): 1,
    ("fprop", "w"): 1,
    ("dgrad", "dy"): 1,
    ("dgrad", "w"): 0,
    ("wgrad", "dy"): 0,
    ("wgrad", "x"): 0,
}
# What the rows and columns of each operand count.
_AXES = {
    "x": ("tokens", "in_features"),
    "w": ("out_features", "in_features"),
    "dy": ("tokens", "out_features"),
}


def contracted_multiple(gemm: GemmRecipe) -> int:
    """The number of which the contracted axis of a GEMM must be a multiple on each rank."""
    tiles = [1 if gemm.hadamard is None else gemm.hadamard.group]
    for quantizer in (gemm.a, gemm.b):
        if quantizer is not None:
            tiles += [quantizer.block[1] or 1, 2 if quantizer.format.packed else 1]
            tiles += [quantizer.unit_gain or 1]
    return math.lcm(*tiles)


def _height(quantizer: Quantizer | None) -> int:
    """The block height, of which the number of an operand's rows must be a multiple; 1 where any
    number of rows will do."""
    return 1 if quantizer is None else quantizer.block[0] or 1


def token_tile(recipe: Recipe, gemm: str, letter: str) -> int:
    """The number of tokens of which a rank's part must be a multiple, to be quantized without the
    tokens of other ranks."""
    if gemm == "wgrad":  # contracts the tokens
        return contracted_multiple(recipe.gemm(gemm))
    return _height(recipe.quantizer(gemm, letter))


@cache
def token_multiple(recipe: Recipe) -> int:
    """The smallest number such that all GEMMs of a recipe take every multiple of it as the number
    of tokens."""
    operands = (("fprop", "x"), ("dgrad", "dy"), ("wgrad", "x"))
    return math.lcm(*(token_tile(recipe, gemm, letter) for gemm, letter in operands))


@lru_cache(4096)
def check_sizes(
    recipe: Recipe,
    tokens: int | None,
    inputs: int,
    outputs: int,
    where: str,
    running: tuple[str, ...] = GEMMS,
) -> None:
    """Check that blocks and Hadamard groups tile a linear of these sizes on a rank.

    tokens: None if the number is not known yet; it is then not checked. where: the linear's name in
    the message. running: the GEMMs that will run; the others may have any number of tokens. Raises
    SizeError for the first size that is not a multiple.
    """
    sizes = {"tokens": tokens, "in_features": inputs, "out_features": outputs}
    if isinstance(recipe.outliers, HotChannels) and inputs % recipe.outliers.group:
        reason = f"in which recipe {recipe.name} looks for hot channels"
        raise SizeError(where, "in_features", inputs, recipe.outliers.group, reason)
    for gemm in GEMMS:
        wanted = recipe.gemm(gemm)
        for letter in OPERANDS[gemm]:
            along = CONTRACTED[gemm, letter]
            axes = _AXES[letter][along], _AXES[letter][1 - along]
            multiples = contracted_multiple(wanted), _height(recipe.quantizer(gemm, letter))
            for axis, multiple in zip(axes, multiples, strict=True):
                size = None if axis == "tokens" and gemm not in running else sizes[axis]
                if size is not None and size % multiple:
                    reason = f"which {gemm} of recipe {recipe.name} takes in blocks"
                    raise SizeError(where, axis, size, multiple, reason, gemm != "fprop")
