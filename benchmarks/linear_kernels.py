"""Times the kernels of one linear of the recipe `tetrajet`, one by one, or of others by name.

    python -m benchmarks.linear_kernels [--recipes dge-occ four-over-six]

It runs forward, dgrad and wgrad, with all operands quantized, under torch's profiler on a GPU, and
says for each kernel how long it takes and how long it would take at least (its floor):

- a kernel that quantizes: the time of a copy of as many bytes as it must read and write;
- a GEMM: its time alone, on operands that were converted to FP8 before;
- a kernel that corrects FP8 elements, for which a row exponent was guessed wrong: zero.

The sum of the floors is the floor of the linear in benchmarks/linear.py. Memory that cuBLASLt sets
to zero before a GEMM counts as time between kernels. Of other recipes the kernels are listed in
their order, with their times alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import linear
from benchmarks.linear import CARRIED, OTHER_SHAPES, PACKED, SHAPES, TOKENS
from benchmarks.timing import BUSY, medians
from benchmarks.training_step_worker import kind, on_gpu
from megatron_fp4 import get_recipe
from tools import pages
from tools.stamp import stamp

RECIPE = "tetrajet"
CALLS = 40
WAIT = "spin_kernel"  # of torch.cuda._sleep
BETWEEN = "between kernels"
KEYS = ("us", "floor us")
MADE = PACKED + CARRIED


class Step(NamedTuple):
    """What one kernel does, its kind, and what it must move: bytes for each element of a matrix."""

    what: str
    kind: str
    matrix: str = ""
    moved: float = 0.0


STEPS = (  # in the order in which they run
    Step("X for fprop", "quantize", "x", 2 + MADE),
    Step("W for fprop", "quantize", "w", 2 + MADE),
    Step("corrections for fprop", "carry"),
    Step("fprop", "gemm"),
    Step("W for dgrad, from codes", "quantize", "w", PACKED + MADE),
    Step("X for wgrad, from codes", "quantize", "x", PACKED + MADE),
    Step("dY for dgrad and wgrad", "quantize", "dy", 2 + 2 * MADE),
    Step("corrections for dgrad", "carry"),
    Step("dgrad", "gemm"),
    Step("corrections for wgrad", "carry"),
    Step("wgrad", "gemm"),
)


class Ran(NamedTuple):
    """A kernel that ran: its name, and when, in microseconds."""

    name: str
    start: float
    end: float


def kernels_of(call: Callable[[], Any]) -> list[list[Ran]]:
    """The kernels of each of CALLS calls, in their order, without memory that is set.

    The host launches them while the GPU is busy, so that none of them waits for the host.
    """
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(CALLS):
            torch.cuda._sleep(BUSY)
            call()
            torch.cuda.synchronize()
    kernels = [
        Ran(event.name, event.time_range.start, event.time_range.end)
        for event in on_gpu(profiler.events())
    ]
    return by_call(kernels)


def by_call(kernels: Sequence[Ran]) -> list[list[Ran]]:
    """Splits the kernels of a profile into those of each call, in their order.

    `kernels_of` launches a kernel that waits (WAIT) before each call. It is left out, and so is
    memory that is set.
    """
    calls: list[list[Ran]] = []
    for kernel in sorted(kernels, key=lambda kernel: kernel.start):
        if WAIT in kernel.name:
            calls.append([])
        elif "memset" not in kernel.name.lower():
            calls[-1].append(kernel)
    return calls


def of_kinds(calls: list[list[Ran]], kinds: Sequence[str]) -> list[list[Ran]]:
    """Returns the calls. Raises ValueError if the kernels of one are not of these kinds, in their
    order. kinds: as of `training_step_worker.kind`.
    """
    for call in calls:
        found = [kind(kernel.name) for kernel in call]
        if found != list(kinds):
            names = [kernel.name[:60] for kernel in call]
            raise ValueError(f"kernels of {list(kinds)} were expected, and {names} ran")
    return calls


def times(calls: Sequence[Sequence[Ran]]) -> list[float]:
    """The median microseconds of each kernel, and last those in which no kernel ran."""
    found = [
        statistics.median(kernel.end - kernel.start for kernel in kernels)
        for kernels in zip(*calls, strict=True)
    ]
    idle = [
        call[-1].end - call[0].start - sum(kernel.end - kernel.start for kernel in call)
        for call in calls
    ]
    return [*found, statistics.median(idle)]


def floors(inputs: int, outputs: int, speed: float, products: Sequence[float]) -> list[float]:
    """The floor of each of STEPS in microseconds.

    speed: of a copy, in bytes a second. products: the microseconds of the three products alone.
    """
    sizes = {"x": TOKENS * inputs, "w": outputs * inputs, "dy": TOKENS * outputs, "": 0}
    alone = iter(products)
    return [
        next(alone) if step.kind == "gemm" else step.moved * sizes[step.matrix] / speed * 1e6
        for step in STEPS
    ]


def study() -> list[dict[str, Any]]:
    """A row for each shape and each of STEPS, and one for the time between the kernels."""
    rows = []
    for inputs, outputs in (*SHAPES, *OTHER_SHAPES):
        p = linear.problem(inputs, outputs)
        there = torch.empty_like(p.dy)
        speed = 4 * p.dy.numel() / medians({"copy": partial(there.copy_, p.dy)})["copy"]
        *products, _ = times(of_kinds(kernels_of(linear.products(p)), ["gemm"] * 3))
        call = linear.quantized(p, get_recipe(RECIPE))
        *taken, idle = times(of_kinds(kernels_of(call), [step.kind for step in STEPS]))
        shape = {"in": inputs, "out": outputs}
        for step, us, floor in zip(
            STEPS, taken, floors(inputs, outputs, speed, products), strict=True
        ):
            rows.append({**shape, "what": step.what, "us": us, "floor us": floor})
        rows.append({**shape, "what": BETWEEN, "us": idle, "floor us": 0.0})
    return rows


def others(recipes: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each of SHAPES, recipe and kernel, in the order in which they run."""
    rows = []
    for (inputs, outputs), name in product(SHAPES, recipes):
        calls = kernels_of(linear.quantized(linear.problem(inputs, outputs), get_recipe(name)))
        *taken, idle = times(calls)
        ran = [kernel.name[:80] for kernel in calls[0]]
        for what, us in zip([*ran, BETWEEN], [*taken, idle], strict=True):
            rows.append({"in": inputs, "out": outputs, "recipe": name, "what": what, "us": us})
    return rows


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The result as a Markdown table: a column for each shape, with the time and its floor."""
    shapes = list(dict.fromkeys((row["in"], row["out"]) for row in rows))
    body = []
    found = {(row["what"], row["in"], row["out"]): row for row in rows}
    for what in dict.fromkeys(row["what"] for row in rows):
        cells = [found[what, *shape] for shape in shapes]
        body.append([what, *map(_cell, cells)])
    sums = [
        {key: sum(row[key] for row in rows if (row["in"], row["out"]) == shape) for key in KEYS}
        for shape in shapes
    ]
    body.append(["sum", *map(_cell, sums)])
    return pages.table(["µs (lower bound)", *(f"{a} × {b}" for a, b in shapes)], body)


def _cell(row: dict[str, Any]) -> str:
    us, floor = (row[key] for key in KEYS)
    return f"{us:.0f} ({floor:.0f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    told = "(benchmarks/results/linear_kernels.json; with --recipes linear_kernels-others.json)"
    parser.add_argument("--out", type=Path, help=told)
    parser.add_argument("--commit", help="where the tree has no git of its own")
    parser.add_argument("--recipes", nargs="+", help="others, whose kernels are only listed")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("kernels are timed on a GPU, and this machine shows none")
    stamped = stamp(args.commit)
    name = f"linear_kernels{'-others' if args.recipes else ''}.json"
    out = args.out or Path("benchmarks/results") / name
    if args.recipes:
        found = others(args.recipes)
        out.write_text(json.dumps({"stamp": stamped, "rows": found}, indent=1) + "\n")
        print("\n".join(json.dumps(row) for row in found))
        return
    rows = study()
    result = {"stamp": stamped, "tokens": TOKENS, "recipe": RECIPE, "rows": rows}
    out.write_text(json.dumps(result, indent=1) + "\n")
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
