"""Tests what the executor in C++ does with a version of Triton that it does not know.

    TRITON_INTERPRET=1 python -m testing.scripts.compare_layouts RECIPE

The executor passes arguments to compiled kernels itself, and so must know in which layout Triton
expects them. This script runs a linear under each of LAYOUTS, some of them unknown to the
executor. It needs no GPU: it pretends that there is a Hopper GPU.

Prints JSON: for each of LAYOUTS what the start table says of the executor, how many forward passes
ran in C++, why some calls stay in Python, and whether all tensors and tallies are those under the
known layout.
"""

from __future__ import annotations

import argparse
import json
import sys
from argparse import Namespace
from importlib import import_module
from typing import Any

import torch

from megatron_fp4.cpp import extension, lowering
from megatron_fp4.cpp.executor import CppExecutor
from megatron_fp4.linear import execute_by
from megatron_fp4.mcore.model import executor
from megatron_fp4.plan.compiler import compile_plan
from megatron_fp4.setting import Setting
from megatron_fp4.target import Target
from testing.builders.small_recipes import small_recipe
from testing.kernels import pretend_gpu
from testing.patching import patched
from testing.scripts.compare_executors import (
    INPUTS,
    MICROBATCHES,
    OUTPUTS,
    STEPS,
    TOKENS,
    Case,
    Found,
    leave_out_flag,
    run,
)
from testing.scripts.pretrain_in_cpp import counting_calls

linears = import_module("megatron_fp4.linear")  # the package has a function of that name
MISTAKEN = "known, a mistake in C++"  # the last one, since it cannot be undone
# The pointers that follow the parameters of kernels: at the start, and when linears run. Up to two
# are known.
LAYOUTS = {"known": (2, 2), "unknown": (3, 3), "unknown later": (2, 3), MISTAKEN: (2, 2)}
HOPPER = Target("cuda", (9, 0), torch.device("cpu"))


def start_on_cpu() -> Any:
    """As `extension.start`, for linears on a CPU."""
    execute_by(CppExecutor(extension.load(), on_cpu=True))
    return extension.load()


def started(recipe: str) -> tuple[list[str], Any]:
    """(the lines of the start table, the monitor's Tallies or None) of a launch on the GPU."""
    flags = {"fp4_executor": "auto", "cuda_graph_impl": "none", "tensor_model_parallel_size": 1}
    launch: Any = Namespace(
        args=Namespace(**flags), monitor=Namespace(from_cpp=None), recipes=[small_recipe(recipe)]
    )
    setting = Setting(
        TOKENS, OUTPUTS, INPUTS, torch.bfloat16, HOPPER, torch.bfloat16, main_grad=torch.float32
    )
    plan = compile_plan(small_recipe(recipe), setting)
    lowering.layout_problem.cache_clear()
    with (
        patched(torch.cuda, "is_available", lambda: True),
        patched(extension, "start", start_on_cpu),
    ):
        made = executor.start(launch, [plan])
        return executor.lines(launch, [made]), launch.monitor.from_cpp


def under(layout: str, recipe: str, calls: list[None]) -> tuple[dict[str, Any], Found]:
    """What is said of a layout, and what a linear computed. calls: those of Python's forward."""
    at_start, later = LAYOUTS[layout]
    pretend_gpu.scratch = at_start
    table, tallies = started(recipe)
    pretend_gpu.scratch = later
    case = Case(recipe, "alone", "packed", fuses=True, has_bias=False, device="cpu")
    calls.clear()
    found = run(case, linears._execute, tallies)
    problems = [kind.problem for kind in found.kinds if kind.problem is not None]
    in_cpp = STEPS * MICROBATCHES - len(calls)
    return {"table": table, "in C++": in_cpp, "problems": problems}, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("recipe")
    args = parser.parse_args()
    pretend_gpu.install()
    calls, results = counting_calls(), {}
    for layout in LAYOUTS:
        if layout == MISTAKEN:
            leave_out_flag(extension.load())
        said, found = under(layout, args.recipe, calls)
        if layout == "known":
            wanted = found
        pairs = zip(found.tensors, wanted.tensors, strict=True)
        equal = all(torch.equal(a, b) for a, b in pairs) and found.tallies == wanted.tallies
        results[layout] = said | {"equal": equal}
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
