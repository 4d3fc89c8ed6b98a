"""What a training run prints before its first step: what each linear does, on what."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from megatron_fp4.description import describe
from megatron_fp4.plan.data import LinearPlan
from megatron_fp4.plan.sizes import token_tile
from megatron_fp4.plan.words import gemm_words, notes
from megatron_fp4.recipe import GEMMS, Recipe

LAYERS, EXPERTS = "layers.", "local_experts."  # what a number follows in a module's name


@dataclass(frozen=True)
class Row:
    """One linear of the table.

    local_shape: of W on this rank. precision: its recipe. gemms: what each of the three GEMMs
    multiplies, on what; empty for a linear in high precision. notes: what is not used, and why.
    refusal: why the linear cannot follow its recipe; None where it can.
    """

    name: str
    local_shape: str
    precision: str
    gemms: tuple[str, ...]
    notes: tuple[str, ...]
    refusal: str | None = None


def unquantized(name: str, weight: Tensor) -> Row:
    """The row of a linear that stays in high precision."""
    return Row(name, _shape(weight), "high precision", (), ())


def refused(name: str, weight: Tensor, recipe: Recipe, why: str) -> Row:
    """The row of a linear that cannot follow its recipe."""
    return Row(name, _shape(weight), recipe.name, (), (), why)


def planned(name: str, weight: Tensor, plan: LinearPlan, tokens: int) -> Row:
    """The row of a linear that follows a plan for so many tokens; see `Setting.tokens`."""
    gemms = tuple(gemm_words(plan, gemm) for gemm in plan.gemms)
    found = [*notes(plan), *_unpacked_x(name, plan, tokens)]
    return Row(name, _shape(weight), plan.recipe.name, gemms, tuple(found))


def _unpacked_x(name: str, plan: LinearPlan, tokens: int) -> list[str]:
    """The note about X that backward keeps in high precision though it was to be packed."""
    wanted = plan.setting.packs_x and plan.wgrad is not None and plan.wgrad.b.quantizer is not None
    if not wanted or plan.saves_x != "model":
        return []
    if plan.setting.has_part("dy"):
        tokens *= plan.setting.sharding.ranks
    linear, tile = name.rpartition(".")[2], token_tile(plan.recipe, "wgrad", "x")
    return [
        f"X of {linear} is kept in BF16 for backward: {tokens} tokens on a rank are not a "
        f"multiple of {tile}"
    ]


def _shape(weight: Tensor) -> str:
    return " x ".join(map(str, weight.shape))


def held(keeps: str | None, size: int) -> str:
    """The line about what is kept of weights over a step: `size` bytes on the fullest rank."""
    if keeps is None:
        return "\n  weights are quantized for each microbatch anew"
    return f"\n  weights are quantized once a step and kept {keeps}: {_size(size)} on a rank"


def states(recipes: Sequence[Recipe], size: int) -> str:
    """The line about state beside weights, whose copies take `size` bytes on the fullest rank."""
    names = sorted({name for recipe in recipes for name in recipe.weight_states})
    if not names:
        return ""
    return (
        f"\n  {' and '.join(names)} of each weight in float32: copies of {_size(size)} on a rank, "
        "and as much as optimizer state, sharded like it"
    )


def _size(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB" if size >= 2**20 else f"{size / 2**10:,.1f} KiB"


def table(recipes: Sequence[Recipe], rows: list[Row]) -> str:
    """What runs: the recipes in words, and a line for each kind of linear with layers, local shape,
    recipe and backends. recipes: the launch's, then those that some modules have."""
    kinds: dict[tuple[str, ...], list[tuple[int, int]]] = {}
    for row in rows:
        name, *numbers = kind(row.name)
        gemms = row.gemms or ("high precision",) * len(GEMMS)
        key = (name, row.local_shape, row.precision, *gemms)
        kinds.setdefault(key, []).append((numbers[0], numbers[1]))
    head = ("linear", "layers", "out x in on a rank", "recipe", *GEMMS)
    cells = []
    for (name, *rest), found in sorted(kinds.items()):
        for experts, layers in _alike(found):
            named = name.replace(EXPERTS + "*", f"{EXPERTS}{experts}")
            cells.append((named, layers, *rest))
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
    lines += sorted({f"  {note}" for row in rows for note in row.notes})
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


def kind(name: str) -> tuple[str, int, int]:
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
