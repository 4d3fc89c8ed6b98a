"""The sample of large operands: the same lines in every layout, whose sums are numpy's."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_fp4 import get_quantizer, list_recipes
from megatron_fp4.arithmetic.philox import Placement
from megatron_fp4.arithmetic.quantize import quantize_matrix
from megatron_fp4.arithmetic.quantized_tensor import QuantizedTensor
from megatron_fp4.execution.call import Call, Site
from megatron_fp4.execution.weights import HeldWeight
from megatron_fp4.linear import quantized_linear
from megatron_fp4.makers.base import Given, OperandPlan
from megatron_fp4.mcore.loop import metrics_shares
from megatron_fp4.mcore.loop.metrics_shares import Samples
from megatron_fp4.metrics.lines import rows_of
from megatron_fp4.metrics.operands import operand_metrics, operand_sums
from megatron_fp4.operands import Carriers, Made, Matrix
from megatron_fp4.recipe import GEMMS, OPERANDS
from megatron_fp4.setting import Sharding, column_parallel, row_parallel
from testing.builders.small_recipes import small_recipe
from testing.oracles import normal

ROWS, COLUMNS, STRIDE = 256, 128, 3
FIRST = 512  # the first row of the microbatch in the global batch
QUANTIZER = get_quantizer("mxfp4")
# operand: GEMM, letter, contracted axis; how tensor parallelism shards its linear, and along which
# axis of the matrix this cuts it; None: all ranks have all of it.
CASES: dict[str, tuple[str, str, int, Sharding, int | None]] = {
    "tokens of a rank": ("fprop", "x", 1, column_parallel(2, sequence_parallel=True), 0),
    "tokens of all ranks": ("fprop", "x", 1, column_parallel(2), None),
    "features of x": ("fprop", "x", 1, row_parallel(2), 1),
    "outputs of w": ("fprop", "w", 1, column_parallel(2), 0),
    "outputs of w, contracted": ("dgrad", "w", 0, column_parallel(2), 0),
    "inputs of w": ("fprop", "w", 1, row_parallel(2), 1),
    "features of dy": ("wgrad", "dy", 0, column_parallel(2), 1),
}


def operand(gemm: str, letter: str, axis: int, is_part: bool) -> OperandPlan:
    shape = (ROWS, COLUMNS)
    return OperandPlan(
        gemm, letter, "model", torch.float32, None, shape, axis, is_part, "", False, None,
        QUANTIZER, False,
    )  # fmt: skip


def halves(size: int, group: int) -> list[Tensor]:
    """Which of `size` lines each of two ranks has: every other `group` of them, as SwiGLU's do."""
    owner = torch.arange(size) // group % 2
    return [(owner == rank).nonzero().flatten() for rank in range(2)]


