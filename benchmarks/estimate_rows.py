"""The committed measurements on H200s, as what megatron_fp4/estimate estimates."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from benchmarks.parallel_step import LAYOUTS
from benchmarks.training_step import PLAIN
from megatron_fp4.estimate.amounts import Amounts
from megatron_fp4.estimate.gpus import MEASURED
from megatron_fp4.estimate.layout import Layout
from megatron_fp4.estimate.model import Model
from megatron_fp4.estimate.plans import recipe_named
from megatron_fp4.estimate.work import of_linear
from megatron_fp4.plan.compiler import compile_plan
from megatron_fp4.plan.setting import Setting
from megatron_fp4.recipe import Recipe

RESULTS = Path(__file__).parent / "results"
# Steps with fused kernels, of which only the memory is compared: no rate is fitted to them.
FUSED = ("fused-step",)
STEPS = ("training_step", "training_step-four", "parallel_step")
# Measured at earlier commits, when the host took longer to launch a linear.
EARLIER = tuple(f"parallel_step-{when}" for when in ("before", "after", "apart", "graphs"))
# Kinds of kernels outside the linears that later results tell apart; `step.Time` does not.
_OUTSIDE = ("copies", "rotary", "swiglu", "norm", "cross-entropy")


@cache
def result(name: str) -> Any:
    """A committed result, by the name of its file."""
    return json.loads((RESULTS / f"{name}.json").read_text())


# --- steps ----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Step:
    """A measured step. file: its result. layout_name: as in benchmarks/parallel_step.py."""

    file: str
    layout_name: str
    name: str
    model: Model
    layout: Layout
    recipe: Recipe
    row: dict[str, Any]

    @property
    def is_earlier(self) -> bool:
        return self.file in EARLIER

    @property
    def gpu(self) -> dict[str, float]:
        """Measured seconds of the GPU by the kinds of `step.Time`."""
        found = {kind: ms / 1e3 for kind, ms in self.row["gpu_ms"].items()}
        found["quantize"] = found.get("quantize", 0.0) + found.pop("carry", 0.0)
        found["other"] = sum(found.pop(kind, 0.0) for kind in ("other", *_OUTSIDE))
        return found


@cache
def steps(files: tuple[str, ...] = STEPS + EARLIER) -> tuple[Step, ...]:
    """The rows of results of training steps."""
    rows = [(file, row) for file in files for row in result(file)["rows"]]
    return tuple(_step(file, row.get("layout", "one"), row) for file, row in rows)


def _step(file: str, layout: str, row: dict[str, Any]) -> Step:
    is_fused = file in FUSED
    setup = _setup(result(file), layout, row["name"], is_fused)
    return Step(file, layout, row["name"], *setup, row)


def _setup(
    found: dict[str, Any], layout_name: str, name: str, is_fused: bool
) -> tuple[Model, Layout, Recipe]:
    """What benchmarks/training_step.py and parallel_step.py ran for a row.

    is_fused: whether with fused kernels around the linears.
    """
    flags = LAYOUTS[layout_name]
    model = Model(
        found["layers"], 4096, 14336, 32, 8, 128, 32000, 4096,
        vocabulary_multiple=1024 // flags.tp,
        fp8_input="--activation-func-fp8-input-store" in name,
    )  # fmt: skip
    layout = Layout(
        flags.gpus, 8, flags.tp, flags.sp, flags.pp,
        micro_batch=found["micro-batch"],
        batch=found["batch"] * flags.dp,
        sharded=flags.dp > 1,
        graphs="graph" in name,
        fused_dw="upstream" not in name,
        fused_kernels=is_fused,
        keeps_w="fprop" if "--fp4-weight-cache fprop" in name else "packed",
    )  # fmt: skip
    return model, layout, recipe_named("bf16" if name in PLAIN else name.split()[0])


# --- kernels --------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Timed:
    """A measured linear or kernel: the work, and the seconds it took.

    only: whether a rate is fitted to this row alone, so that nothing predicts it.
    """

    file: str
    name: str
    amounts: Amounts
    seconds: float
    only: bool = False


@cache
def linears() -> tuple[Timed, ...]:
    """The linears of linear.json, and this package's in peers.json: forward and backward of 8,192
    tokens, with W quantized in every call."""
    found = [
        _linear("linear", row["in"], row["out"], row["recipe"], row["ms"])
        for row in result("linear")["rows"]
    ]
    for row in result("peers")["rows"]:
        if row["name"] not in ("tetrajet", "mxfp4"):
            continue
        for each in row["found"]:
            shape = each["in"], each["out"]
            found.append(_linear("peers", *shape, row["name"], each["ms"]))
            beside = f" beside {row['name']}"
            found.append(_linear("peers", *shape, "bf16", each["bf16 ms"], beside))
    return tuple(found)


def _linear(file: str, inputs: int, outputs: int, name: str, ms: float, beside: str = "") -> Timed:
    recipe, _, option = name.partition(":")
    made = recipe_named(recipe, **({"forward": option} if option else {}))
    dtype = torch.bfloat16
    setting = Setting(8192, inputs, outputs, dtype, MEASURED.target, dtype)
    work = of_linear(compile_plan(made, replace(setting, main_grad=torch.float32)), MEASURED)
    amounts = Amounts(work.forward.gpu)
    amounts.add(work.backward.gpu)
    return Timed(file, f"{inputs} × {outputs}, {name}{beside}", amounts, ms / 1e3)


@cache
def kernels() -> tuple[Timed, ...]:
    """The quantize kernels of quantize_kernels.json, and the quantizers of peers.json."""
    from benchmarks.quantize_kernels import KERNELS

    found = []
    for file in ("quantize_kernels", "quantize_kernels-in-memory"):
        for row in result(file)["rows"]:
            made = KERNELS[row["kernel"].replace("across", "along columns")]
            elements, count = float(row["shape"][0] * row["shape"][1]), len(made.axes)
            kind = "rounded stochastically" if "-sr" in made.quantizer else "rounded to nearest"
            amounts = Amounts({"byte quantized": elements * made.bytes})
            amounts[f"element {'transformed' if made.group else kind}"] = elements * count
            amounts["element in a second direction"] = elements * (count - 1)
            amounts["element decoded"] = elements if made.packed else 0
            amounts["element corrected"] = elements * count if made.carrier else 0
            size = " × ".join(map(str, row["shape"]))
            found.append(Timed(file, f"{size}, {row['kernel']}", amounts, row["us"] / 1e6))
    side = float(result("peers")["side"]) ** 2
    [ours], [plain] = (
        next(row["found"] for row in result("peers")["rows"] if row["name"] == name)
        for name in ("to MXFP4", "to NVFP4")
    )
    mxfp4 = Amounts({"byte quantized": side * (2 + 17 / 32), "element rounded to nearest": side})
    nvfp4 = Amounts({"element by PyTorch": side})
    found.append(Timed("peers", "to MXFP4", mxfp4, ours["us"] / 1e6))
    return (*found, Timed("peers", "to NVFP4", nvfp4, plain["us"] / 1e6, only=True))
