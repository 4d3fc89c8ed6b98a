"""How far Y of real linears is off, by how fprop quantizes X and W.

    python -m benchmarks.forward_errors

X and W of eight linears of a small LLaMA after some training (tools/sweep/tensors.py). The error is
||Y - Y0||^2 / ||Y0||^2, Y0 being the product of the BF16 tensors in float64: the noise that the
forward pass adds to what the linear computes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from megatron_fp4 import GemmRecipe, Quantizer, Recipe, get_quantizer, get_recipe, linear
from megatron_fp4.arithmetic.hadamard import Hadamard
from megatron_fp4.arithmetic.hot_channels import HotChannels
from megatron_fp4.plan.compiler import compile_plan
from megatron_fp4.setting import Setting
from megatron_fp4.target import Target
from tools import pages
from tools.stamp import stamp
from tools.sweep import tensors

HOPPER = Target("cuda", (9, 0))
Row = dict[str, Any]


def alike(quantizer: Quantizer, **fields: Any) -> Recipe:
    """A recipe whose fprop quantizes X and W so, and which has no other GEMM."""
    return Recipe("case", fprop=GemmRecipe(quantizer, quantizer), **fields)


_CEIL, _MSE = Quantizer(rule="ceil"), Quantizer(rule="mse", block=(1, 16))
_FP8 = Quantizer(scale="ue5m3", rule="mse-fp8", block=(1, 16))
_HOT = HotChannels()
CASES = {
    "E8M0, `ceil`, 32 (`tetrajet`)": alike(_CEIL),
    "E8M0, `mse`, 16": alike(_MSE),
    "E8M0, `mse`, 16, Hadamard 32": replace(
        alike(_MSE), fprop=GemmRecipe(_MSE, _MSE, Hadamard(32, "fixed"))
    ),
    "E8M0, `ceil`, 32, hot channels": alike(_CEIL, outliers=_HOT),
    "UE5M3, `mse-fp8`, 32": alike(replace(_FP8, block=(1, 32))),
    "UE5M3, `mse-fp8`, 16": alike(_FP8),
    "UE5M3, `mse-fp8`, 16, hot channels": alike(_FP8, outliers=_HOT),
    "UE5M3, `mse-fp8`, 16, without the mean": alike(_FP8, x_mean="subtracted"),
    "NVFP4": alike(get_quantizer("nvfp4")),
    "NVFP4, `four-over-six`": alike(get_quantizer("nvfp4-four-over-six")),
    "`fp8`": replace(get_recipe("fp8"), dgrad=GemmRecipe(), wgrad=GemmRecipe()),
}


def multiplied(recipe: Recipe) -> str:
    """What Hopper's tensor cores multiply fprop in."""
    plan = compile_plan(recipe, Setting(256, 256, 256, torch.bfloat16, HOPPER, torch.bfloat16))
    return "FP8" if plan.fprop.multiplier.name == "hopper" else "BF16"


def errors(recipe: Recipe, recorded: list[tensors.Recorded]) -> dict[str, float]:
    """The squared relative error of Y by linear."""
    found = {}
    for each in recorded:
        exact = each.products()["y"]
        off = linear(each.x, each.weight, recipe=recipe).double() - exact
        found[each.name] = float((off.norm() / exact.norm()) ** 2)
    return found


def study(recorded: list[tensors.Recorded]) -> Iterator[Row]:
    """Quantizes each linear in the ways of CASES. Yields a row for each way: its name, what Hopper
    multiplies it in, and the errors by linear."""
    for name, recipe in CASES.items():
        yield {
            "case": name, "multiplied": multiplied(recipe), "errors": errors(recipe, recorded)
        }  # fmt: skip


def total(row: Row) -> float:
    """The mean error of the linears."""
    return mean(row["errors"].values())


def table(rows: list[Row]) -> list[str]:
    """The result as a Markdown table, in thousandths."""
    kinds = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
    body = []
    for row in rows:
        each = [mean(e for n, e in row["errors"].items() if n.endswith(kind)) for kind in kinds]
        numbers = [f"{1000 * value:.2f}" for value in (total(row), *each)]
        body.append([row["case"], *numbers, row["multiplied"]])
    return pages.table(["X and W", "mean", *kinds, "Hopper"], body)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/forward_errors.json"))
    parser.add_argument("--work", type=Path, default=Path("runs/sweep"), help="recorded tensors")
    parser.add_argument("--commit", help="where the tree has no git of its own")
    args = parser.parse_args()
    torch.set_num_threads(1)
    path = tensors.record(args.work.resolve())
    rows = list(study(tensors.read(path)))
    result = {"stamp": stamp(args.commit), "tensors": tensors.digest(path), "rows": rows}
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
