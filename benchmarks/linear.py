"""Times one linear, forward and backward, in each recipe and in BF16 on the same GPU.

    python -m benchmarks.linear

The time is that of a whole step of the linear: all operands are quantized, W's too, and dW is added
to a float32 main_grad, as in BF16. A lower bound, the "floor", is measured in the same run:
the three FP8 products on operands that are quantized already, plus the bytes that quantization must
move at the bandwidth of a copy.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.stamp import stamp
from benchmarks.timing import medians
from megatron_fp4 import get_recipe, list_recipes
from megatron_fp4.arithmetic.quantizer import get_quantizer, quantize_matrix
from megatron_fp4.execution.call import Site
from megatron_fp4.linear import quantized_linear
from megatron_fp4.multipliers.hopper import Hopper
from megatron_fp4.operands import Made
from megatron_fp4.recipe import GEMMS, OPERANDS, Recipe

TOKENS = 8192
SHAPES = ((4096, 4096), (4096, 14336), (14336, 4096), (8192, 8192))  # in, out
OTHER_SHAPES = ((5120, 13824), (2048, 5632))  # for which no kernel was tuned
OPTIONS = {"mxfp4-rht-sr:fp8": {"forward": "fp8"}}
PACKED, CARRIED = 17 / 32, 1  # bytes of an element
# The speedups over BF16 that tetrajet aims at, by shape. They assume that quantization moves its
# bytes at 65% of a copy's bandwidth.
AIMS = {(4096, 4096): 1.56, (4096, 14336): 1.66, (14336, 4096): 1.64, (8192, 8192): 1.75}


@dataclass
class Problem:
    x: Tensor
    w: Tensor
    dy: Tensor
    main_grad: Tensor


def problem(inputs: int, outputs: int) -> Problem:
    x = torch.randn(TOKENS, inputs, device="cuda").bfloat16().requires_grad_()
    w = (torch.randn(outputs, inputs, device="cuda") / inputs**0.5).bfloat16().requires_grad_()
    main_grad = torch.zeros(outputs, inputs, device="cuda")
    w.main_grad = main_grad  # type: ignore[attr-defined]
    return Problem(x, w, torch.randn(TOKENS, outputs, device="cuda").bfloat16(), main_grad)


def bf16(p: Problem) -> Callable[[], None]:
    x, w = p.x.detach(), p.w.detach()

    def step() -> None:
        torch.mm(x, w.t())
        torch.mm(p.dy, w)
        torch.addmm(p.main_grad, p.dy.t(), x, out_dtype=torch.float32, out=p.main_grad)

    return step


def quantized(p: Problem, recipe: Recipe) -> Callable[[], None]:
    def step() -> None:
        y = quantized_linear(p.x, p.w, None, recipe, Site(fuses=True))
        torch.autograd.backward(y, p.dy, inputs=[p.x, p.w])
        p.x.grad = p.w.grad = None

    return step


def products(p: Problem) -> Callable[[], None]:
    """A function that runs the three GEMMs of a linear on FP8 carriers, which are made before."""
    multiplier, quantizer = Hopper(), get_quantizer("mxfp4-ceil")

    def form(x: Tensor, axis: int, gradient: bool) -> Any:
        operand = Made(quantize_matrix(x.detach(), quantizer, axis=axis))
        letter = "dy" if gradient else "x"
        return multiplier.decode([operand], [letter], torch.bfloat16)[0]

    forms = {
        "fprop": (form(p.x, 1, False), form(p.w, 1, False)),
        "dgrad": (form(p.dy, 1, True), form(p.w, 0, False)),
        "wgrad": (form(p.dy, 0, True), form(p.x, 0, False)),
    }

    def step() -> None:
        for gemm, (a, b) in forms.items():
            into = p.main_grad if gemm == "wgrad" else None
            multiplier.multiply(a, b, 1.0, torch.bfloat16, into)

    return step


def moved(recipe: Recipe, inputs: int, outputs: int) -> float:
    """The bytes that must be moved to make the MXFP4 operands of a linear and their carriers.

    A kernel reads its source once for all operands that it makes. Codes and carriers are written,
    and codes are read again where they are kept for backward or follow a transform.
    """
    sizes = {"x": TOKENS * inputs, "w": outputs * inputs, "dy": TOKENS * outputs}
    total, read = 0.0, set()
    for gemm in GEMMS:
        for operand in OPERANDS[gemm]:
            quantizer = recipe.quantizer(gemm, operand)
            if quantizer is None or not quantizer.mxfp4:
                continue
            again = recipe.backward == "forward" and gemm != "fprop" and operand != "dy"
            # A matrix is read once for operands that differ only in their contracted axis.
            source = operand, operand == "w" and gemm, again, quantizer, recipe.gemm(gemm).hadamard
            if again or source not in read:
                total += sizes[operand] * (PACKED if again else 2)
            read.add(source)
            total += sizes[operand] * (PACKED + CARRIED)
            kept = (gemm, operand) == ("wgrad", "x") and not again
            if kept or recipe.gemm(gemm).hadamard is not None:
                total += sizes[operand] * PACKED
    return total


def is_mxfp4(recipe: Recipe) -> bool:
    """Whether all operands are MXFP4, so that `products` and `moved` give the floor."""
    each = [recipe.quantizer(gemm, operand) for gemm in GEMMS for operand in OPERANDS[gemm]]
    return all(quantizer is not None and quantizer.mxfp4 for quantizer in each)


def study(names: list[str]) -> list[dict[str, Any]]:
    """A row for each shape and each recipe in `names`."""
    rows = []
    for inputs, outputs in (*SHAPES, *OTHER_SHAPES):
        p = problem(inputs, outputs)
        recipes = {name: get_recipe(name.split(":")[0], **OPTIONS.get(name, {})) for name in names}
        calls = {"bf16": bf16(p), "products": products(p)}
        calls |= {name: quantized(p, recipe) for name, recipe in recipes.items()}
        there, source = torch.empty_like(p.dy), p.dy
        calls["copy"] = lambda there=there, source=source: there.copy_(source)  # type: ignore
        taken = medians(calls, each=3)
        speed = 4 * p.dy.numel() / taken["copy"]
        for name in ("bf16", *names):
            row: dict[str, Any] = {"in": inputs, "out": outputs, "recipe": name}
            row |= {"ms": taken[name] * 1e3, "ratio": taken["bf16"] / taken[name]}
            recipe = recipes.get(name)
            if recipe is not None and is_mxfp4(recipe):
                floor = taken["products"] + moved(recipe, inputs, outputs) / speed
                row |= {"products ms": taken["products"] * 1e3, "floor ms": floor * 1e3}
                row |= {"ratio of the floor": taken["bf16"] / floor}
            if name == "tetrajet" and (inputs, outputs) in AIMS:
                row["aim"] = AIMS[inputs, outputs]
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The result as a Markdown table."""
    head = "| in × out | recipe | ms | times BF16 | products alone | floor | its ratio | aim |"
    lines = [head, "|---" * 8 + "|"]
    for row in rows:
        cells = [f"{row['in']} × {row['out']}", row["recipe"], f"{row['ms']:.2f}"]
        cells.append(f"{row['ratio']:.2f}")
        cells += [f"{row[key]:.2f}" if key in row else "" for key in ("products ms", "floor ms")]
        cells += [f"{row[key]:.2f}" if key in row else "" for key in ("ratio of the floor", "aim")]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    default = Path("benchmarks/results/linear.json")
    parser.add_argument("--out", type=Path, default=default)
    parser.add_argument("--recipes", nargs="+", default=[*list_recipes(), *OPTIONS])
    parser.add_argument("--commit", help="where the tree has no git of its own")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("the linear is timed on a GPU, and this machine shows none")
    stamped = stamp(args.commit)
    rows = study(args.recipes)
    result = {"stamp": stamped, "tokens": TOKENS, "rows": rows}
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
