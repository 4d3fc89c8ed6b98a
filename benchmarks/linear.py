"""Times one linear, forward and backward, in each recipe and in BF16 on the same GPU.

    python -m benchmarks.linear

The time is that of a whole step of the linear: all operands are quantized, W's too, and dW is added
to a float32 main_grad, as in BF16. A lower bound, the "floor", is measured in the same run:
the three FP8 GEMMs on operands that are quantized already, plus the bytes that quantization must
move at the bandwidth of a copy.

The rows "te ..." are Transformer Engine's linear, in BF16 and in FP8 recipes with Megatron's
settings. One that a CUDA graph cannot capture is marked "eager": the host launches its kernels
while the GPU is still busy with others. Ratios are to the faster BF16.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import te
from benchmarks.timing import medians
from megatron_fp4 import get_recipe
from megatron_fp4.arithmetic.quantize import quantize_matrix
from megatron_fp4.arithmetic.quantizer import get_quantizer
from megatron_fp4.execution.call import Site
from megatron_fp4.linear import quantized_linear
from megatron_fp4.multipliers.hopper import Hopper
from megatron_fp4.operands import Made
from megatron_fp4.recipe import GEMMS, OPERANDS, Recipe
from megatron_fp4.recipes import uniform_recipes
from megatron_fp4.setting import SwigluPlace
from tools import pages
from tools.stamp import stamp

TOKENS = 8192
SHAPES = ((4096, 4096), (4096, 14336), (14336, 4096), (8192, 8192))  # in, out
OTHER_SHAPES = ((5120, 13824), (2048, 5632))  # for which no kernel was tuned
OPTIONS = {"mxfp4-rht-sr:fp8": {"forward": "fp8"}}
PACKED, CARRIED = 17 / 32, 1  # bytes of an element
AIMED_AT = "tetrajet"  # the recipe that the target is for
MOST = 1.03  # the target: the most that it may take, times the floor of the same run


@dataclass
class Problem:
    x: Tensor
    w: Tensor
    dy: Tensor
    main_grad: Tensor


def problem(inputs: int, outputs: int, tokens: int = TOKENS) -> Problem:
    x = torch.randn(tokens, inputs, device="cuda").bfloat16().requires_grad_()
    w = (torch.randn(outputs, inputs, device="cuda") / inputs**0.5).bfloat16().requires_grad_()
    main_grad = torch.zeros(outputs, inputs, device="cuda")
    w.main_grad = main_grad  # type: ignore[attr-defined]
    return Problem(x, w, torch.randn(tokens, outputs, device="cuda").bfloat16(), main_grad)


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


def engine(p: Problem, name: str) -> Callable[[], tuple[Tensor, Tensor]]:
    """A function that runs Transformer Engine's linear, forward and backward; it returns Y and dX.

    name: one of te.ROWS.
    """
    import transformer_engine.pytorch as transformer_engine
    from transformer_engine.common import recipe as recipes
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    # As Megatron makes them.
    made: dict[str, Callable[..., Any]] = {
        "delayed": partial(
            recipes.DelayedScaling, amax_history_len=1, amax_compute_algo="most_recent"
        ),
        "tensorwise": recipes.Float8CurrentScaling,
        "blockwise": recipes.Float8BlockScaling,
    }
    recipe = None
    if name in te.FP8:
        kind, form = te.FP8[name]
        recipe = made[kind](fp8_format=recipes.Format[form.upper()])
    FP8GlobalStateManager.reset()  # else each step updates delayed scales of earlier linears too
    outputs, inputs = p.w.shape
    linear = transformer_engine.Linear(
        inputs, outputs, bias=False, params_dtype=p.w.dtype, fuse_wgrad_accumulation=True
    )
    linear.weight.data.copy_(p.w.detach())
    linear.weight.main_grad = p.main_grad

    def step() -> tuple[Tensor, Tensor]:
        with transformer_engine.autocast(enabled=recipe is not None, recipe=recipe):
            y = linear(p.x)  # without is_first_microbatch it quantizes W in each step
        torch.autograd.backward(y, p.dy, inputs=[p.x, linear.weight])
        dx, p.x.grad = p.x.grad, None
        assert dx is not None
        return y, dx

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


def moved(recipe: Recipe, inputs: int, outputs: int, swiglu: SwigluPlace = "") -> float:
    """The bytes that must be moved to make the MXFP4 operands of a linear and their carriers.

    A kernel reads its source once for all operands that it makes. Codes and carriers are written,
    and codes are read again where they are kept for backward or follow a transform.

    swiglu: where the linear stands beside a SwiGLU that the kernels compute, which then read other
    sources: for X after it Y of the linear before, of twice the size; for dY before it Y and the
    gradient of the SwiGLU's result, of half the size.
    """
    sizes = {"x": TOKENS * inputs, "w": outputs * inputs, "dy": TOKENS * outputs}
    sources = {operand: 2.0 * size for operand, size in sizes.items()}
    sources["x"] *= 2 if swiglu == "after" else 1
    sources["dy"] *= 1.5 if swiglu == "before" else 1
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
                total += sizes[operand] * PACKED if again else sources[operand]
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
    """A row for each shape and each name: of a recipe, or one of te.ROWS."""
    rows = []
    engines = [name for name in names if name in te.ROWS]
    eager = [name for name in engines if te.tried(name) == te.EAGER]
    for inputs, outputs in (*SHAPES, *OTHER_SHAPES):
        p = problem(inputs, outputs)
        recipes = {
            name: get_recipe(name.split(":")[0], **OPTIONS.get(name, {}))
            for name in names
            if name not in engines
        }
        calls: dict[str, Callable[[], Any]] = {"bf16": bf16(p), "products": products(p)}
        calls |= {name: quantized(p, recipe) for name, recipe in recipes.items()}
        calls |= {name: engine(p, name) for name in engines}
        there, source = torch.empty_like(p.dy), p.dy
        calls["copy"] = partial(there.copy_, source)
        taken = medians(calls, each=3, eager=eager)
        plain = min(taken[name] for name in ("bf16", te.BF16) if name in taken)
        speed = 4 * p.dy.numel() / taken["copy"]
        for name in ("bf16", *names):
            row: dict[str, Any] = {"in": inputs, "out": outputs, "recipe": name}
            row |= {"ms": taken[name] * 1e3, "ratio": plain / taken[name]}
            if name in eager:
                row["timed"] = te.EAGER
            recipe = recipes.get(name)
            if recipe is not None and is_mxfp4(recipe):
                floor = taken["products"] + moved(recipe, inputs, outputs) / speed
                row |= {"products ms": taken["products"] * 1e3, "floor ms": floor * 1e3}
                row |= {"ratio of the floor": plain / floor}
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The result as a Markdown table."""
    head = ["in × out", "recipe", "ms", "speedup", "GEMMs alone", "lower bound", "its speedup"]
    body = []
    for row in rows:
        recipe = f"{row['recipe']}, {row['timed']}" if "timed" in row else row["recipe"]
        cells = [f"{row['in']} × {row['out']}", recipe, f"{row['ms']:.2f}"]
        cells.append(f"{row['ratio']:.2f}")
        for key in ("products ms", "floor ms", "ratio of the floor"):
            cells.append(f"{row[key]:.2f}" if key in row else "")
        aimed_at = row["recipe"] == AIMED_AT
        cells.append(f"{row['ratio of the floor'] / MOST:.2f}" if aimed_at else "")
        body.append(cells)
    return pages.table([*head, "target"], body)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    default = Path("benchmarks/results/linear.json")
    parser.add_argument("--out", type=Path, default=default)
    parser.add_argument("--recipes", nargs="+", default=[*uniform_recipes(), *OPTIONS, *te.ROWS])
    parser.add_argument("--commit", help="where the tree has no git of its own")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("the linear is timed on a GPU, and this machine shows none")
    stamped = stamp(args.commit)
    rows = study(te.present(args.recipes))
    result = {"stamp": stamped, "tokens": TOKENS, "rows": rows}
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
