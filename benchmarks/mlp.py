"""Times a LLaMA MLP, fc1 + SwiGLU + fc2, forward and backward, in each recipe and in BF16.

    python -m benchmarks.mlp

It is measured as `benchmarks.linear` measures one linear: W is quantized in each step too, and dW
is added to a float32 main_grad. BF16 has the kernels of this package for SwiGLU and its gradient. A
row "NAME" joins the linears as Megatron's layers do: they compute SwiGLU and its gradient as they
quantize. A row "NAME apart" has BF16's kernels between them. The "floor" is the time of the six FP8
products, plus the bytes that the other kernels must move at the bandwidth of a copy: those that
quantize, and in a row "apart" those for SwiGLU, too.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.linear import TOKENS, Problem, is_mxfp4, moved, problem, products
from benchmarks.timing import medians
from megatron_fp4 import get_recipe
from megatron_fp4.execution.call import Call, Site
from megatron_fp4.kernels.swiglu import swiglu, swiglu_gradient
from megatron_fp4.linear import linear_after_swiglu, linear_before_swiglu, quantized_linear
from megatron_fp4.recipe import Recipe
from tools import pages
from tools.stamp import stamp

SHAPES = ((4096, 14336), (2048, 5632))  # hidden, ffn
RECIPES = ("mxfp4", "tetrajet", "tetrajet-ema", "fp8")
FC1, FC2 = Site("fc1", fuses=True), Site("fc2", fuses=True)
APART = " apart"


class Mlp(NamedTuple):
    """fc1 takes X [tokens, hidden] to Y [tokens, 2 ffn], and fc2 the SwiGLU of Y, [tokens, ffn], to
    [tokens, hidden].

    In fc1's `dy` and fc2's `x` are matrices of these shapes, which `products` alone reads.
    """

    fc1: Problem
    fc2: Problem


def mlp(hidden: int, ffn: int) -> Mlp:
    return Mlp(problem(hidden, 2 * ffn), problem(ffn, hidden))


def bf16(p: Mlp) -> Callable[[], None]:
    x, w1, w2, dz = p.fc1.x.detach(), p.fc1.w.detach(), p.fc2.w.detach(), p.fc2.dy

    def add(into: Tensor, a: Tensor, b: Tensor) -> None:
        torch.addmm(into, a, b, out_dtype=torch.float32, out=into)

    def step() -> None:
        y = torch.mm(x, w1.t())
        between = swiglu(y)
        torch.mm(between, w2.t())
        gradient = torch.mm(dz, w2)
        add(p.fc2.main_grad, dz.t(), between)
        dy = swiglu_gradient(gradient, y)
        torch.mm(dy, w1)
        add(p.fc1.main_grad, dy.t(), x)

    return step


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        ctx.save_for_backward(y)
        return swiglu(y)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return swiglu_gradient(gradient, *ctx.saved_tensors)


def joined(p: Mlp, recipe: Recipe) -> Tensor:
    """The output of the MLP, whose linears compute the SwiGLU."""
    between = linear_before_swiglu(p.fc1.x, p.fc1.w, recipe, FC1, Call(), None)
    return linear_after_swiglu(between, p.fc2.w, recipe, FC2, Call(), None)


def apart(p: Mlp, recipe: Recipe) -> Tensor:
    """As `joined`, with a kernel between the linears."""
    y = quantized_linear(p.fc1.x, p.fc1.w, None, recipe, FC1)
    return quantized_linear(_Swiglu.apply(y), p.fc2.w, None, recipe, FC2)


def quantized(
    p: Mlp, output: Callable[[Mlp, Recipe], Tensor], recipe: Recipe
) -> Callable[[], None]:
    def step() -> None:
        leaves = [p.fc1.x, p.fc1.w, p.fc2.w]
        torch.autograd.backward(output(p, recipe), p.fc2.dy, inputs=leaves)
        for leaf in leaves:
            leaf.grad = None

    return step


def bytes_moved(recipe: Recipe, hidden: int, ffn: int) -> float:
    """The bytes that kernels must read and write to quantize the operands of both linears, which
    compute the SwiGLU between them; see `linear.moved`."""
    return moved(recipe, hidden, 2 * ffn, "before") + moved(recipe, ffn, hidden, "after")


def bytes_moved_apart(recipe: Recipe, hidden: int, ffn: int) -> float:
    """The bytes that kernels besides the products must move if the linears do not compute the
    SwiGLU: those that quantize, and those of SwiGLU and of its gradient."""
    forward, backward = 4 + 2, 4 + 2 + 4  # BF16 of Y and of the result, and their gradients
    linears = moved(recipe, hidden, 2 * ffn) + moved(recipe, ffn, hidden)
    return linears + TOKENS * ffn * (forward + backward)


def with_floors_apart(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of `study`; those of linears apart have the floor too where those joined have one.

    It follows from that of the joined linears, whose products and copy are the same.
    """
    joined_rows = {(row["hidden"], row["ffn"], row["recipe"]): row for row in rows}
    found = []
    for row in rows:
        hidden, ffn, name = row["hidden"], row["ffn"], row["recipe"].removesuffix(APART)
        like = joined_rows[hidden, ffn, name]
        if row is not like and "floor ms" in like:
            recipe, products_ms = get_recipe(name), like["products ms"]
            more = bytes_moved_apart(recipe, hidden, ffn) / bytes_moved(recipe, hidden, ffn)
            floor = products_ms + (like["floor ms"] - products_ms) * more
            ratio = like["ratio of the floor"] * like["floor ms"] / floor
            row = row | {"products ms": products_ms, "floor ms": floor, "ratio of the floor": ratio}
        found.append(row)
    return found


