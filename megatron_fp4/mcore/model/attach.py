"""Gives the linears of a built model their global names and recipes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase

import torch
from megatron.core import parallel_state as mpu
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_fp4.errors import ConfigError
from megatron_fp4.mcore.launch import cuda_graphs
from megatron_fp4.mcore.model import start_table
from megatron_fp4.mcore.model.layers import Fp4ColumnParallelLinear, Fp4RowParallelLinear
from megatron_fp4.mcore.model.run import Run
from megatron_fp4.mcore.model.start_table import Row
from megatron_fp4.plan.memory import held_bytes
from megatron_fp4.recipe import Recipe
from megatron_fp4.streams import check_streams

Fp4Layer = Fp4ColumnParallelLinear | Fp4RowParallelLinear


def attach(run: Run, model: list[MegatronModule]) -> list[MegatronModule]:
    """Attaches recipes to the linears of a built model, and prints the start table on rank 0.

    A pre-wrap hook of Megatron's model builder: every rank calls it with its model chunks, and gets
    them back. Raises ConfigError, on all ranks, if a linear cannot follow its recipe, if no linear
    would follow one, if an --fp4-module-recipe matches no linear, or if two random streams collide.
    """
    found = [linear for chunk in model for linear in _linears(chunk)]
    rows = _gather([_attach_one(run, *linear) for linear in found])
    for glob, _ in run.modules:
        if not any(fnmatchcase(row.name, glob) for row in rows):
            some = ", ".join(sorted({start_table.kind(row.name)[0] for row in rows}))
            raise ConfigError(f"--fp4-module-recipe {glob}: no linear has such a name; try {some}")
    for row in rows:
        if row.refusal is not None:
            raise ConfigError(row.refusal)
    quantized = [row for row in rows if row.gemms]
    if not quantized:
        raise ConfigError(
            f"recipe {run.recipe.name} would quantize no layer: all of them are kept in BF16; "
            "leave out --fp4-module-recipe GLOB=bf16, or lower --num-layers-at-start-in-bf16 or "
            "--num-layers-at-end-in-bf16"
        )
    check_streams(row.name for row in quantized)
    if cuda_graphs.wanted(run.args):
        run.prepare_graphs(len(found), found[0][1].weight.device)
    plans = [layer.plan() for _, layer, _ in found if layer.fp4 is not None]
    held = max(_of_all_ranks(sum(map(held_bytes, plans))))
    states = max(_of_all_ranks(run.weight_states.bytes_of_copies))
    if torch.distributed.get_rank() == 0:
        trains = not getattr(run.args, "skip_train", False)  # a model without a loop has none
        lines = (
            start_table.held(run.keeps_weights, held),
            start_table.states(run.recipes, states, trains),
        )
        print(start_table.table(run.recipes, rows), "".join(lines), flush=True)
    return model


def _linears(chunk: MegatronModule) -> Iterator[tuple[str, Fp4Layer, int | None]]:
    """(global name, linear, number of its decoder layer) for each of this package's linears.

    In module names Megatron numbers the layers of each pipeline stage from 0. Random bits depend on
    the global name, in which layers are numbered over the whole model, also from 0. The number of
    the decoder layer counts from 1. It is None in multi-token prediction, whose layers do not
    belong to the decoder and have numbers of their own.
    """
    layers = {
        prefix: module.layer_number
        for prefix, module in chunk.named_modules()
        if isinstance(module, TransformerLayer) and prefix.startswith("decoder.")
    }
    for name, module in chunk.named_modules():
        if not isinstance(module, Fp4ColumnParallelLinear | Fp4RowParallelLinear):
            continue
        prefix = next((p for p in layers if name.startswith(f"{p}.")), None)
        number = None
        if prefix is not None:
            number = layers[prefix]
            global_prefix = re.sub(r"layers\.\d+$", f"layers.{number - 1}", prefix)
            name = global_prefix + name.removeprefix(prefix)
        yield _with_global_expert(name, chunk.config), module, number


def _with_global_expert(name: str, config: TransformerConfig) -> str:
    """`name` with the expert's number in the whole model; each rank numbers its experts from 0."""
    ranks = mpu.get_expert_model_parallel_world_size()
    if ranks == 1 or ".local_experts." not in name:
        return name
    first = mpu.get_expert_model_parallel_rank() * (config.num_moe_experts // ranks)
    return re.sub(r"(?<=local_experts\.)\d+", lambda found: str(first + int(found[0])), name)


def _attach_one(run: Run, name: str, layer: Fp4Layer, number: int | None) -> Row:
    recipe = _recipe_of(run, name, number)
    if recipe is None:
        return start_table.unquantized(name, layer.weight)
    try:
        layer.attach(name, run, recipe)
    except ConfigError as error:
        return start_table.refused(name, layer.weight, recipe, str(error))
    return start_table.planned(name, layer.weight, layer.plan(), layer.tokens())


def _recipe_of(run: Run, name: str, number: int | None) -> Recipe | None:
    """The recipe of a linear, or None for BF16. name: its global name. number: of its layer.

    The last --fp4-module-recipe that matches the name decides; if none does, it is the launch's
    recipe, or BF16 in the layers that --first-last-layers-bf16 keeps.
    """
    for glob, recipe in reversed(run.modules):
        if fnmatchcase(name, glob):
            return recipe
    return None if _kept_in_bf16(run, number) else run.recipe


def _kept_in_bf16(run: Run, number: int | None) -> bool:
    """Whether --first-last-layers-bf16 keeps this decoder layer in BF16.

    Upstream implements that flag only for Transformer Engine's linears.
    """
    args = run.args
    if number is None or not args.first_last_layers_bf16:
        return False
    last = args.num_layers - args.num_layers_at_end_in_bf16
    return number <= args.num_layers_at_start_in_bf16 or number > last


def _gather(rows: list[Row]) -> list[Row]:
    """The rows of all ranks, without duplicates, sorted by name and number."""
    everyone = {row for part in _of_all_ranks(rows) for row in part}
    return sorted(everyone, key=lambda row: start_table.kind(row.name))


def _of_all_ranks[A](mine: A) -> list[A]:
    found: list[A] = [mine for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather_object(found, mine)
    return found
