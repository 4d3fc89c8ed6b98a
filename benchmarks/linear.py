"""One linear, forward and backward, in each recipe, beside BF16 on the same GPU.

    python -m benchmarks.linear

Every recipe's time is that of the whole step of the linear: all operands quantized, W's too, and dW
added to a float32 main_grad, as BF16's is.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.stamp import stamp
from benchmarks.timing import medians
from megatron_fp4 import get_recipe, list_recipes
from megatron_fp4.call import Call
from megatron_fp4.linear import quantized_linear

TOKENS = 8192
SHAPES = ((4096, 4096), (4096, 14336), (14336, 4096), (8192, 8192))  # in, out


def bf16_step(x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor, main_grad: torch.Tensor) -> None:
    torch.mm(x, w.t())
    torch.mm(dy, w)
    torch.addmm(main_grad, dy.t(), x, out_dtype=torch.float32, out=main_grad)


def study(shapes: Any, recipes: list[str]) -> list[dict[str, Any]]:
    rows = []
    for inputs, outputs in shapes:
        x = torch.randn(TOKENS, inputs, device="cuda").bfloat16().requires_grad_()
        w = (torch.randn(outputs, inputs, device="cuda") / inputs**0.5).bfloat16()
        w.requires_grad_()
        w.main_grad = torch.zeros(outputs, inputs, device="cuda")  # type: ignore[attr-defined]
        dy = torch.randn(TOKENS, outputs, device="cuda").bfloat16()
        plain = (x.detach(), w.detach(), dy, w.main_grad)  # type: ignore[attr-defined]
        calls: dict[str, Callable[[], Any]] = {"bf16": lambda p=plain: bf16_step(*p)}  # type: ignore
        for name in recipes:
            recipe = get_recipe(name)

            def step(recipe: Any = recipe) -> None:
                y = quantized_linear(x, w, None, recipe, Call(fuses=True))  # noqa: B023
                torch.autograd.backward(y, dy, inputs=[x, w])  # noqa: B023
                x.grad = w.grad = None  # noqa: B023

            calls[name] = step
        taken = medians(calls, each=3)
        for name, ms in taken.items():
            rows.append({"in": inputs, "out": outputs, "recipe": name, "ms": 1e3 * ms})
            rows[-1]["ratio"] = taken["bf16"] / ms
            print(rows[-1], flush=True)
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/linear.json"))
    parser.add_argument("--recipes", nargs="+", default=list_recipes())
    parser.add_argument("--commit")
    args = parser.parse_args(argv)
    stamped = stamp(args.commit)
    result = {"stamp": stamped, "rows": study(SHAPES, args.recipes)}
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