def study(names: list[str]) -> list[dict[str, Any]]:
    """The rows of the table. For each shape there is one of BF16, and two of each recipe: linears
    that compute the SwiGLU between them, and linears with a kernel for it."""
    rows = []
    recipes = {name: get_recipe(name) for name in names}
    for hidden, ffn in SHAPES:
        p = mlp(hidden, ffn)
        calls: dict[str, Callable[[], Any]] = {
            "bf16": bf16(p),
            "products of fc1": products(p.fc1),
            "products of fc2": products(p.fc2),
        }
        for name, recipe in recipes.items():
            calls[name] = quantized(p, joined, recipe)
            calls[name + APART] = quantized(p, apart, recipe)
        calls["copy"] = partial(torch.empty_like(p.fc1.dy).copy_, p.fc1.dy)
        taken = medians(calls, each=2)
        multiplied = taken["products of fc1"] + taken["products of fc2"]
        speed = 4 * p.fc1.dy.numel() / taken["copy"]
        for name in ("bf16", *(each + end for each in names for end in ("", APART))):
            row: dict[str, Any] = {"hidden": hidden, "ffn": ffn, "recipe": name}
            row |= {"ms": taken[name] * 1e3, "ratio": taken["bf16"] / taken[name]}
            if name in recipes and is_mxfp4(recipes[name]):
                floor = multiplied + bytes_moved(recipes[name], hidden, ffn) / speed
                row |= {"products ms": multiplied * 1e3, "floor ms": floor * 1e3}
                row["ratio of the floor"] = taken["bf16"] / floor
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The result as a Markdown table."""
    head = ["hidden, ffn", "recipe", "ms", "speedup", "GEMMs alone", "lower bound", "its speedup"]
    body = []
    for row in with_floors_apart(rows):
        cells = [f"{row['hidden']}, {row['ffn']}", row["recipe"]]
        for key in ("ms", "ratio", "products ms", "floor ms", "ratio of the floor"):
            cells.append(f"{row[key]:.2f}" if key in row else "")
        body.append(cells)
    return pages.table(head, body)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/mlp.json"))
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    parser.add_argument("--commit", help="where the tree has no git of its own")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("the MLP is timed on a GPU, and this machine shows none")
    stamped = stamp(args.commit)
    rows = study(args.recipes)
    result = {"stamp": stamped, "tokens": TOKENS, "rows": rows}
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
