"""Gives the linears of a built model their global names and the recipe, and says what will run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from megatron.core import parallel_state as mpu
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_fp4.backends import choose, kernels_problem
from megatron_fp4.description import describe
from megatron_fp4.errors import ConfigError
from megatron_fp4.mcore import graphs
from megatron_fp4.mcore.layers import Fp4ColumnParallelLinear, Fp4RowParallelLinear
from megatron_fp4.mcore.run import Run
from megatron_fp4.recipe import GEMMS, Recipe
from megatron_fp4.streams import check_streams
from megatron_fp4.weights import kept_bytes

Fp4Layer = Fp4ColumnParallelLinear | Fp4RowParallelLinear
LAYERS, EXPERTS = "layers.", "local_experts."  # what a number follows in a module's name


@dataclass(frozen=True)
class Row:
    """One linear of the start table. `refusal` is why it cannot follow the recipe, if it cannot."""

    name: str
    local_shape: str
    precision: str
    backends: tuple[str, ...]
    passed_over: tuple[str, ...]
    refusal: str | None = None


def attach(run: Run, model: list[MegatronModule]) -> list[MegatronModule]:
    """A pre-wrap hook of Megatron's model builder: every rank calls it with its chunks.

    Raises ConfigError, on every rank alike, where a linear cannot follow the recipe, where none
    would, or where two noise streams collide.
    """
    found = [linear for chunk in model for linear in _linears(chunk)]
    rows = _gather([_attach_one(run, *linear) for linear in found])
    for glob, _ in run.modules:
        if not any(fnmatchcase(row.name, glob) for row in rows):
            some = ", ".join(sorted({_kind(row.name)[0] for row in rows}))
            raise ConfigError(f"--fp4-module-recipe {glob}: no linear has such a name; try {some}")
    for row in rows:
        if row.refusal is not None:
            raise ConfigError(row.refusal)
    quantized = [row for row in rows if row.backends]
    if not quantized:
        raise ConfigError(
            f"recipe {run.recipe.name} would quantize no layer: all of them are kept in BF16; "
            "leave out --fp4-module-recipe GLOB=bf16, or lower --num-layers-at-start-in-bf16 or "
            "--num-layers-at-end-in-bf16"
        )
    check_streams(row.name for row in quantized)
    if graphs.wanted(run.args):
        run.prepare_graphs(len(found), found[0][1].weight.device)
    linears = [linear for _, linear, _ in found]
    most = max(_of_all_ranks(_kept_bytes(run, linears)))
    if torch.distributed.get_rank() == 0:
        print(table(run.recipes, rows), _kept(run, most), unpacked_x(run, linears), flush=True)
    return model


def _kept_bytes(run: Run, linears: list[Fp4Layer]) -> int:
    """What the weights' operands take on this rank."""
    return sum(
        kept_bytes(
            layer.weight,
            layer.fp4.recipe,
            layer.config.params_dtype,
            run.keeps_weights == "decoded",
        )
        for layer in linears
        if layer.fp4 is not None
    )


def _kept(run: Run, most: int) -> str:
    if run.keeps_weights is None:
        return "\n  weights are quantized for each microbatch anew"
    size = f"{most / 2**20:,.1f} MiB" if most >= 2**20 else f"{most / 2**10:,.1f} KiB"
    return f"\n  weights are quantized once a step and kept {run.keeps_weights}: {size} on a rank"


def unpacked_x(run: Run, linears: Iterable[Fp4Layer]) -> str:
    """A line for X that backward keeps in BF16 though it was to be packed."""
    for layer in linears:
        state = layer.fp4
        if state is None or state.is_expert or not run.packs_x:
            continue
        parts = state.parallel.size if state.parallel and state.parallel.tokens == "x" else 1
        tokens = run.args.micro_batch_size * run.args.seq_length // parts
        if state.recipe.packs_x(0) and not state.recipe.packs_x(tokens):
            return (
                f"\n  X is kept in BF16, as in {state.name}: {tokens} tokens on a rank are not a "
                f"multiple of {state.recipe.token_tile('wgrad', 'x')}"
            )
    return ""


def table(recipes: Sequence[Recipe], rows: list[Row]) -> str:
    """What runs: the recipes in words, and a line for each kind of linear with layers, local shape,
    recipe and backends. recipes: the launch's, then those that some modules have."""
    kinds: dict[tuple[str, ...], list[tuple[int, int]]] = {}
    for row in rows:
        kind, *numbers = _kind(row.name)
        gemms = row.backends or ("high precision",) * len(GEMMS)
        key = (kind, row.local_shape, row.precision, *gemms)
        kinds.setdefault(key, []).append((numbers[0], numbers[1]))
    head = ("linear", "layers", "out x in on a rank", "recipe", *GEMMS)
    cells = []
    for (kind, *rest), found in sorted(kinds.items()):
        for experts, layers in _alike(found):
            name = kind.replace(EXPERTS + "*", f"{EXPERTS}{experts}")
            cells.append((name, layers, *rest))
    widths = [max(len(line[i]) for line in [head, *cells]) for i in range(len(head))]
    words = [f"  {line}" for recipe in dict.fromkeys(recipes) for line in describe(recipe)]
    lines = [
        f"megatron-fp4: {words[0].strip()}",
        *words[1:],
        *(
            "  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
            for line in [head, *cells]
        ),
        "  embedding, head, norms, attention scores: high precision",
    ]
    lines += sorted({f"  not used: {reason}" for row in rows for reason in row.passed_over})
    lines += sorted({line for recipe in recipes for line in _schedule(recipe)})
    return "\n".join(line.rstrip() for line in lines)


