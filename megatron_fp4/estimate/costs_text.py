"""The costs of a linear as text."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_fp4.estimate.costs import Cost, costs
from megatron_fp4.estimate.gpus import MEASURED, Gpu
from megatron_fp4.estimate.overhead import Overhead, as_it_runs, plan_of, time_of, with_kernels
from megatron_fp4.plan.words import notes
from megatron_fp4.recipe import Recipe
from megatron_fp4.setting import Setting

_HEAD = ("read MB", "written MB", "G mult-adds", "M words", "kept MB", "sent MB", "µs")
_WIDTH = 13


def text(recipe: Recipe, setting: Setting, gpu: Gpu) -> str:
    """A line for each technique and each GEMM, the time of the linear, and what is not used today.

    Raises ConfigError as `costs` does.
    """
    plan = plan_of(recipe, setting, gpu)
    tokens, _ = setting.shape("x", is_part=False)
    lines = [
        f"recipe {recipe.name}: {setting.inputs} inputs, {setting.outputs} outputs, {tokens} "
        f"tokens, on {gpu.name}: {measured(gpu)}",
        f"{'':10}{'':4}{'':30}{''.join(f'{name:>{_WIDTH}}' for name in _HEAD)}",
        *(_line(cost, gpu) for cost in costs(plan, gpu)),
        _total("with a kernel for each technique", with_kernels(recipe, setting, gpu)),
        _total("as it runs today", as_it_runs(recipe, setting, gpu)),
        *dict.fromkeys(notes(plan)),
    ]
    return "\n".join(lines) + "\n"


def measured(gpu: Gpu) -> str:
    """Whether the rates of a GPU were measured, in words."""
    if gpu == MEASURED:
        return "this project's model, with rates that were measured"
    return (
        f"this project's model. It was never measured there: rates of an {MEASURED.name} are "
        "scaled by data sheets"
    )


def _line(cost: Cost, gpu: Gpu) -> str:
    return f"{cost.gemm:10}{cost.operand:4}{_technique(cost):30}" + "".join(
        f"{number:>{_WIDTH},.1f}" if number else f"{'':{_WIDTH}}" for number in _numbers(cost, gpu)
    )


def _technique(cost: Cost) -> str:
    words = [cost.technique]
    if cost.precision is not None:
        words.append(f"in {cost.precision}")
    return " ".join([*words, *(["once a step"] if cost.once else [])])


def _numbers(cost: Cost, gpu: Gpu) -> Iterator[float]:
    yield cost.read / 1e6
    yield cost.written / 1e6
    yield cost.multiply_adds / 1e9
    yield cost.words / 1e6
    yield (cost.saved + cost.kept) / 1e6
    yield cost.sent / 1e6
    yield 1e6 * time_of(cost.work, gpu)


def _total(what: str, found: Overhead) -> str:
    return (
        f"{what}: {1e3 * found.total:.2f} ms, {found.times_bf16:.2f} of a linear in BF16, "
        f"{found.times_products:.2f} of its products alone"
    )
