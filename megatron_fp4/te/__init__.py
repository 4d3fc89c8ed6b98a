"""This package's recipes in Transformer Engine's own linears, by its hook for custom quantizers.

    --transformer-impl transformer_engine --fp4-format e2m1 --fp4-recipe custom
    --fp4-quantizer-factory megatron_fp4.te.tetrajet

or, without Megatron, `CustomRecipe(qfactory=megatron_fp4.te.tetrajet)`. The attributes of this
module are factories of the registered recipes, with underscores for hyphens. For a recipe with
options, put `Factory(get_recipe(...))` in a module of your own. This package is for models that
must keep Transformer Engine's linears. Otherwise prefer --fp4-recipe, whose linears gather 4-bit
codes, hold quantized weights over a step, and support every recipe.

Operands are quantized and multiplied as by `megatron_fp4.linear`, except for the random bits of
stochastic rounding. The hook does not tell the step, the module or an element's place in the
unsharded tensor. Random bits therefore differ between parallel layouts, and a resumed run draws
those of its first steps again (te/quantizers.py).

Transformer Engine is imported when a factory is first called.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_fp4.errors import ConfigError
from megatron_fp4.recipe import GEMMS, OPERANDS, Recipe
from megatron_fp4.recipes import get_recipe, list_recipes, uniform_recipes

_OPERAND = {"input": "x", "weight": "w", "grad_output": "dy"}  # by Transformer Engine's names


@dataclass(frozen=True)
class Factory:
    """The quantizers of one recipe; CustomRecipe calls it with the role of each tensor.

    Raises ConfigError for a recipe that the hook does not support: see `_inexpressible`.
    """

    recipe: Recipe

    def __post_init__(self) -> None:
        if (word := _inexpressible(self.recipe)) is not None:
            raise ConfigError(
                f"recipe {self.recipe.name} {word}, which Transformer Engine's linears leave no "
                f"room for: use --fp4-recipe {self.recipe.name} without --fp4-format"
            )

    def __call__(self, role: Any) -> Any:
        """The quantizer of a tensor, as a Quantizer of Transformer Engine.

        role: a QuantizerRole, or None. A tensor that is no operand of a linear gets a quantizer
        that leaves it in high precision.
        """
        from megatron_fp4.te import quantizers  # imports Transformer Engine

        return quantizers.make(self.recipe, operand_of(role), getattr(role, "name", ""))


def operand_of(role: Any) -> str | None:
    """The letter of a linear's operand, "x", "w" or "dy", by its role; None for outputs, and for
    tensors that attention quantizes.

    Raises ConfigError for the roles of grouped linears, and of Transformer Engine before 2.16.
    """
    if isinstance(role, str):
        raise ConfigError(
            "this Transformer Engine names tensors by strings: install 2.16 or newer, or use "
            "--fp4-recipe without --fp4-format"
        )
    kind, tensor = getattr(role, "module_type", ""), getattr(role, "tensor_type", "")
    if kind == "grouped_linear":
        raise ConfigError(
            "Transformer Engine's grouped linears take no quantizers of others: leave out "
            "--moe-grouped-gemm"
        )
    return _OPERAND.get(tensor) if kind == "linear" else None


def _inexpressible(recipe: Recipe) -> str | None:
    """What a recipe needs that separate quantizers for X, W and dY cannot do; None if nothing.

    It is a predicate of a few words, which the error message puts after the recipe's name.
    """
    if any(recipe.gemm(gemm).hadamard for gemm in GEMMS):
        return "transforms both operands of a GEMM by signs that they share"
    if recipe.estimator is not None:
        return "multiplies dW by a factor of W (DGE)"
    if recipe.x_estimator is not None:
        return "multiplies dX by a factor of X"
    if recipe.outliers is not None:
        return "splits outliers from X"
    if recipe.x_mean == "subtracted":
        return "multiplies the mean of X apart"
    if recipe.weight_states:
        return "keeps an average of W"
    if recipe.ramping is not None:
        return "updates elements of W at periods of their own"
    if recipe.phases:
        return "changes in the course of training"
    if recipe.layers:
        return "gives some layers recipes of their own"
    for gemm in GEMMS:
        for operand in OPERANDS[gemm]:
            quantizer = recipe.quantizer(gemm, operand)
            if quantizer is not None and quantizer.scales_product:
                return f"has a scale that ranks share ({operand} of {gemm})"
    return None


def __getattr__(name: str) -> Factory:
    """The Factory of a registered recipe, as in `megatron_fp4.te.mxfp4_rht_sr`."""
    recipe = name.replace("_", "-")
    if recipe not in list_recipes():
        known = ", ".join(known.replace("-", "_") for known in uniform_recipes())
        raise AttributeError(f"megatron_fp4.te has no {name!r}; the recipes: {known}")
    return Factory(get_recipe(recipe))
