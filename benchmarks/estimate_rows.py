"""The committed measurements on H200s, as what megatron_fp4/estimate estimates."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch

from benchmarks import quantize_kernels, te
from benchmarks.linear import TOKENS
from benchmarks.mlp import APART
from benchmarks.parallel_step import LAYOUTS
from benchmarks.training_step import PLAIN
from megatron_fp4 import get_recipe
from megatron_fp4.arithmetic.messages import element_of
from megatron_fp4.arithmetic.moments import FLOAT32, Moments
from megatron_fp4.estimate.amounts import Amounts
from megatron_fp4.estimate.gpus import MEASURED
from megatron_fp4.estimate.layout import Layout
from megatron_fp4.estimate.model import Model
from megatron_fp4.estimate.overhead import plan_of, setting_of
from megatron_fp4.estimate.plans import recipe_named
from megatron_fp4.estimate.work import of_linear, quantize
from megatron_fp4.plan.compiler import compile_plan
from megatron_fp4.recipe import Recipe
from megatron_fp4.setting import KeepsW, Setting, SwigluPlace

RESULTS = Path(__file__).parent / "results"
# Steps of the present kernels, with linears in C++.
CURRENT = ("fused-step-beside", "parallel-two", "parallel-four")
# Steps with torch's kernels outside the linears, and with linears in Python.
BY_TORCH = ("training_step", "training_step-four", "parallel_step")
# Steps on several GPUs, of which some send gradients in few bits.
FEW_BITS = (
    *("few-bits-two", "few-bits-four", "few-bits-bf16"),
    *("few-bits-two-bf16", "few-bits-four-bf16", "few-bits-ddp"),
)
# Steps of other commits, to which no rate is fitted but those of converting gradients.
OTHERS = (
    *("few-bits-one", *FEW_BITS, "parallel-four-upstream", "parallel-two-graphs"),
    *("fused-step", "fused-step-decoded", "fused-step-before", "fp8-step"),
    *("fused-step-others", "parallel-fp8", "parallel-te-beside", "parallel-four-beside"),
    "finalists-step",
    *(f"parallel_step-{when}" for when in ("before", "after", "apart", "graphs")),
)
# Steps of every recipe on one GPU, to which no rate is fitted.
EACH_RECIPE = ("recipes-step",)
# Linears, and quantize kernels, of which those of the first file and of KERNELS are fitted to.
LINEARS = ("linear-te", "linear-rows")
KERNELS = "quantize_kernels-fused"
MANTISSA_SCALES = "linear_kernels-others"
_QUANTIZING = ("top_kernel", "cast_kernel")  # kernels of kernels/blocks.py
# Kinds of kernels outside the linears that results with fused kernels tell apart, beside "other".
OUTSIDE = ("copies", "rotary", "swiglu", "norm", "cross-entropy")


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
    def is_fitted(self) -> bool:
        return self.file not in (*OTHERS, *EACH_RECIPE)

    @property
    def gpu(self) -> dict[str, float]:
        """Measured seconds of the GPU by the kinds of `step.Time`."""
        found = {kind: ms / 1e3 for kind, ms in self.row["gpu_ms"].items()}
        found["quantize"] = found.get("quantize", 0.0) + found.pop("carry", 0.0)
        found["other"] = sum(found.pop(kind, 0.0) for kind in ("other", "gradients", *OUTSIDE))
        return found


@cache
def steps(files: tuple[str, ...] = CURRENT + BY_TORCH + OTHERS + EACH_RECIPE) -> tuple[Step, ...]:
    """The rows of results of training steps."""
    return tuple(
        _step(file, row.get("layout", "one"), row) for file in files for row in result(file)["rows"]
    )


def _step(file: str, layout: str, row: dict[str, Any]) -> Step:
    return Step(file, layout, row["name"], *_setup(result(file), layout, row["name"]), row)


def _setup(found: dict[str, Any], layout_name: str, name: str) -> tuple[Model, Layout, Recipe]:
    """What benchmarks/training_step.py and parallel_step.py ran for a row of a result."""
    flags, words = LAYOUTS[layout_name], name.split()

    def of(flag: str, default: str = "") -> str:
        return words[words.index(flag) + 1] if flag in words else default

    model = Model(
        found["layers"], 4096, 14336, 32, 8, 128, 32000, 4096,
        vocabulary_multiple=1024 // flags.tp,
        fp8_input="--activation-func-fp8-input-store" in name,
    )  # fmt: skip
    layout = Layout(
        flags.gpus, 8, flags.tp, flags.sp, flags.pp,
        micro_batch=found["micro-batch"],
        batch=found["batch"] * flags.dp,
        sharded=flags.dp > 1 and flags.sharded,
        graphs="graph" in name,
        fused_dw="upstream" not in name,
        fused_kernels="liger-kernel" in found["stamp"] and "--fp4-fused-kernels off" not in name,
        keeps_w=cast(KeepsW, of("--fp4-weight-cache", "packed")),
        moments=Moments.read(of("--fp4-optimizer-state", str(FLOAT32))),
        gradients=element_of(of("--fp4-grad-comm") or None, None),
        bf16_gradients="--grad-reduce-in-bf16" in words,
        gathers_codes="--fp4-param-gather" in words,
    )  # fmt: skip
    return model, layout, recipe_named("bf16" if name in PLAIN else words[0])


# --- kernels --------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Timed:
    """A measured linear or kernel: the work, and the seconds it took.

    only: whether a rate is fitted to this row alone, so that nothing predicts it. alone: whether it
    is a kernel without GEMMs beside it; see `Rates.alone`.
    """

    file: str
    name: str
    amounts: Amounts
    seconds: float
    only: bool = False
    alone: bool = False


@cache
def linears() -> tuple[Timed, ...]:
    """This package's linears in LINEARS and in peers.json: forward and backward of 8,192 tokens,
    with W quantized in every call."""
    found = [
        _linear(file, row["in"], row["out"], row["recipe"], row["ms"])
        for file in LINEARS
        for row in result(file)["rows"]
        if row["recipe"] not in te.ROWS
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
    amounts = _of_linear(name, inputs, outputs)
    return Timed(file, f"{inputs} × {outputs}, {name}{beside}", amounts, ms / 1e3)


def _of_linear(name: str, inputs: int, outputs: int, swiglu: SwigluPlace = "") -> Amounts:
    """The work of a linear, forward and backward. name: of the recipe. swiglu: see `Setting`."""
    dtype = torch.bfloat16
    setting = Setting(
        TOKENS, inputs, outputs, dtype, MEASURED.target, dtype,
        main_grad=torch.float32, swiglu=swiglu,
    )  # fmt: skip
    work = of_linear(compile_plan(recipe_named(name), setting), MEASURED)
    amounts = Amounts(work.forward.gpu)
    amounts.add(work.backward.gpu)
    return amounts


@cache
def mlps() -> tuple[Timed, ...]:
    """The MLPs of mlp.json, of recipes whose averages of weights take no time."""
    found = []
    for row in result("mlp")["rows"]:
        name, joins = row["recipe"].removesuffix(APART), not row["recipe"].endswith(APART)
        if recipe_named(name).weight_states:
            continue
        hidden, ffn = row["hidden"], row["ffn"]
        joins = joins and name != "bf16"
        amounts = _of_linear(name, hidden, 2 * ffn, "before" if joins else "")
        amounts.add(_of_linear(name, ffn, hidden, "after" if joins else ""))
        amounts["activation element"] += 0.0 if joins else TOKENS * ffn
        found.append(Timed("mlp", f"{hidden}, {ffn}, {row['recipe']}", amounts, row["ms"] / 1e3))
    return tuple(found)


@cache
def kernels() -> tuple[Timed, ...]:
    """The quantize kernels of KERNELS, and the quantizers of peers.json."""
    rows = result(KERNELS)["rows"]
    # Rule mse has no rate: no recipe takes it by default.
    found = [_kernel(row) for row in rows if not quantize_kernels.KERNELS[row["kernel"]].rule]
    side = float(result("peers")["side"]) ** 2
    [ours], [plain] = (
        next(row["found"] for row in result("peers")["rows"] if row["name"] == name)
        for name in ("to MXFP4", "to NVFP4")
    )
    mxfp4 = Amounts({"byte quantized": side * (2 + 17 / 32), "element rounded to nearest": side})
    nvfp4 = Amounts({"element by PyTorch": side})
    found.append(Timed("peers", "to MXFP4", mxfp4, ours["us"] / 1e6, alone=True))
    return (*found, Timed("peers", "to NVFP4", nvfp4, plain["us"] / 1e6, only=True))


@cache
def mantissa_scales() -> tuple[Timed, ...]:
    """The kernels that quantize under E4M3 block scales in one linear, forward and backward."""
    taken: dict[tuple[int, int, str], float] = {}
    for row in result(MANTISSA_SCALES)["rows"]:
        if row["recipe"] in ("nvfp4-nvidia", "four-over-six") and row["what"] in _QUANTIZING:
            key = row["in"], row["out"], row["recipe"]
            taken[key] = taken.get(key, 0.0) + row["us"] / 1e6
    found = []
    for (inputs, outputs, name), seconds in taken.items():
        plan = plan_of(get_recipe(name), setting_of(MEASURED, inputs, outputs, TOKENS), MEASURED)
        amounts = Amounts()
        for making in (*plan.forward, *plan.backward, *plan.late):
            amounts.add(quantize(making))
        what = f"{inputs} × {outputs}, {name}"
        found.append(Timed(MANTISSA_SCALES, what, amounts, seconds))
    return tuple(found)


def _kernel(row: dict[str, Any]) -> Timed:
    made = quantize_kernels.KERNELS[row["kernel"]]
    elements, count = float(row["shape"][0] * row["shape"][1]), len(made.axes)
    is_stochastic = "-sr" in made.quantizer and not made.group
    amounts = Amounts({"byte quantized": elements * made.bytes})
    kind = "rounded stochastically" if is_stochastic else "rounded to nearest"
    amounts[f"element {'transformed' if made.group else kind}"] = elements * count
    draws = count if made.two_draws else 1
    amounts["element drawn"] = elements * draws if is_stochastic else 0
    amounts["element in a second direction"] = elements * (count - 1)
    amounts["element decoded"] = elements if made.packed else 0
    amounts["element normed"] = elements if made.computes == "norm" else 0
    amounts["element of SwiGLU's gradient"] = elements if made.computes == "gradient" else 0
    amounts["element corrected"] = elements * count if made.carrier else 0
    size = " × ".join(map(str, row["shape"]))
    return Timed(KERNELS, f"{size}, {row['kernel']}", amounts, row["us"] / 1e6, alone=True)
