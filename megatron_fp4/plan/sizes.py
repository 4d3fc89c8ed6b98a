"""Sizes that a recipe's blocks and Hadamard groups divide."""

from __future__ import annotations

import math
from functools import cache

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
    """What the contracted axis of a shard must be a multiple of."""
    tiles = [1 if gemm.hadamard is None else gemm.hadamard.group]
    for quantizer in (gemm.a, gemm.b):
        if quantizer is not None:
            tiles += [quantizer.block[1] or 1, 2 if quantizer.element == "e2m1" else 1]
    return math.lcm(*tiles)


def _height(quantizer: Quantizer | None) -> int:
    """How many rows of an operand share a scale, where a number of rows that is not a multiple of
    it could not be quantized."""
    return 1 if quantizer is None else quantizer.block[0] or 1


def token_tile(recipe: Recipe, gemm: str, letter: str) -> int:
    """How many tokens a part of an operand must be a multiple of to be quantized by itself."""
    if gemm == "wgrad":  # contracts them
        return contracted_multiple(recipe.gemm(gemm))
    return _height(recipe.quantizer(gemm, letter))


@cache
def token_multiple(recipe: Recipe) -> int:
    """The smallest number such that all GEMMs of a recipe take every multiple of it as tokens."""
    operands = (("fprop", "x"), ("dgrad", "dy"), ("wgrad", "x"))
    return math.lcm(*(token_tile(recipe, gemm, letter) for gemm, letter in operands))


def check_sizes(recipe: Recipe, tokens: int | None, inputs: int, outputs: int, where: str) -> None:
    """Raise SizeError unless blocks and Hadamard groups tile a local [tokens, inputs] x
    [outputs, inputs] linear called `where`. tokens: None where they are not known yet."""
    sizes = {"tokens": tokens, "in_features": inputs, "out_features": outputs}
    for gemm in GEMMS:
        wanted = recipe.gemm(gemm)
        for letter in OPERANDS[gemm]:
            along = CONTRACTED[gemm, letter]
            axes = _AXES[letter][along], _AXES[letter][1 - along]
            multiples = contracted_multiple(wanted), _height(recipe.quantizer(gemm, letter))
            for axis, multiple in zip(axes, multiples, strict=True):
                size = sizes[axis]
                if size is not None and size % multiple:
                    reason = f"which {gemm} of recipe {recipe.name} takes in blocks"
                    raise SizeError(where, axis, size, multiple, reason)
