"""Times a small linear, forward and backward, which takes the host longer than the GPU.

    python -m benchmarks.host_linear

Gives the time of a call by the clock, and the number of Python calls that it takes (cProfile), for
each recipe and for BF16.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.timing import host_medians
from megatron_fp4 import get_recipe, linear
from megatron_fp4.recipes import uniform_recipes
from tools import pages
from tools.stamp import stamp

SIZE = 512  # tokens, inputs and outputs
WARM_UP = 20


def step_of(recipe: str | None) -> Callable[[], None]:
    """A function that runs a forward and a backward pass of a linear, after WARM_UP passes.

    recipe: its name; None is torch's linear in BF16.
    """
    x, w, dy = (torch.randn(SIZE, SIZE, device="cuda").bfloat16() for _ in range(3))
    x.requires_grad_()
    w.requires_grad_()
    found = None if recipe is None else get_recipe(recipe)

    def step() -> None:
        if found is None:
            y = torch.nn.functional.linear(x, w)
        else:
            y = linear(x, w, recipe=found, seed=1, step=2)
        torch.autograd.backward(y, dy)
        x.grad = w.grad = None

    for _ in range(WARM_UP):
        step()
    return step


def calls(step: Callable[[], None]) -> int:
    """The number of Python and C functions that one call of `step` calls, by cProfile."""
    with torch.autograd.set_multithreading_enabled(False):  # else backward is not profiled
        profile = cProfile.Profile()
        profile.enable()
        step()
        profile.disable()
    # Not `pstats.Stats`: it takes functions of one file, line and name for one, and keeps the count
    # of the last. All constructors that dataclasses generate are line 2 of "<string>".
    return sum(entry.callcount for entry in profile.getstats())  # type: ignore[attr-defined]


def study() -> list[dict[str, Any]]:
    """A row for BF16 and for each recipe: microseconds ("us") and `calls` of a pass."""
    steps = {"bf16": step_of(None)} | {name: step_of(name) for name in uniform_recipes()}
    taken = host_medians(steps)
    return [
        {"recipe": name, "us": taken[name] * 1e6, "calls": calls(step)}
        for name, step in steps.items()
    ]


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The result as a Markdown table."""
    body = [[row["recipe"], f"{row['us']:,.0f}", f"{row['calls']:,}"] for row in rows]
    return pages.table(["recipe", "µs", "Python calls"], body)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/host_linear.json"))
    parser.add_argument("--commit", help="where the tree has no git of its own")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("a linear is timed on a GPU, and this machine shows none")
    rows = study()
    result = {"what": "a small linear", "stamp": stamp(given.commit), "size": SIZE, "rows": rows}
    given.out.write_text(json.dumps(result, indent=1) + "\n")
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
