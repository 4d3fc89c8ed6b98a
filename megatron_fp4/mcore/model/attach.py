"""Gives the linears of a built model their global names and recipes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from megatron.core import parallel_state as mpu
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlock

from megatron_fp4.errors import ConfigError
from megatron_fp4.mcore.arguments.steps import trains
from megatron_fp4.mcore.launch import cuda_graphs
from megatron_fp4.mcore.launch.refusals.table import refuse
from megatron_fp4.mcore.model import attention, executor, joined_norms, start_lines, start_table
from megatron_fp4.mcore.model.layers import Fp4ColumnParallelLinear, Fp4RowParallelLinear
from megatron_fp4.mcore.model.mlp import GatedMLP
from megatron_fp4.mcore.model.run import Run
from megatron_fp4.mcore.model.start_lines import GatheredWeights
from megatron_fp4.mcore.model.start_table import Row
from megatron_fp4.mcore.runtime.ranks import of_all
from megatron_fp4.plan.data import LinearPlan
from megatron_fp4.plan.memory import held_bytes
from megatron_fp4.plan.owned_codes import reads_average
from megatron_fp4.recipes.assignment import recipe_for
from megatron_fp4.streams import check_streams

Fp4Layer = Fp4ColumnParallelLinear | Fp4RowParallelLinear
_JOINED = (
    "SwiGLU is computed by mlp.linear_fc2, and its gradient by mlp.linear_fc1, as they quantize"
)
_JOINED_NORMS = "RMSNorm is computed by linear_qkv and mlp.linear_fc1 behind it, as they quantize"
_CUDNN = "set CUDNN_HOME to the folder of PyTorch's cuDNN, site-packages/nvidia/cudnn"
# Classes of linears by name, so that Transformer Engine need not be there.
_LINEARS = {"ColumnParallelLinear", "RowParallelLinear", "Linear", "TELinear", "LayerNormLinear"}


class _Joined(NamedTuple):
    """What linears of a rank compute as they quantize: SwiGLU, and norms."""

    swiglu: bool
    norms: bool


def attach(run: Run, model: list[MegatronModule], fuse: Callable[[], str] | None = None) -> None:
    """Attaches recipes to the linears of a built model, and prints the start table on rank 0.

    Every rank calls it with its model chunks, before they are wrapped. fuse: `fused_kernels.attach`
    for this model, which returns a line for the table; None: no kernels are fused.

    Raises ConfigError, on all ranks, if a linear cannot follow its recipe, if no linear would
    follow one, if a glob of modules matches no linear, or if two random streams collide.
    """
    found = [linear for chunk in model for linear in _linears(chunk)]
    refused = {name: _attach_one(run, name, layer, number) for name, layer, number in found}
    joined = _join(run, model)
    rows = _gather([row for each in found for row in _rows(run, *each, refused[each[0]])])
    stock = _gather([row for chunk in model for row in _stock_linears(chunk)])
    refuse(_problems(run, rows, stock))
    run.linears = list(dict.fromkeys(row.name for row in rows if row.gemms))
    check_streams(run.linears)
    if cuda_graphs.wanted(run.args) and found:  # a stage may have no linears
        run.prepare_graphs(len(found), found[0][1].weight.device)
    plans = [layer.plans() for _, layer, _ in found if layer.fp4 is not None]
    lines = [*_sizes(run, model, plans), *_kernels(run, model, plans, joined)]
    if fuse is not None:
        lines.append(fuse())
    if torch.distributed.get_rank() == 0:
        table = start_table.table(run.recipes, [*rows, *stock])
        run.start_table = "\n  ".join([table, *filter(None, lines)])
        print(run.start_table, flush=True)


def _join(run: Run, model: list[MegatronModule]) -> _Joined:
    """Lets linears compute the SwiGLUs and norms before them where the flags say so."""
    mlps = [mlp for chunk in model for mlp in chunk.modules() if isinstance(mlp, GatedMLP)]
    if run.args.fp4_joins_swiglu:
        for mlp in mlps:
            mlp.join()
    norms = sum(map(joined_norms.join, model)) if run.args.fp4_joins_norms else 0
    return _Joined(any(mlp.is_joined for mlp in mlps), norms > 0)


def _problems(run: Run, rows: list[Row], stock: list[Row]) -> Iterator[str]:
    """Why the launch cannot train the model. rows, stock: of the linears of all ranks."""
    for glob, _ in run.module_recipes:
        if not any(fnmatchcase(row.name, glob) for row in rows):
            some = ", ".join(sorted({start_table.kind(row.name)[0] for row in rows}))
            yield (
                f"{glob} of --fp4-module-recipe, or of layers: of the recipe: no linear has such a "
                f"name; try {some}"
            )
    yield from (row.refusal for row in rows if row.refusal is not None)
    if not rows:
        names = sorted({start_table.kind(row.name)[0] for row in stock})
        yield (
            f"no linear follows recipe {run.recipe.name}: the specification of the layers has no "
            "ColumnParallelLinear or RowParallelLinear of Megatron's, nor a class that derives "
            f"from one; linears of other classes are {', '.join(names) or 'not there either'}"
        )
    if not any(row.gemms for row in rows):
        yield (
            f"recipe {run.recipe.name} would quantize no layer: all of them are kept in BF16; "
            "leave out --fp4-module-recipe GLOB=bf16, or lower --num-layers-at-start-in-bf16 or "
            "--num-layers-at-end-in-bf16"
        )
    elif run.recipe.layers and run.recipe.name not in {row.precision for row in rows}:
        yield (
            f"no linear follows recipe {run.recipe.name} itself: its layers, or "
            "--fp4-module-recipe, give all of them another; name fewer there, or train a model of "
            "more layers"
        )


def _sizes(run: Run, model: list[MegatronModule], plans: list[list[LinearPlan]]) -> Iterator[str]:
    """The start table's lines about memory and messages, each for the rank with the largest number.

    A line is "" if it does not apply.
    """
    held = max(of_all(sum(max(map(held_bytes, phases)) for phases in plans)))
    sent = {plan.fprop.b.is_sent for phases in plans for plan in phases if plan.recipe.quantized}
    yield start_lines.held_weights(run.keeps_w, held, set().union(*of_all(sent)))
    gathered = max(of_all(_gathered(run)))
    yield start_lines.gathered_weights(run.args, gathered, run.times_of_codes)
    yield start_lines.weight_states(
        run.recipes, max(of_all(run.weight_states.bytes_of_copies)), run.args
    )
    yield start_lines.moments(run.args)
    if trains(run.args) and run.ramping is not None:
        everything = sum(weight.numel() for chunk in model for weight in chunk.parameters())
        ramped = max(of_all((run.weight_states.ramped_elements, everything)))
        yield start_lines.calibrations(run.ramping, run.args, *ramped)


def _kernels(
    run: Run, model: list[MegatronModule], plans: list[list[LinearPlan]], joined: _Joined
) -> Iterator[str]:
    """The start table's lines about what runs linears and attention. A line is "" if it does not
    apply.

    joined: what linears of this rank compute as they quantize.
    """
    started = of_all(executor.start(run, [plan for phases in plans for plan in phases]))
    yield from executor.lines(run, started)
    everywhere = of_all(joined)
    if any(each.swiglu for each in everywhere):
        yield _JOINED
    if any(each.norms for each in everywhere):
        yield _JOINED_NORMS
    yield _kept_y(model[0].config)
    yield _attention(model)


def _linears(chunk: MegatronModule) -> Iterator[tuple[str, Fp4Layer, int | None]]:
    """(global name, linear, number of its layer) for each of this package's linears."""
    for name, module, number in modules(chunk):
        if isinstance(module, Fp4Layer):
            yield name, module, number


