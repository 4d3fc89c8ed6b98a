"""Compares the cost model of techniques (megatron_fp4/estimate/costs.py) with measurements.

    python -m benchmarks.technique_costs

It measures nothing: the measurements are committed results of H200s. For each quantize kernel,
linear and training step it has the model's time over the measured one, and for each kind the rank
correlations of the two (Spearman's). Kernels are compared by the time of an element, linears and
steps by their time over BF16's. No Blackwell GPU has been measured.

A training step is that of BF16 as it was measured, and for each linear the difference between the
recipe and BF16, which the model estimates.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from benchmarks import quantize_kernels, te
from benchmarks.estimate_rows import KERNELS, LINEARS, Step, result, steps
from benchmarks.linear import OPTIONS, TOKENS
from benchmarks.quantize_kernels import Made
from megatron_fp4.arithmetic.hadamard import Hadamard
from megatron_fp4.arithmetic.quantizer import get_quantizer
from megatron_fp4.estimate.costs import of_operands
from megatron_fp4.estimate.gpus import MEASURED, Gpu
from megatron_fp4.estimate.overhead import (
    DEVICES,
    Overhead,
    as_it_runs,
    setting_of,
    time_of,
    with_kernels,
)
from megatron_fp4.estimate.plans import BF16, recipe_named
from megatron_fp4.estimate.rates import RATES
from megatron_fp4.makers.base import OperandPlan
from megatron_fp4.recipe import Recipe
from tools import pages
from tools.stamp import stamp

Row = dict[str, Any]
# Linears to which no rate is fitted: of an earlier commit, and of other formats of block scales.
NOT_FITTED = {"linear-fp8": "older linears", "linear-formats": "linears by format"}
FIGURES = {"with kernels": with_kernels, "as it runs": as_it_runs}
SHAPE = (4096, 14336)  # of the table of recipes


def rows() -> list[Row]:
    """A row for each measurement. Each has the measured and the estimated times."""
    return [*_kernels(), *_linears(), *_steps()]


def _kernels() -> Iterator[Row]:
    """Quantize kernels that write no carriers and compute nothing before: ps for an element."""
    for row in result(KERNELS)["rows"]:
        made = quantize_kernels.KERNELS[row["kernel"]]
        if made.carrier is None and not made.computes:
            elements = row["shape"][0] * row["shape"][1]
            yield {
                "kind": "kernels",
                "file": KERNELS,
                "name": f"{row['kernel']}, {row['shape'][0]} × {row['shape'][1]}",
                "measured": row["us"] * 1e6 / elements,
                "with kernels": _of_kernel(made, row["shape"]) * 1e12 / elements,
            }


def _of_kernel(made: Made, shape: list[int]) -> float:
    """Seconds of a kernel by the model; by itself it takes a share of its time in a step."""
    letter = "x" if made.two_draws else "dy"
    hadamard = Hadamard(made.group) if made.group else None
    quantizer = get_quantizer(made.quantizer)
    operands = [
        OperandPlan(
            "wgrad", letter, "model", torch.bfloat16, None, (shape[0], shape[1]), axis, False, "",
            False, hadamard, quantizer, False,
        )
        for axis in made.axes
    ]  # fmt: skip
    found = of_operands(operands, BF16)
    return RATES.alone * sum(time_of(cost.work, MEASURED) for cost in found)


def _linears() -> Iterator[Row]:
    """Linears, forward and backward, with W quantized in each call: times BF16's."""
    for file in (*LINEARS, *NOT_FITTED):
        found = result(file)["rows"]
        plain = {(row["in"], row["out"]): row["ms"] for row in found if row["recipe"] == "bf16"}
        for row in found:
            name, shape = row["recipe"], (row["in"], row["out"])
            if name != "bf16" and name not in te.ROWS:
                yield {
                    "kind": NOT_FITTED.get(file, "linears"),
                    "file": file,
                    "name": f"{name}, {shape[0]} × {shape[1]}",
                    "measured": row["ms"] / plain[shape],
                    **{key: linear(name, key, MEASURED, shape).times_bf16 for key in FIGURES},
                }


def recipe_of(name: str) -> Recipe:
    """The recipe of a row of benchmarks/linear.py."""
    return recipe_named(name.split(":")[0], **OPTIONS.get(name, {}))


@cache
def linear(name: str, figure: str, gpu: Gpu, shape: tuple[int, int] = SHAPE) -> Overhead:
    """The estimate of a linear. figure: a key of FIGURES. shape: in and out."""
    return FIGURES[figure](recipe_of(name), setting_of(gpu, *shape, TOKENS), gpu)