def sites(name: str) -> list[tuple[Site, tuple[Tensor, Tensor]]]:
    """Each rank's Site, and the rows and columns of the matrix that it has."""
    _, letter, _, sharding, cut = CASES[name]
    whole = torch.arange(ROWS), torch.arange(COLUMNS)
    found = []
    for rank in range(2):
        mine = whole
        place = Placement()
        if cut == 0:
            mine = halves(ROWS, 64)[rank], whole[1]
            place = Placement(rows=mine[0])
        elif cut == 1:
            mine = whole[0], halves(COLUMNS, 32)[rank]
            place = Placement(groups=mine[1][::8] // 8, groups_per_row=COLUMNS // 8)
        part = partial(_part, own=mine[0])
        parallel: Any = SimpleNamespace(sharding=sharding, part=part)
        found.append((Site(placements={letter: place}, parallel=parallel), mine))
    return found


def _part(rows: Tensor, own: Tensor) -> Tensor:
    return rows[own]


def counted(
    x: Tensor, site: Site, plan: OperandPlan, mine: Sequence[Tensor]
) -> tuple[list[int], Tensor]:
    """(lines of the unsharded matrix, their sums) that a rank counts."""
    own = x[mine[0]][:, mine[1]]
    call = Call(rows=None if plan.letter == "w" else torch.arange(ROWS) + FIRST)
    lines = Samples().lines(site, call, plan, own)
    assert lines is not None
    quantized = rows_of(quantize_matrix(own, QUANTIZER, axis=plan.axis), lines)
    sums = operand_sums(own.movedim(plan.axis, -1)[lines], quantized)
    return mine[1 - plan.axis][lines].tolist(), sums


@pytest.mark.parametrize("name", CASES)
def test_the_sample_is_that_of_one_rank(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_shares, "MOST", ROWS * COLUMNS // STRIDE + 1)
    gemm, letter, axis, sharding, cut = CASES[name]
    x = normal((ROWS, COLUMNS), 3) * torch.logspace(-3, 1, COLUMNS)
    plan = operand(gemm, letter, axis, is_part=sharding.scattered == letter)
    alone = torch.arange(ROWS), torch.arange(COLUMNS)
    lines, sums = counted(x, Site(), plan, alone)
    # Rows of tokens are numbered in the global batch, all other lines in the matrix.
    first = FIRST if axis == 1 and letter != "w" else 0
    assert lines == [i for i in range(x.shape[1 - axis]) if (i + first) % STRIDE == 0]
    ranks = [counted(x, site, plan, mine) for site, mine in sites(name)]
    along = cut == axis  # each rank has a part of every line
    together = ranks[0][0] if cut is None or along else sorted(ranks[0][0] + ranks[1][0])
    assert together == lines and (cut is not None or ranks[1][0] == lines)
    total = ranks[0][1] if cut is None else ranks[0][1] + ranks[1][1]
    torch.testing.assert_close(total, sums, rtol=1e-12, atol=0)
    found = operand_metrics(sums.tolist())
    q = quantize_matrix(x, QUANTIZER, axis=axis).dequantize(torch.float64)
    exact, decoded = (each.movedim(axis, -1)[lines].double().numpy() for each in (x, q))
    assert found["gain"] == pytest.approx((decoded * exact).sum() / (exact**2).sum(), rel=1e-12)
    assert found["zeros"] == pytest.approx((decoded == 0).mean(), rel=1e-12)
    assert sum(found["scales"]["counts"]) == len(lines) * x.shape[axis] // 32
    # Negative control: all lines have other sums.
    of_all = (q.numpy() * x.double().numpy()).sum() / np.square(x.double().numpy()).sum()
    assert found["gain"] != pytest.approx(of_all, rel=1e-9)


def test_a_sample_of_local_lines_would_depend_on_the_layout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank that does not know where its rows lie counts others."""
    monkeypatch.setattr(metrics_shares, "MOST", ROWS * COLUMNS // STRIDE + 1)
    plan = operand("fprop", "w", 1, is_part=False)
    x, (_, (site, mine)) = normal((ROWS, COLUMNS), 3), sites("outputs of w")
    right, _ = counted(x, site, plan, mine)
    lost: Any = SimpleNamespace(sharding=column_parallel(2))
    wrong, _ = counted(x, Site(parallel=lost), plan, mine)
    assert right != wrong and all(line % STRIDE == 0 for line in right)


def test_small_operands_are_counted_whole() -> None:
    plan = operand("fprop", "w", 1, is_part=False)
    assert Samples().lines(Site(), Call(), plan, normal((ROWS, COLUMNS), 3)) is None


class Lines:
    """A Watch that compares lines, picked first, with those of the whole operand."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def looks(self, holds_w: bool) -> bool:
        return True

    def made(
        self,
        site: Site,
        call: Call,
        operand: OperandPlan,
        matrix: Matrix,
        given: Given,
        made: Made,
    ) -> None:
        if operand.quantizer is None:
            return
        assert isinstance(made.operand, QuantizedTensor)
        lines = torch.tensor([1, 2, 30, 63])
        x, quantized = metrics_shares.counted(matrix, operand, given, made.operand, lines)
        whole, _ = metrics_shares.counted(matrix, operand, given, made.operand, None)
        assert torch.equal(x, whole.movedim(operand.axis, -1)[lines])
        values = made.operand.dequantize().movedim(operand.axis, -1)[lines]
        assert torch.equal(quantized.dequantize(), values)
        self.seen.append(f"{operand.gemm}.{operand.letter}")

    def held(self, site: Site, w: Tensor, held: HeldWeight) -> None:
        raise AssertionError("the executor in Python does not call this")

    def carried(self, site: Site, operand: OperandPlan, carriers: Carriers) -> None:
        raise AssertionError("there are no carriers on a CPU")


@pytest.mark.parametrize("name", list_recipes())
def test_lines_are_those_of_the_whole_operand(name: str) -> None:
    """Also of operands that are transformed, made from codes, or multiplied by row scales."""
    watch, recipe = Lines(), small_recipe(name)
    x, w, dy = (normal((64, 64), seed).bfloat16() for seed in range(3))
    average = w.float() if name == "tetrajet-ema" else None
    y = quantized_linear(
        x.requires_grad_(), w.requires_grad_(), None, recipe, Site(watch=watch, average=average)
    )
    y.backward(dy)
    quantized = [f"{gemm}.{letter}" for gemm in GEMMS for letter in OPERANDS[gemm]
                 if recipe.quantizer(gemm, letter) is not None]  # fmt: skip
    assert sorted(watch.seen) == sorted(quantized) and len(quantized) >= 2
