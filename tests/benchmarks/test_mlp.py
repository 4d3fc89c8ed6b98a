"""The benchmark of an MLP: its bytes against those of each kernel, and its rows on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks import linear, mlp
from benchmarks.linear import Problem, moved
from benchmarks.quantize_kernels import E4M3, E5M2, Made
from megatron_fp4 import get_recipe
from megatron_fp4.arithmetic.swiglu import swiglu, swiglu_gradient
from testing.oracles import normal

HIDDEN, FFN, TOKENS = 64, 96, 32


def test_bytes_are_those_of_each_kernel() -> None:
    """tetrajet's kernels one by one, whose bytes an element `quantize_kernels` counts."""
    tokens, size = linear.TOKENS, linear.TOKENS * FFN
    rows, again = Made("", (1,), carrier=E4M3), Made("", (0,), carrier=E4M3, packed=True)
    both = Made("", (1, 0), carrier=E5M2)
    of_result = Made("", (1,), carrier=E4M3, computes="SwiGLU")
    of_gradient = Made("", (1, 0), carrier=E5M2, computes="gradient")
    kernels = [
        (rows, tokens * HIDDEN), (rows, 2 * FFN * HIDDEN), (of_result, size), (rows, FFN * HIDDEN),
        (both, tokens * HIDDEN), (again, FFN * HIDDEN), (again, size),
        (of_gradient, 2 * size), (again, 2 * FFN * HIDDEN), (again, tokens * HIDDEN),
    ]  # fmt: skip
    recipe = get_recipe("tetrajet")
    found = mlp.bytes_moved(recipe, HIDDEN, FFN)
    assert found == sum(made.bytes * elements for made, elements in kernels)
    # For the SwiGLU each linear reads one more BF16 matrix of the size of fc2's X.
    assert found == moved(recipe, HIDDEN, 2 * FFN) + moved(recipe, FFN, HIDDEN) + 2 * (2 * size)


def test_bytes_apart_are_those_of_each_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of SwiGLU's kernels are the sizes of what they read and write."""
    monkeypatch.setattr(mlp, "TOKENS", TOKENS)
    monkeypatch.setattr(linear, "TOKENS", TOKENS)
    y, gradient = (normal((TOKENS, size), 1, torch.bfloat16) for size in (2 * FFN, FFN))
    between, dy = swiglu(y), swiglu_gradient(gradient, y)
    matrices = [y, between, gradient, y, dy]
    recipe = get_recipe("tetrajet")
    linears = moved(recipe, HIDDEN, 2 * FFN) + moved(recipe, FFN, HIDDEN)
    own = mlp.bytes_moved_apart(recipe, HIDDEN, FFN) - linears
    assert own == sum(matrix.numel() * matrix.element_size() for matrix in matrices)


def on_a_cpu(inputs: int, outputs: int) -> Problem:
    x, w, dy = (
        normal(shape, seed, torch.bfloat16)
        for seed, shape in enumerate(((TOKENS, inputs), (outputs, inputs), (TOKENS, outputs)))
    )
    w.main_grad = torch.zeros(outputs, inputs)  # type: ignore[attr-defined]
    return Problem(x.requires_grad_(), w.requires_grad_(), dy, w.main_grad)  # type: ignore[attr-defined]


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlp, "SHAPES", ((HIDDEN, FFN),))
    for name, function in (("swiglu", swiglu), ("swiglu_gradient", swiglu_gradient)):
        monkeypatch.setattr(mlp, name, function)
    monkeypatch.setattr(mlp, "problem", on_a_cpu)
    monkeypatch.setattr(mlp, "products", lambda p: lambda: None)  # Hopper's

    def addmm(c: Any, a: Any, b: Any, out_dtype: torch.dtype, out: Any) -> None:
        out.copy_(c + a.to(out_dtype) @ b.to(out_dtype))  # which torch has on a GPU alone

    monkeypatch.setattr(torch, "addmm", addmm)


def test_both_ways_and_bf16_compute_one_mlp(cpu: None) -> None:
    p, found = mlp.mlp(HIDDEN, FFN), []
    grads = [p.fc1.main_grad, p.fc2.main_grad]
    recipe = get_recipe("tetrajet")
    for step in (
        mlp.bf16(p),
        mlp.quantized(p, mlp.joined, recipe),
        mlp.quantized(p, mlp.apart, recipe),
    ):
        step()
        found.append([grad.clone() for grad in grads])
        for grad in grads:
            grad.zero_()
    plain, together, separate = found
    assert all(map(torch.equal, together, separate))
    for exact, rounded in zip(plain, together, strict=True):
        assert torch.linalg.norm(rounded - exact) < 0.5 * torch.linalg.norm(exact)
    # Negative control: of other matrices the gradients are no closer than zeros.
    assert torch.linalg.norm(together[0].flip(0) - plain[0]) > torch.linalg.norm(plain[0])


def test_a_row_for_each_way(cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"bf16": 8.0, "products of fc1": 1.0, "products of fc2": 0.5, "tetrajet": 4.0}

    def medians(calls: dict[str, Callable[[], Any]], each: int) -> dict[str, float]:
        for call in calls.values():
            call()
        speed = mlp.bytes_moved(get_recipe("tetrajet"), HIDDEN, FFN) / 0.5  # the bytes take 0.5 s
        copy = 4 * TOKENS * 2 * FFN / speed
        return {name: times.get(name, copy if name == "copy" else 16.0) for name in calls}

    monkeypatch.setattr(mlp, "medians", medians)
    rows = mlp.study(["tetrajet", "fp8"])
    ratios = {row["recipe"]: row["ratio"] for row in rows}
    assert ratios == {
        "bf16": 1.0, "tetrajet": 2.0, "tetrajet apart": 0.5, "fp8": 0.5, "fp8 apart": 0.5,
    }  # fmt: skip
    [with_floor] = [row for row in rows if "floor ms" in row]
    assert with_floor["recipe"] == "tetrajet" and with_floor["floor ms"] == pytest.approx(2e3)
    lines = mlp.table(rows)
    assert lines[3] == "| 64, 96 | tetrajet | 4000.00 | 2.00 | 1500.00 | 2000.00 | 4.00 |"
    recipe = get_recipe("tetrajet")
    more = mlp.bytes_moved_apart(recipe, HIDDEN, FFN) / mlp.bytes_moved(recipe, HIDDEN, FFN)
    floor = 1500 + 500 * more
    apart = f"1500.00 | {floor:.2f} | {8000 / floor:.2f} |"
    assert lines[4] == f"| 64, 96 | tetrajet apart | 16000.00 | 0.50 | {apart}"
