"""This package's recipes in Transformer Engine's own linears, by upstream's hook.

    --transformer-impl transformer_engine --fp4-format e2m1 --fp4-recipe custom
    --fp4-quantizer-factory megatron_fp4.te.tetrajet

or, without Megatron, `CustomRecipe(qfactory=megatron_fp4.te.tetrajet)`: any recipe that is
registered, with underscores for hyphens; `Factory(get_recipe(...))` in a module of your own takes
options. It is for models that have to keep Transformer Engine's linears: prefer --fp4-recipe, whose
linears gather 4-bit codes, keep weights for a step, and take every recipe.

Operands are quantized, and multiplied, as by `megatron_fp4.linear`. Rounding noise is not: the hook
knows neither step, nor module, nor place, so that noise differs from one layout to another, and a
resumed run begins again with that of its first step (te/quantizers.py).

Imports Transformer Engine when a factory is first called, not before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_fp4.errors import ConfigError
from megatron_fp4.recipe import GEMMS, OPERANDS, Recipe
from megatron_fp4.recipes import get_recipe, list_recipes

_OPERAND = {"input": "x", "weight": "w", "grad_output": "dy"}  # by Transformer Engine's names


@dataclass(frozen=True)
class Factory:
    """The quantizers of one recipe: what CustomRecipe calls with the role of each tensor.

    Raises ConfigError for a recipe that says more than the hook can.
    """

    recipe: Recipe

    def __post_init__(self) -> None:
        if (word := _inexpressible(self.recipe)) is not None:
            raise ConfigError(
                f"recipe {self.recipe.name} {word}, which Transformer Engine's linears leave no "
                f"room for: use --fp4-recipe {self.recipe.name} without --fp4-format"
            )

    def __call__(self, role: Any) -> Any:
        """role: a QuantizerRole, or None. Returns a Quantizer of Transformer Engine's; one that
        does nothing for what is no operand of a linear."""
        from megatron_fp4.te import quantizers  # imports Transformer Engine

        return quantizers.make(self.recipe, operand_of(role), getattr(role, "name", ""))


def operand_of(role: Any) -> str | None:
    """x, w or dy for the role of a linear's operand; None for outputs, and for what attention
    quantizes. Raises ConfigError for operands that the hook does not bring here."""
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
    """What a recipe asks for that one quantizer for each of X, W and dY cannot do, in a few words
    that follow its name."""
    if any(recipe.gemm(gemm).hadamard for gemm in GEMMS):
        return "transforms both operands of a GEMM by signs that they share"
    if recipe.estimator is not None:
        return "multiplies dW by a factor of W (DGE)"
    if recipe.outliers is not None:
        return "splits outliers from X"
    if recipe.bf16_after is not None:
        return "changes in the course of training"
    for gemm in GEMMS:
        for operand in OPERANDS[gemm]:
            quantizer = recipe.quantizer(gemm, operand)
            if quantizer is not None and (quantizer.outer or quantizer.tensor_max):
                return f"has a scale that ranks share ({operand} of {gemm})"
    return None


def __getattr__(name: str) -> Factory:
    """The factory of a registered recipe."""
    recipe = name.replace("_", "-")
    if recipe not in list_recipes():
        known = ", ".join(known.replace("-", "_") for known in list_recipes())
        raise AttributeError(f"megatron_fp4.te has no {name!r}; the recipes: {known}")
    return Factory(get_recipe(recipe))
