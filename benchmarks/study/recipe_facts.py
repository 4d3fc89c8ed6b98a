"""What docs/recipes.md says of a recipe besides its loss: its words, its speed, and its bits."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from benchmarks.study.committed import RESULTS
from benchmarks.study.entries import BF16, recipe_of
from megatron_fp4 import Recipe
from megatron_fp4.description import describe, place_of
from megatron_fp4.plan.compiler import compile_plan
from megatron_fp4.plan.memory import held_bytes, saved_bytes, sent_bytes
from megatron_fp4.plan.owned_codes import reader_of_w
from megatron_fp4.setting import Setting
from megatron_fp4.target import gpu_named

# Of steps on one H200, all in one run.
STEPS = "recipes-step"
LINEARS = "linear-formats"
# The linear and the device that bits are counted for.
SETTING = Setting(
    8192, 4096, 4096, torch.bfloat16, gpu_named("sm_90"), torch.bfloat16,
    main_grad=torch.float32, keeps_w="packed",
)  # fmt: skip


@dataclass(frozen=True)
class Speed:
    """The measured speed of a training step.

    ratio: the time of BF16's step in the same file, divided by the time of this step. tokens:
    tokens per second. peak: the largest memory that was allocated, in GiB. by_phases: True if the
    recipe has phases; each was measured by itself. The time is their mean, weighted by the share of
    training that each phase takes, and the peak is that of the phase with the largest.
    """

    ratio: float
    tokens: float
    peak: float
    by_phases: bool


@dataclass(frozen=True)
class Bits:
    """What a linear keeps and sends, in bits an element of X or W.

    saved: X, for the backward pass. held: W's operands, over a step, besides W. sent: W, when
    data-parallel ranks gather it (--fp4-param-gather where the recipe allows it, else BF16).
    """

    saved: float
    held: float
    sent: float


def words(recipe: Recipe) -> list[str]:
    """[fprop, dgrad, wgrad, all else]: how the operands are quantized, by `describe`."""
    lines = [line.strip() for line in describe(replace(recipe, phases=(), layers=()))[1:]]
    gemms, others = lines[:3], lines[3:]
    others += [f"{place_of(each)}: `{each.recipe.name}`" for each in recipe.layers]
    others += [f"after {p.after:.4g} of training: `{p.recipe.name}`" for p in recipe.phases]
    return [*(line.partition(": ")[2] for line in gemms), "; ".join(others)]


def bits(recipe: Recipe) -> Bits:
    """The bits of one recipe, without regard to its phases and layers but for what is sent."""
    elements = SETTING.inputs * SETTING.outputs
    plan = compile_plan(recipe, SETTING)
    plain = 8.0 * SETTING.dtype.itemsize
    sent = plain
    if recipe.quantized and reader_of_w(recipe) is None:
        sent = 8 * sent_bytes(compile_plan(recipe, replace(SETTING, sent_w=True))) / elements
    saved = 8 * saved_bytes(plan) / (SETTING.tokens * SETTING.inputs)
    return Bits(saved, 8 * held_bytes(plan) / elements, sent)


def step_of(name: str, recipe: Recipe) -> Speed | None:
    """The speed of a training step with this recipe, from the result file STEPS.

    name: of the recipe's row in the file. It is not read for a recipe with phases: such a recipe
    has no row, and its speed is computed from the rows of its phases (see `Speed`). Returns None
    if the file has no row for the recipe, or none for one of its phases.
    """
    rows = _rows()
    bf16 = rows[BF16]
    if not recipe.phases:
        own = rows.get(name)
        if own is None:
            return None
        return Speed(bf16["ms"] / own["ms"], own["tokens/s"], own["peak_gib"], by_phases=False)
    found = [_row_of(each) for each in recipe.alone]
    measured = [row for row in found if row is not None]
    if len(measured) < len(found):
        return None
    ms = sum(share * row["ms"] for share, row in zip(recipe.shares, measured, strict=True))
    ratio, peak = bf16["ms"] / ms, max(row["peak_gib"] for row in measured)
    return Speed(ratio, ratio * bf16["tokens/s"], peak, by_phases=True)


def linear_of(name: str) -> tuple[float, float] | None:
    """(lowest, highest) speed of a linear with this recipe over the shapes that the result file
    LINEARS has, as a multiple of BF16's speed. None if the file has no row of the recipe.

    name: as the file's rows have it, a recipe's name or the path of a recipe file.
    """
    ratios = [row["ratio"] for row in _result(LINEARS)["rows"] if row["recipe"] == name]
    return (min(ratios), max(ratios)) if ratios else None


def _row_of(recipe: Recipe) -> Any | None:
    """The row of the result file STEPS of a recipe that equals `recipe` in all but its name. None
    if there is none."""
    for name, row in _rows().items():
        if name != BF16 and _alike(recipe_of(name), recipe):
            return row
    return None


def _alike(one: Recipe, other: Recipe) -> bool:
    """Whether two recipes do the same, by whatever name."""
    return replace(one, name="", paper="") == replace(other, name="", paper="")


def _rows() -> dict[str, Any]:
    """The rows of the result file STEPS, by the recipe or recipe file that was measured."""
    return {row["name"]: row for row in _result(STEPS)["rows"]}


@cache
def _result(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())
