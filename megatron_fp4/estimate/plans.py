"""The LinearPlan of each linear on a rank of a layout."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch

from megatron_fp4.errors import ConfigError
from megatron_fp4.estimate.layout import Layout
from megatron_fp4.estimate.model import LayerLinear, Model
from megatron_fp4.plan.compiler import compile_plan
from megatron_fp4.plan.data import LinearPlan
from megatron_fp4.plan.owned_codes import codes_in_turn
from megatron_fp4.plan.sizes import token_multiple
from megatron_fp4.recipe import Recipe
from megatron_fp4.recipes import get_recipe
from megatron_fp4.setting import (
    UNSHARDED,
    KeepsW,
    Setting,
    Sharding,
    SwigluPlace,
    column_parallel,
    holds,
    row_parallel,
)
from megatron_fp4.target import Target, kernels_problem

BF16 = Recipe("bf16")


def recipe_named(name: str, **options: str) -> Recipe:
    """The recipe of a name that --fp4-recipe takes; BF16, which quantizes nothing, for "bf16" and
    "off". options: of the recipe. Raises ConfigError as get_recipe, and for options of BF16."""
    if name in ("bf16", "off"):
        if options:
            raise ConfigError(f"{name} takes no options: leave out {next(iter(options))}")
        return BF16
    return get_recipe(name, **options)


def longest(recipe: Recipe) -> Recipe:
    """The recipe of the phase that holds for the largest share of training."""
    return recipe.in_turn[_longest(recipe)]


def comes_as_codes(recipe: Recipe, layout: Layout) -> bool:
    """Whether linears get W as codes in the longest phase."""
    return layout.sent_w and codes_in_turn(recipe)[_longest(recipe)]


def by_phases(recipe: Recipe, layout: Layout) -> list[tuple[Recipe, Layout]]:
    """The recipes of `Recipe.alone`, each with the layout of its phase: one that gathers W as codes
    only if the phase reads the codes that are gathered."""
    return [
        (each, layout if codes else replace(layout, gathers_codes=False))
        for each, codes in zip(recipe.alone, codes_in_turn(recipe), strict=True)
    ]


def _longest(recipe: Recipe) -> int:
    """The place of the longest phase in `Recipe.in_turn`."""
    return recipe.shares.index(max(recipe.shares))


def check_target(recipe: Recipe, target: Target) -> None:
    """Raises ConfigError if plans for `target` cannot be made here, since Triton is missing."""
    problem = kernels_problem(target)
    if problem is not None and recipe.ever_quantized:
        raise ConfigError(f"plans for a GPU need Triton, which need not run here: {problem}")


def plan(
    linear: LayerLinear, model: Model, layout: Layout, recipe: Recipe, target: Target
) -> LinearPlan:
    """The plan of one linear on a rank: of the longest phase, in a layer that has no recipe of its
    own. A linear of an expert gets its even share of the tokens, padded to whole blocks."""
    sharding = sharding_of(linear, layout)
    inputs, outputs = shard(linear, layout)
    setting = Setting(
        tokens_on_rank(linear, model, layout, recipe), inputs, outputs,
        torch.bfloat16, target, torch.bfloat16, sharding,
        main_grad=layout.main_grad,
        has_bias=model.biases or (model.qkv_bias and linear.name == "linear_qkv"),
        keeps_w=_keeps_w(layout, recipe),
        sent_w=comes_as_codes(recipe, layout),
    )  # fmt: skip
    return _compiled(longest(recipe), setting)


def _keeps_w(layout: Layout, recipe: Recipe) -> KeepsW | None:
    """What is kept of W's operands. With CUDA graphs nothing is held over a step."""
    if not recipe.ever_quantized or (layout.graphs and holds(layout.keeps_w)):
        return None
    return layout.keeps_w


def joined(linear: LayerLinear, made: LinearPlan, model: Model, layout: Layout) -> LinearPlan:
    """The plan of a linear with the SwiGLU and the RMSNorm that it computes as it quantizes.

    made: its plan without them, as `plan` gives it. Estimates of memory count their tensors apart.
    """
    if not layout.fused_kernels or not made.recipe.ever_quantized:
        return made
    places: dict[str, SwigluPlace] = {"mlp.linear_fc1": "before", "mlp.linear_fc2": "after"}
    setting = replace(
        made.setting,
        swiglu=places.get(linear.name, "") if model.has_plain_swiglu else "",
        normed=model.has_rms_norm and linear.name in ("linear_qkv", "mlp.linear_fc1"),
    )
    return _compiled(made.recipe, setting)


@lru_cache(4096)
def _compiled(recipe: Recipe, setting: Setting) -> LinearPlan:
    return compile_plan(recipe, setting)


def sharding_of(linear: LayerLinear, layout: Layout) -> Sharding:
    """How tensor parallelism shards a linear."""
    if linear.expert or layout.tp == 1:
        return UNSHARDED
    if linear.parallel == "row":
        return row_parallel(layout.tp, sequence_parallel=layout.sp)
    return column_parallel(layout.tp, sequence_parallel=layout.sp, sums_dx=not layout.sp)


def shard(linear: LayerLinear, layout: Layout) -> tuple[int, int]:
    """(inputs, outputs) of a linear on a rank."""
    ranks = sharding_of(linear, layout).ranks
    if linear.parallel == "column":
        return linear.inputs, linear.outputs // ranks
    return linear.inputs // ranks, linear.outputs


def tokens_on_rank(linear: LayerLinear, model: Model, layout: Layout, recipe: Recipe) -> int:
    """The tokens of a microbatch on a rank, as `Setting.tokens` counts them."""
    tokens = layout.micro_batch * model.sequence // (layout.tp if layout.sp else 1)
    if not linear.expert:
        return tokens
    multiple = token_multiple(recipe)
    return -(-tokens * layout.ep * model.top_k // model.experts // multiple) * multiple
