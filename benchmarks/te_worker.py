"""Tries a small linear of Transformer Engine, for benchmarks/te.py.

    python -m benchmarks.te_worker "te fp8 delayed"

It prints "result: graphs" if a CUDA graph can capture the linear, and "result: eager" if not. With
"error:" and a reason it says that the linear cannot run, or that its results are not those of its
format. It is a process of its own since a capture that fails leaves its process unusable.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks import te
from benchmarks.linear import Problem, engine, problem

SIDE = 512
# Relative errors, in norm, of Y, dX and dW from products in float32. Rounding to BF16 gives 0.002.
# Rounding to E4M3 gives 0.026 for an operand, and to E5M2 twice that.
LEAST_OF_FP8, MOST_OF_FP8, MOST_OF_BF16 = 0.01, 0.12, 0.01


def results(p: Problem, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Y, dX and dW of a step. Two steps come before it, after which delayed scales are known."""
    step = engine(p, name)
    for _ in range(2):
        step()
    p.main_grad.zero_()
    return *step(), p.main_grad


def wrong(name: str, errors: dict[str, float]) -> str | None:
    """What is wrong with these relative errors of Y, dX and dW; None if nothing is."""
    least, most = (LEAST_OF_FP8, MOST_OF_FP8) if name in te.FP8 else (0.0, MOST_OF_BF16)
    for of, error in errors.items():
        if not least <= error <= most:  # NaN too
            return f"its {of} differs from the product by {error:.4f}, not {least} to {most}"
    return None


def errors(p: Problem, found: Sequence[Tensor]) -> dict[str, float]:
    """The relative errors of Y, dX and dW."""
    x, w, dy = (t.detach().float() for t in (p.x, p.w, p.dy))
    products = (x @ w.t(), dy @ w, dy.t() @ x)
    relative = [((a - b).norm() / b.norm()).item() for a, b in zip(found, products, strict=True)]
    return dict(zip(("Y", "dX", "dW"), relative, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("name", choices=te.ROWS)
    name = parser.parse_args().name
    p = problem(SIDE, SIDE, tokens=SIDE)
    try:
        told = wrong(name, errors(p, results(p, name)))
    except Exception as error:  # another package may raise anything
        told = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    if told is not None:
        sys.exit(te.ERROR + told)
    step = engine(p, name)
    step()
    torch.cuda.synchronize()
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            step()
    except RuntimeError:
        print(te.RESULT + te.EAGER)
    else:
        print(te.RESULT + te.GRAPHS)


if __name__ == "__main__":
    main()
