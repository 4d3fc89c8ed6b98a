"""Why a layout cannot run: what Megatron or this package refuses, and what takes too much memory.

The rules of CUDA graphs and experts are those of mcore/launch/refusals/, and those of blocks the
plan's own. tests/estimate/test_fits.py compares them with what Megatron's parser refuses.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from megatron_fp4.arithmetic.philox import GROUP
from megatron_fp4.errors import SizeError
from megatron_fp4.estimate.gpus import Gpu
from megatron_fp4.estimate.layout import Layout, stages
from megatron_fp4.estimate.memory import Memory, memory
from megatron_fp4.estimate.model import Model
from megatron_fp4.estimate.plans import shard, sharding_of, tokens_on_rank
from megatron_fp4.plan.sizes import check_sizes, token_tile
from megatron_fp4.recipe import Recipe

# The share of a GPU's memory that is left for the CUDA context, NCCL and fragmentation. Assumed.
RESERVED = 0.08
GIB = 2.0**30


def refusals(model: Model, layout: Layout, recipe: Recipe) -> Iterator[str]:
    """What is wrong with a layout, beside its memory; nothing if it runs."""
    yield from _division(model, layout)
    yield from _experts(model, layout)
    if layout.graphs:
        yield from _graphs(model, layout, recipe)
    if recipe.ever_quantized:
        yield from _blocks(model, layout, recipe)


def _division(model: Model, layout: Layout) -> Iterator[str]:
    """Sizes that do not divide."""
    tp, pp, chunks = layout.tp, layout.pp, layout.pp * layout.vpp
    if tp > layout.node:
        yield f"TP {tp}: no more than the {layout.node} GPUs of a host"
    for what, size in (
        ("attention heads", model.heads),
        ("query groups", model.groups),
        ("hidden size", model.hidden),
        ("FFN size", model.ffn),
    ):
        if size % tp:
            yield f"TP {tp} does not divide the {what} ({size})"
    if layout.sp and model.sequence % tp:
        yield f"TP {tp} does not divide the sequence length ({model.sequence})"
    if model.layers % chunks:
        yield f"PP {pp} times {layout.vpp} chunks does not divide the {model.layers} layers"
    if layout.gpus % (tp * pp):
        yield f"TP {tp} times PP {pp} does not divide the {layout.gpus} GPUs"
    elif layout.batch % (layout.dp * layout.micro_batch):
        yield (
            f"DP {layout.dp} times micro-batch {layout.micro_batch} does not divide the global "
            f"batch ({layout.batch})"
        )
    elif layout.vpp > 1 and layout.microbatches % pp:
        yield f"{layout.microbatches} microbatches are not a multiple of PP {pp}, as VPP needs"


def _experts(model: Model, layout: Layout) -> Iterator[str]:
    if not model.experts:
        return
    if model.experts % layout.ep:
        yield f"EP {layout.ep} does not divide the {model.experts} experts"
    if layout.gpus % (layout.ep * layout.pp):
        yield f"EP {layout.ep} times PP {layout.pp} does not divide the {layout.gpus} GPUs"
    if layout.tp > 1 and not layout.sp:
        yield "experts under tensor parallelism need sequence parallelism"


def _graphs(model: Model, layout: Layout, recipe: Recipe) -> Iterator[str]:
    """What CUDA graphs exclude, and what is not estimated with them.

    See mcore/launch/refusals/cuda_graphs.py.
    """
    for what, is_there in (
        ("experts of varying numbers of tokens", model.experts > 0),
        ("recomputation", layout.recompute),
        ("x_mean: subtracted", any(each.x_mean == "subtracted" for each in recipe.parts)),
    ):
        if is_there:
            yield f"CUDA graphs do not go with {what}"
    if layout.pp > 1:
        yield "the memory of CUDA graphs under pipeline parallelism has no estimate"


def _blocks(model: Model, layout: Layout, recipe: Recipe) -> Iterator[str]:
    """Sizes on a rank that are not multiples of the recipe's blocks."""
    for kind in {model.has_experts(layer) for layer in range(model.layers)}:
        for linear in model.linears(kind):
            inputs, outputs = shard(linear, layout)
            tokens = layout.micro_batch * model.sequence
            is_scattered = sharding_of(linear, layout).scattered == "x"
            for each in recipe.parts:
                problem = _sizes(each, None if linear.expert else tokens, inputs, outputs)
                if problem is not None:
                    yield f"TP {layout.tp}: {linear.name} has {problem}"
                if not is_scattered:
                    continue
                part = tokens_on_rank(linear, model, layout, each)
                if part % (tile := token_tile(each, "fprop", "x")):
                    yield f"TP {layout.tp}: {part} tokens on a rank, not a multiple of {tile}"


@lru_cache(4096)
def _sizes(recipe: Recipe, tokens: int | None, inputs: int, outputs: int) -> str | None:
    try:
        check_sizes(recipe, tokens, inputs, outputs, "")
    except SizeError as error:
        counted = error.axis.replace("_", " ")
        return f"{error.size} {counted} on a rank, not a multiple of {error.multiple}"
    for what, size in (("in features", inputs), ("out features", outputs)):
        if size % GROUP:
            return f"{size} {what} on a rank, not a multiple of {GROUP}"
    return None


def peak(model: Model, layout: Layout, recipe: Recipe, gpu: Gpu) -> Memory:
    """The memory of the rank that takes most: of the first stage, which has most microbatches in
    flight, or of the last, which has the logits."""
    found = stages(model, layout)
    ends = {stage.rank: stage for stage in (found[0], found[-1])}.values()
    each = [memory(model, layout, recipe, gpu.target, stage) for stage in ends]
    return max(each, key=lambda one: one.total)


def room(gpu: Gpu) -> float:
    """The bytes that a rank may take."""
    return gpu.memory * GIB * (1 - RESERVED)
