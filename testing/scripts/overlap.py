"""Checks on two ranks that the collectives of a linear's backward pass overlap with its GEMMs.

It logs in which order the pass starts collectives and GEMMs, and waits for collectives.

torchrun --nproc-per-node 2 testing/scripts/overlap.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import distributed as dist

from megatron_fp4 import list_recipes
from megatron_fp4.execution.backward import Backward
from megatron_fp4.execution.call import Site
from megatron_fp4.execution.communication import TensorParallel
from megatron_fp4.linear import quantized_linear
from megatron_fp4.mcore.runtime import gloo
from megatron_fp4.multipliers.reference import Reference
from megatron_fp4.setting import column_parallel
from testing.builders.small_recipes import small_recipe

GATHER, SCATTER, SUM = (
    "allgather_into_tensor_coalesced",
    "reduce_scatter_tensor",
    "all_reduce",
)
GEMM = "multiply"
Log = list[str]


def main() -> None:
    gloo.use_one_worker()
    dist.init_process_group("gloo")
    assert dist.group.WORLD is not None
    column = TensorParallel(dist.group.WORLD, column_parallel(2, sequence_parallel=True))
    summing = TensorParallel(dist.group.WORLD, column_parallel(2, sums_dx=True))
    log: Log = []
    for where, name in ((dist.ProcessGroup, GATHER), (dist, SCATTER), (dist, SUM)):
        setattr(where, name, _logged(getattr(where, name), name, log))
    Reference.multiply = _noted(Reference.multiply, GEMM, log)  # type: ignore[method-assign]
    for recipe in list_recipes():
        assert overlaps(backward(recipe, column, log)), (recipe, log)
        assert sums_beside_wgrad(backward(recipe, summing, log)), (recipe, log)
    # The known mistakes: the pass waits at once for the sum of dX, or for X.
    add = TensorParallel.sum
    TensorParallel.sum = lambda *args: _arrived(add(*args))  # type: ignore[method-assign]
    for recipe in list_recipes():
        assert not sums_beside_wgrad(backward(recipe, summing, log)), (recipe, log)
    kept, sent = Backward._send_kept_x, Backward._send
    Backward._send_kept_x = lambda self: _arrived(kept(self))  # type: ignore[method-assign]
    Backward._send = lambda *args: _arrived(sent(*args))  # type: ignore[method-assign]
    for recipe in list_recipes():
        assert not overlaps(backward(recipe, column, log)), (recipe, log)
    dist.destroy_process_group()


def overlaps(log: Log) -> bool:
    """Whether X is gathered while dgrad runs, and dX is reduce-scattered while wgrad runs."""
    dgrad, wgrad = products(log)
    gathers = [i for i, event in enumerate(log) if event == GATHER]
    arrivals = [i for i, event in enumerate(log) if event == f"wait {GATHER}"]
    sums = log.index(SCATTER) < wgrad < log.index(f"wait {SCATTER}")
    return bool(gathers) and max(gathers) < dgrad < min(arrivals) < wgrad and sums


def sums_beside_wgrad(log: Log) -> bool:
    """Whether dX is all-reduced while wgrad runs, without sequence parallelism."""
    dgrad, wgrad = products(log)  # before them ranks may agree on scales
    return log.index(SUM, dgrad) < wgrad < log.index(f"wait {SUM}", dgrad)


def products(log: Log) -> list[int]:
    """The indices in the log of the starts of dgrad's GEMM and wgrad's.

    The GEMM that adds the outliers' part of dW comes after these two.
    """
    return [i for i, event in enumerate(log) if event == GEMM][:2]


def backward(recipe: str, parallel: TensorParallel, log: Log) -> Log:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 64, generator=generator).requires_grad_()
    weight = torch.randn(64, 64, generator=generator).requires_grad_()
    y = quantized_linear(x, weight, None, small_recipe(recipe), Site(parallel=parallel))
    log.clear()
    y.sum().backward()
    return log


def _logged(collective: Callable[..., Any], name: str, log: Log) -> Callable[..., Any]:
    def start(*args: Any, **kwargs: Any) -> Any:
        log.append(name)
        return _Work(collective(*args, **kwargs), name, log)

    return start


class _Work:
    def __init__(self, work: Any, name: str, log: Log) -> None:
        self.work, self.name, self.log = work, name, log

    def wait(self) -> None:
        self.log.append(f"wait {self.name}")
        self.work.wait()


def _noted(method: Callable[..., Any], name: str, log: Log) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        log.append(name)
        return method(*args)

    return call


def _arrived(pending: Any) -> Any:
    if pending is not None:
        pending.wait()
    return pending


if __name__ == "__main__":
    main()