def _alike(numbers: list[tuple[int, int]]) -> list[tuple[str, str]]:
    """(experts, layers) of (layer, expert): the layers that have the same experts together."""
    of_layer: dict[int, set[int]] = {}
    for layer, expert in numbers:
        of_layer.setdefault(layer, set()).add(expert)
    layers: dict[str, list[int]] = {}
    for layer, experts in sorted(of_layer.items()):
        layers.setdefault(_ranges(experts), []).append(layer)
    return [(experts, _ranges(found)) for experts, found in layers.items()]


def _schedule(recipe: Recipe) -> list[str]:
    if recipe.bf16_after is None:
        return []
    gemms, share = ", ".join(recipe.bf16_gemms), f"{recipe.bf16_after:.4g}"
    return [f"  {recipe.name}: {gemms} return to high precision after {share} of training"]


def _linears(chunk: MegatronModule) -> Iterator[tuple[str, Fp4Layer, int | None]]:
    """(global name, linear, number of its decoder layer from 1) of this package's linears.

    Megatron numbers a stage's layers from 0; names that noise hangs on count over the model. The
    layers of multi-token prediction are numbered by themselves and are none of the decoder's.
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
    """Counts an expert over the expert-parallel ranks; each rank numbers its own from 0."""
    ranks = mpu.get_expert_model_parallel_world_size()
    if ranks == 1 or ".local_experts." not in name:
        return name
    first = mpu.get_expert_model_parallel_rank() * (config.num_moe_experts // ranks)
    return re.sub(r"(?<=local_experts\.)\d+", lambda found: str(first + int(found[0])), name)


def _attach_one(run: Run, name: str, layer: Fp4Layer, number: int | None) -> Row:
    shape = " x ".join(map(str, layer.weight.shape))
    recipe = _recipe_of(run, name, number)
    if recipe is None:
        return Row(name, shape, "high precision", (), ())
    try:
        layer.attach(name, run, recipe)
    except ConfigError as error:
        return Row(name, shape, recipe.name, (), (), refusal=str(error))
    dtype = layer.config.params_dtype
    device = layer.weight.device
    choices = [choose(recipe.multiplied(gemm), device, dtype) for gemm in GEMMS]
    passed_over = [f"{who}: {why}" for choice in choices for who, why in choice.passed_over]
    if (problem := kernels_problem(layer.weight.device)) is not None:
        passed_over.append(f"kernels: {problem}")
    return Row(
        name,
        shape,
        recipe.name,
        tuple(
            _describe(recipe, gemm, choice.backend.name)
            for gemm, choice in zip(GEMMS, choices, strict=True)
        ),
        tuple(passed_over),
    )


def _describe(recipe: Recipe, gemm: str, backend: str) -> str:
    """Both operands' element formats and who multiplies them, as in "e2m1 x e2m1 on bf16"."""
    wanted = recipe.gemm(gemm)
    if not wanted.quantized:
        return "high precision"
    elements = [q.element if q is not None else "high" for q in (wanted.a, wanted.b)]
    if gemm != "fprop" and wanted.b is None and recipe.backward == "forward":
        forward = recipe.fprop.b if gemm == "dgrad" else recipe.fprop.a
        elements[1] = forward.element if forward is not None else "high"
    return f"{' x '.join(elements)} on {backend}"


def _recipe_of(run: Run, name: str, number: int | None) -> Recipe | None:
    """What a linear follows, None for BF16; its own glob counts more than its layer's place."""
    for glob, recipe in reversed(run.modules):
        if fnmatchcase(name, glob):
            return recipe
    return None if _kept_in_bf16(run, number) else run.recipe


def _kept_in_bf16(run: Run, number: int | None) -> bool:
    """Upstream's --first-last-layers-bf16, which acts in Transformer Engine's context alone."""
    args = run.args
    if number is None or not args.first_last_layers_bf16:
        return False
    last = args.num_layers - args.num_layers_at_end_in_bf16
    return number <= args.num_layers_at_start_in_bf16 or number > last


def _gather(rows: list[Row]) -> list[Row]:
    """Every rank's rows, each once, in the order of their names."""
    everyone = {row for part in _of_all_ranks(rows) for row in part}
    return sorted(everyone, key=lambda row: _kind(row.name))


def _of_all_ranks[A](mine: A) -> list[A]:
    found: list[A] = [mine for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather_object(found, mine)
    return found


def _kind(name: str) -> tuple[str, int, int]:
    """(name with the numbers of layer and expert left open, those numbers; -1 where none is)."""
    numbers = []
    for start in (LAYERS, EXPERTS):
        match = re.search(rf"{re.escape(start)}(\d+)", name)
        numbers.append(-1 if match is None else int(match[1]))
        if match is not None:
            name = f"{name[: match.start()]}{start}*{name[match.end() :]}"
    return name, numbers[0], numbers[1]


def _ranges(numbers: Iterable[int]) -> str:
    """0-3,7 of {0, 1, 2, 3, 7}."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)
