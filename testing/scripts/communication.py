"""Checks on two ranks that operands gathered from parts of the tokens equal those of all tokens.

torchrun --nproc-per-node 2 testing/scripts/communication.py
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from megatron_fp4 import get_quantizer, list_quantizers
from megatron_fp4.arithmetic.outliers import OutlierClamp, Residual
from megatron_fp4.arithmetic.quantize import largest_magnitudes, quantize_matrix
from megatron_fp4.arithmetic.quantized_tensor import QuantizedTensor
from megatron_fp4.arithmetic.quantizer import Quantizer
from megatron_fp4.execution import backward, making
from megatron_fp4.execution.call import Site
from megatron_fp4.execution.communication import TensorParallel
from megatron_fp4.execution.weights import HeldWeight
from megatron_fp4.linear import quantized_linear
from megatron_fp4.mcore.runtime import gloo
from megatron_fp4.recipe import GemmRecipe, Recipe
from megatron_fp4.setting import Sharding, column_parallel, row_parallel
from testing.patching import patched

TOKENS, FEATURES = 128, 96
MORE = {
    "fp8-tensor": Quantizer(element="e4m3", scale="fp32", block=(0, 0), rule="absmax"),
    "fp8-row": Quantizer(element="e5m2", scale="fp32", block=(1, 0), rule="absmax"),
    "square": Quantizer(block=(16, 16)),
    "uniform": Quantizer(element="e1m2"),
    "uniform-row": Quantizer(element="e1m2", scale="fp32", block=(1, 0), rule="absmax"),
}


def main() -> None:
    gloo.use_one_worker()
    dist.init_process_group("gloo")
    assert dist.group.WORLD is not None
    parallel = TensorParallel(dist.group.WORLD, Sharding(2, scattered="x"))
    generator = torch.Generator().manual_seed(1)
    whole = torch.randn(TOKENS, FEATURES, generator=generator).bfloat16()
    whole[5, 7] = 80.0
    part = parallel.part(whole)
    for name in (*list_quantizers(), *MORE):
        for axis in (0, 1):
            quantizer = MORE.get(name) or get_quantizer(name)
            check_quantized(replace(quantizer, rounding="nearest"), axis, whole, part, parallel)
    gathered = parallel.gather(part).wait()
    assert isinstance(gathered, Tensor) and torch.equal(gathered, whole)
    for scope in ("token", "channel", "tensor"):
        check_residual(scope, part, parallel)
    sums = parallel.scatter_sum(whole.float() * (dist.get_rank() + 1)).wait()
    assert torch.equal(sums, 3 * part.float())
    assert torch.equal(parallel.sum(whole.float()).wait(), 2 * whole.float())
    check_one_collective(parallel)
    for sharding in (
        column_parallel(2),
        column_parallel(2, sequence_parallel=True),
        row_parallel(2, sequence_parallel=True),
    ):
        check_one_a_pass(TensorParallel(dist.group.WORLD, sharding))
    dist.destroy_process_group()


def check_quantized(
    quantizer: Quantizer, axis: int, whole: Tensor, part: Tensor, parallel: TensorParallel
) -> None:
    largest = None
    if quantizer.scale_spans(0, axis):
        [largest] = parallel.maximum([largest_magnitudes(part, quantizer, axis)])
    mine = quantize_matrix(part, quantizer, axis=axis, largest=largest)
    found, expected = parallel.gather(mine).wait(), quantize_matrix(whole, quantizer, axis=axis)
    assert isinstance(found, QuantizedTensor)
    assert (found.shape, found.axis) == (expected.shape, expected.axis)
    assert torch.equal(found.codes, expected.codes) and torch.equal(found.scales, expected.scales)
    assert torch.equal(found.dequantize(), expected.dequantize())


def check_residual(scope: Any, part: Tensor, parallel: TensorParallel) -> None:
    """Checks that gathered outliers have the same places in X as in the ranks' parts of it."""
    _, residual = OutlierClamp(0.97, scope).split(part)
    gathered = parallel.gather_outliers(residual).wait()
    assert isinstance(gathered, Residual)
    found = gathered.dense()
    expected = parallel.gather(residual.dense()).wait()
    assert isinstance(expected, Tensor) and torch.equal(found, expected) and found.any()


def check_one_collective(parallel: TensorParallel) -> None:
    """Checks that the maxima of several operands need one all-reduce."""
    rank = dist.get_rank()
    with maxima() as calls:
        sent = [torch.tensor([[1.0], [2.0]]) * (rank + 1), torch.tensor(-rank)]
        rows, top = parallel.maximum(sent)
    assert rows.tolist() == [[2.0], [4.0]] and top.tolist() == 0.0 and len(calls) == 1


def check_one_a_pass(parallel: TensorParallel) -> None:
    """Checks that a pass of a linear needs at most one all-reduce for all scales that ranks share.

    All six operands of the linear have such scales. A second call of the step, which uses W's
    operands of the first, is checked too. Negative control: operands that are made one by one need
    more.
    """
    gemm = GemmRecipe(get_quantizer("nvfp4"), get_quantizer("nvfp4"))
    together = making.make_operands
    for keeps in ("forward", "raw"):
        recipe = Recipe(name="nvfp4", fprop=gemm, dgrad=gemm, wgrad=gemm, backward=keeps)
        held, scattered = HeldWeight(), parallel.sharding.scattered
        first, second = (agreements(recipe, parallel, held) for _ in range(2))
        assert max(first + second) == 1, (scattered, keeps, first, second)
        with patched(backward, "make_operands", _each_by_itself(together)):
            assert max(agreements(recipe, parallel)) > 1, (scattered, keeps)


def _each_by_itself(make: Any) -> Any:
    """The known mistake: each operand is made by a call of its own, with its own all-reduce."""

    def made(makings: Any, *given: Any) -> Any:
        found: dict[Any, Any] = {}
        for one in makings:
            found |= make([one], *given)
        return found

    return made


def agreements(
    recipe: Recipe, parallel: TensorParallel, held: HeldWeight | None = None
) -> tuple[int, int]:
    """The number of all-reduces for a maximum: (forward pass, backward pass) of a linear."""
    x, w = (torch.randn(64, 64).requires_grad_() for _ in range(2))
    site = Site(parallel=parallel, keeps_w=None if held is None else "packed")
    with maxima() as forward:
        y = quantized_linear(x, w, None, recipe, site, held=held)
    with maxima() as back:
        y.sum().backward()
    return len(forward), len(back)


@contextmanager
def maxima() -> Iterator[list[Any]]:
    """A context that gives a list, to which each all-reduce for a maximum is added."""
    calls, all_reduce = [], dist.all_reduce

    def counting(tensor: Tensor, op: Any = dist.ReduceOp.SUM, **kwargs: Any) -> Any:
        if op == dist.ReduceOp.MAX:
            calls.append(tensor)
        return all_reduce(tensor, op, **kwargs)

    dist.all_reduce = counting  # type: ignore[assignment]
    yield calls
    dist.all_reduce = all_reduce


if __name__ == "__main__":
    main()