def _stock_linears(chunk: MegatronModule) -> Iterator[Row]:
    """A row of the start table for each linear to which this package can give no recipe.

    These are linears in a user's own layers: they are not named in the specification of the layers,
    or their class does not derive from a linear of Megatron's. The head is left out.
    """
    for name, module, _ in modules(chunk):
        is_linear = any(base.__name__ in _LINEARS for base in type(module).__mro__)
        if is_linear and not isinstance(module, Fp4Layer) and name != "output_layer":
            weight = getattr(module, "weight", None)
            if isinstance(weight, torch.Tensor):
                yield start_table.stock(name, weight, type(module).__name__)


def modules(chunk: MegatronModule) -> Iterator[tuple[str, torch.nn.Module, int | None]]:
    """(global name, module, number of its layer) for each module of a chunk.

    In module names Megatron numbers the layers of each pipeline stage from 0. Random bits depend on
    the global name, in which layers are numbered over the whole model, also from 0. The number of
    the layer counts from 1. It is None outside of layers, and in multi-token prediction, whose
    layers do not belong to the decoder and have numbers of their own.
    """
    layers = {
        f"{block}.layers.{i}".lstrip("."): (f"{block}.layers.".lstrip("."), layer.layer_number)
        for block, module in chunk.named_modules()
        if isinstance(module, TransformerBlock)
        for i, layer in enumerate(module.layers)
    }
    for name, module in chunk.named_modules():
        number, prefix = None, next((p for p in layers if name.startswith(f"{p}.")), None)
        if prefix is not None:
            start, number = layers[prefix]
            name = f"{start}{number - 1}{name.removeprefix(prefix)}"
        yield _with_global_expert(name, chunk.config), module, number


