"""Transformer Engine's rows of the benchmarks: its linears in BF16, and in FP8 recipes of Hopper.

Transformer Engine is imported in a process of its own (benchmarks/te_worker.py).
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from functools import cache
from pathlib import Path

import torch

BF16 = "te bf16"
FP8 = {  # by the name of the row: Megatron's --fp8-recipe and --fp8-format
    "te fp8 delayed": ("delayed", "hybrid"),
    "te fp8 tensorwise": ("tensorwise", "hybrid"),
    "te fp8 blockwise": ("blockwise", "e4m3"),  # Transformer Engine's own choice for blocks
}
ROWS = (BF16, *FP8)
LAYERS = ["--transformer-impl", "transformer_engine"]
# Where its attention cannot be fused, a launch ends with Transformer Engine's reason. By default it
# would take other kernels, which need more time and memory.
FUSED = ["--attention-backend", "fused"]
RESULT, ERROR = "result: ", "error: "  # before what te_worker.py says
NEEDED = "it needs Transformer Engine and a GPU: pip install 'transformer-engine[pytorch]'"
GRAPHS, EAGER = "graphs", "eager"


def row_and_flags(name: str) -> tuple[str, list[str]]:
    """Splits the name of a row into (row, flags): a recipe or another row of ROWS, and the flags of
    Megatron's launch that may follow it.

    "tetrajet --fp4-weight-cache off" becomes ("tetrajet", ["--fp4-weight-cache", "off"]).
    """
    row, dashes, more = name.partition(" --")
    return row, f"{dashes}{more}".split()


def flags(name: str) -> list[str]:
    """Megatron's flags for one of ROWS."""
    if name not in FP8:
        return LAYERS
    recipe, form = FP8[name]
    return [*LAYERS, "--fp8-format", form, "--fp8-recipe", recipe]


@cache
def tried(name: str) -> str:
    """Runs a small linear of one of ROWS: GRAPHS or EAGER, as it can be timed, or ERROR and why
    there is no such linear on this machine."""
    if importlib.util.find_spec("transformer_engine") is None or not torch.cuda.is_available():
        return ERROR + NEEDED
    command = [sys.executable, "-m", "benchmarks.te_worker", name]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    lines = (done.stdout + done.stderr).splitlines()
    for line in reversed(lines):
        if line.startswith(RESULT):
            return line.removeprefix(RESULT)
        if line.startswith(ERROR):
            return line
    return ERROR + (lines or ["it ended without a word"])[-1]


def present(names: list[str]) -> list[str]:
    """The names of the rows that this machine can measure. Says in one line why another cannot.

    names: of rows, of Transformer Engine or not, with or without further flags (`row_and_flags`).
    """
    found = []
    for name in names:
        row, further = row_and_flags(name)
        needed = row if row in ROWS else BF16 if LAYERS[-1] in further else None
        answer = GRAPHS if needed is None else tried(needed)
        if answer.startswith(ERROR):
            print(f"{name} is left out: {answer.removeprefix(ERROR)}", flush=True)
        else:
            found.append(name)
    return found