def _steps() -> Iterator[Row]:
    """Training steps on one GPU, without CUDA graphs: times BF16's step of the same result."""
    plain = {step.file: step for step in steps() if step.name == "bf16" and _is_compared(step)}
    for step in steps():
        if step.file in plain and step.name == step.recipe.name != "bf16" and _is_compared(step):
            measured = plain[step.file].row["ms"]
            yield {
                "kind": "steps",
                "file": step.file,
                "name": step.name,
                "measured": step.row["ms"] / measured,
                **{key: 1 + 1e3 * _more(step, key) / measured for key in FIGURES},
            }


def _is_compared(step: Step) -> bool:
    return step.layout.gpus == 1 and not step.layout.graphs


def _more(step: Step, figure: str) -> float:
    """Seconds that the linears of a step take beyond BF16's."""
    model, layout = step.model, step.layout
    tokens, total = layout.micro_batch * model.sequence, 0.0
    for each in model.linears(False):
        setting = setting_of(MEASURED, each.inputs, each.outputs, tokens)
        setting = replace(setting, keeps_w=layout.keeps_w)
        found = FIGURES[figure](step.recipe, setting, MEASURED)
        repeated = found.total - found.once - found.bf16
        total += model.layers * (layout.microbatches * repeated + found.once)
    return total


# --- tables ---------------------------------------------------------------------------------------


def correlation(found: list[Row], figure: str) -> float:
    """Spearman's rank correlation of the measured and the estimated times of rows."""
    measured, estimated = ([row[key] for row in found] for key in ("measured", figure))
    return statistics.correlation(measured, estimated, method="ranked")


def within(found: list[Row], figure: str) -> float:
    """The mean of the rank correlations of rows that were measured together, of one size."""
    together: dict[str, list[Row]] = {}
    for row in found:
        size = row["name"].rpartition(", ")[2] if ", " in row["name"] else ""
        together.setdefault(f"{row['file']} {size}", []).append(row)
    large = [own for own in together.values() if len(own) > 2]
    return statistics.mean(correlation(own, figure) for own in large)


def of_kind(found: list[Row]) -> dict[str, list[Row]]:
    """The rows by their kind."""
    return {
        kind: [row for row in found if row["kind"] == kind]
        for kind in dict.fromkeys(row["kind"] for row in found)
    }


def table(found: list[Row]) -> list[str]:
    """For each kind its rank correlations, and the model's time over the measured one."""
    head = ["measured", "rows", "figure", "rank correlation", "of one size", "model over measured"]
    body = []
    for kind, own in of_kind(found).items():
        for figure in figures(own):
            ratios = sorted(row[figure] / row["measured"] for row in own)
            cells = [kind, str(len(own)), figure]
            cells += [f"{rank(own, figure):.2f}" for rank in (correlation, within)]
            middle = statistics.median(ratios)
            cells.append(f"{ratios[0]:.2f} to {ratios[-1]:.2f}, median {middle:.2f}")
            body.append(cells)
    return pages.table(head, body)


def figures(found: list[Row]) -> list[str]:
    """The figures that rows of one kind have."""
    return [figure for figure in FIGURES if figure in found[0]]


def recipes(found: list[Row]) -> list[str]:
    """Each recipe's linear of SHAPE: times BF16, measured and by the model; with kernels as a
    multiple of its products alone; and with kernels on a B200."""
    head = ["recipe", "measured", "with kernels", "as it runs", "over products"]
    body = []
    size, newest = f"{SHAPE[0]} × {SHAPE[1]}", dict[str, Row]()
    for row in found:
        name, _, shape = row["name"].rpartition(", ")
        if "linears" in row["kind"] and shape == size:
            newest.setdefault(name, row)
    for name, row in sorted(newest.items(), key=lambda item: item[1]["measured"]):
        needs, blackwell = (linear(name, "with kernels", gpu) for gpu in DEVICES.values())
        cells = [name.rpartition("/")[2], *(f"{row[key]:.2f}" for key in ("measured", *FIGURES))]
        cells += [f"{needs.times_products:.2f}", f"{blackwell.times_bf16:.2f}"]
        body.append(cells)
    return pages.table([*head, "B200, not measured"], body)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    default = Path("benchmarks/results/technique_costs.json")
    parser.add_argument("--out", type=Path, default=default)
    parser.add_argument("--commit", help="where the tree has no git of its own")
    args = parser.parse_args()
    found = rows()
    ranks = {
        kind: {figure: correlation(own, figure) for figure in figures(own)}
        for kind, own in of_kind(found).items()
    }
    kept = {"stamp": stamp(args.commit), "rank correlations": ranks, "rows": found}
    args.out.write_text(json.dumps(kept, indent=1) + "\n")
    print("\n".join([*table(found), "", *recipes(found)]))


if __name__ == "__main__":
    main()