def _with_global_expert(name: str, config: TransformerConfig) -> str:
    """The module name, in which experts are numbered over the whole model.

    Megatron numbers the experts of each expert-parallel rank from 0.
    """
    return _counted_on(r"(\.local_experts\.)(\d+)", name, config)


def with_global_weight(name: str, config: TransformerConfig) -> str:
    """The parameter name, in which the experts of a grouped linear are numbered over the whole
    model. It has one parameter for each: weight0, weight1."""
    return _counted_on(r"(\.experts\.linear_fc[12]\.(?:weight|bias))(\d+)$", name, config)


def _counted_on(number: str, name: str, config: TransformerConfig) -> str:
    """`name` with the number of an expert of this rank, the second group of the pattern `number`,
    in place of which the one over the whole model stands."""
    ranks = mpu.get_expert_model_parallel_world_size()
    if ranks == 1 or config.num_moe_experts is None:
        return name
    first = mpu.get_expert_model_parallel_rank() * (config.num_moe_experts // ranks)
    return re.sub(number, lambda found: f"{found[1]}{first + int(found[2])}", name)


def _attach_one(run: Run, name: str, layer: Fp4Layer, number: int | None) -> str | None:
    """Makes a linear follow its recipe, if it has one.

    Returns the reason if the linear cannot follow it, such as a size that a block does not divide;
    else None.
    """
    recipe = recipe_for(name, number, run.recipe, run.module_recipes, run.args)
    sends = recipe is not None and run.sends(layer.weight, recipe)
    reads = recipe is not None and reads_average(recipe, sends)
    average = run.weight_states.add(layer, name, number, recipe, reads)
    if recipe is None:
        return None
    sent_w = run.sent_weights.add(layer.weight, recipe) if sends else None
    try:
        layer.attach(name, run, recipe, average, sent_w)
    except ConfigError as error:
        return str(error)
    return None


def _rows(
    run: Run, name: str, layer: Fp4Layer, number: int | None, refusal: str | None
) -> list[Row]:
    """The rows of the start table for a linear: one for each phase of its recipe.

    refusal: what `_attach_one` returned.
    """
    if refusal is not None:
        recipe = recipe_for(name, number, run.recipe, run.module_recipes, run.args)
        assert recipe is not None
        return [start_table.refused(name, layer.weight, recipe, refusal)]
    if layer.fp4 is None:
        return [start_table.unquantized(name, layer.weight)]
    phases = [None, *layer.fp4.recipe.phases]
    return [
        start_table.planned(name, layer.weight, plan, layer.tokens(plan.recipe), phase)
        for plan, phase in zip(layer.plans(), phases, strict=True)
    ]


def _gathered(run: Run) -> GatheredWeights:
    """The weights of this rank that are gathered as codes, and what a rank sends of them.

    A rank sends its share to each of the other ranks that have a copy of the weight. What a border
    of a share cuts off a block is not counted.
    """
    elements = size = plain = 0
    sent = plain_sent = 0.0
    for weight, each in run.sent_weights.by_parameter.items():
        if getattr(weight, "allreduce", True):
            ranks = mpu.get_data_parallel_world_size()
        else:
            ranks = mpu.get_expert_data_parallel_world_size()
        elements, size, plain = elements + weight.numel(), size + each.nbytes, plain + weight.nbytes
        sent += each.nbytes * (ranks - 1) / ranks
        plain_sent += weight.nbytes * (ranks - 1) / ranks
    return GatheredWeights(elements, size, plain, round(sent), round(plain_sent))


def _kept_y(config: TransformerConfig) -> str:
    """The start table's line about --activation-func-fp8-input-store; "" if it is not given."""
    if not config.activation_func_fp8_input_store:
        return ""
    # Megatron's SwiGLU, of layers without a recipe for example, obeys the flag where it is fused.
    where = "" if config.bias_activation_fusion else ", where linears compute it"
    return f"SwiGLU's input is kept in float8_e4m3fn for backward{where}; NaN above 464"


def _attention(model: list[MegatronModule]) -> str:
    """The start table's line about attention that runs in slower kernels than the GPU has; "" if
    there is no such attention."""
    modules = (module for chunk in model for module in chunk.modules())
    problem = attention.cudnn_problem()
    if problem is None or not any(isinstance(each, attention.SdpaAttention) for each in modules):
        return ""
    return f"attention does not run in cuDNN's kernels, the fastest here: {problem}; {_CUDNN}"


def _gather(rows: list[Row]) -> list[Row]:
    """The rows of all ranks, without duplicates, sorted by name and number."""
    everyone = {row for part in of_all(rows) for row in part}
    return sorted(everyone, key=lambda row: start_table.kind(row.name))
