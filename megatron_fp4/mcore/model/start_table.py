"""The table that a training run prints before its first step: what runs each linear's GEMMs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron_fp4.description import describe
from megatron_fp4.plan.data import LinearPlan
from megatron_fp4.plan.sizes import token_tile
from megatron_fp4.plan.words import gemm_words, notes
from megatron_fp4.recipe import GEMMS, Phase, Recipe

LAYERS, EXPERTS = "layers.", "local_experts."  # in a module's name, a number follows these


@dataclass(frozen=True)
class Row:
    """What the table says of one linear.

    name: its global name. local_shape: the shape of W on this rank, as text.
    precision: the name of its recipe, or "high precision".
    gemms: for each of the three GEMMs the operands' formats and the multiplier; empty for a linear
        in high precision.
    notes: which faster kernels and multipliers are not used, and why.
    refusal: why the linear cannot follow its recipe; None if it can.
    after: the share of training after which the recipe holds, of a phase.
    """

    name: str
    local_shape: str
    precision: str
    gemms: tuple[str, ...]
    notes: tuple[str, ...]
    refusal: str | None = None
    after: float = 0.0


def unquantized(name: str, weight: Tensor) -> Row:
    """The row of a linear that stays in high precision."""
    return Row(name, _shape(weight), "high precision", (), ())


def stock(name: str, weight: Tensor, kind: str) -> Row:
    """The row of a linear that no recipe can be given to. kind: the name of its class."""
    return Row(name, _shape(weight), f"none: {kind}", (), ())


def refused(name: str, weight: Tensor, recipe: Recipe, why: str) -> Row:
    """The row of a linear that cannot follow its recipe. why: the refusal."""
    return Row(name, _shape(weight), recipe.name, (), (), why)


def planned(
    name: str, weight: Tensor, plan: LinearPlan, tokens: int, phase: Phase | None = None
) -> Row:
    """The row of a linear that executes `plan`. tokens: see `Setting.tokens`. phase: of whose
    recipe the plan is; None: of the first."""
    gemms = tuple(gemm_words(plan, gemm) for gemm in plan.gemms)
    found, recipe, after = [*notes(plan), *_saved_x(name, plan, tokens)], plan.recipe.name, 0.0
    if phase is not None:
        after, recipe = phase.after, f"{recipe} after {phase.after:.4g}"
        found = [f"{recipe}: {note}" for note in found]
    return Row(name, _shape(weight), recipe, gemms, tuple(found), after=after)


def _saved_x(name: str, plan: LinearPlan, tokens: int) -> list[str]:
    """A note if --fp4-saved-x cannot be followed, or bf16 changes nothing, else []."""
    if plan.wgrad is None:
        return []
    keeps_x = plan.wgrad.b.quantizer is not None and plan.saves_x == "model"
    if not plan.setting.packs_x:
        nothing = (
            f"--fp4-saved-x bf16 changes nothing for {plan.recipe.name}: its backward quantizes no "
            "X itself"
        )
        return [] if keeps_x else [nothing]
    if not keeps_x:
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


def table(recipes: Sequence[Recipe], rows: list[Row]) -> str:
    """The start table: the recipes in words, then one line for each kind of linear.

    A line has the linear's name, its layers, the shape of W on a rank, its recipe, and the formats
    and multiplier of each GEMM. Each phase of a recipe has a line of its own. Notes follow.
    recipes: the launch's recipe, then those that --fp4-module-recipe gives to single modules.
    """
    kinds: dict[tuple[Any, ...], list[tuple[int, int]]] = {}
    for row in rows:
        name, *numbers = kind(row.name)
        gemms = row.gemms or ("high precision",) * len(GEMMS)
        key = (name, row.local_shape, row.after, row.precision, *gemms)
        kinds.setdefault(key, []).append((numbers[0], numbers[1]))
    head = ("linear", "layers", "out x in on a rank", "recipe", *GEMMS)
    cells = []
    for (name, shape, _, *rest), found in sorted(kinds.items()):
        for experts, layers in _alike(found):
            named = name.replace(EXPERTS + "*", f"{EXPERTS}{experts}")
            cells.append((named, layers, shape, *rest))
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
    return "\n".join(line.rstrip() for line in lines)


def _alike(numbers: list[tuple[int, int]]) -> list[tuple[str, str]]:
    """(experts, layers) as ranges of numbers, from the (layer, expert) numbers of a kind of linear.

    Layers that have the same experts are put together. A missing number is -1, as `kind` returns.
    """
    of_layer: dict[int, set[int]] = {}
    for layer, expert in numbers:
        of_layer.setdefault(layer, set()).add(expert)
    layers: dict[str, list[int]] = {}
    for layer, experts in sorted(of_layer.items()):
        layers.setdefault(_ranges(experts), []).append(layer)
    return [(experts, _ranges(found)) for experts, found in layers.items()]


def kind(name: str) -> tuple[str, int, int]:
    """(name with * for the numbers of layer and expert, layer, expert); -1 for a missing number."""
    numbers = []
    for start in (LAYERS, EXPERTS):
        match = re.search(rf"{re.escape(start)}(\d+)", name)
        numbers.append(-1 if match is None else int(match[1]))
        if match is not None:
            name = f"{name[: match.start()]}{start}*{name[match.end() :]}"
    return name, numbers[0], numbers[1]


def _ranges(numbers: Iterable[int]) -> str:
    """The numbers as ranges, for example "0-3,7" for {0, 1, 2, 3, 7}."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)
