"""Compares the executor in C++ with the one in Python: all results must have the same bits.

    python testing/scripts/compare_executors.py RECIPE...
    torchrun --nproc-per-node 2 testing/scripts/compare_executors.py RECIPE...

On a CPU operators of PyTorch make and multiply the operands. With TRITON_INTERPRET=1 they run as on
a Hopper GPU (testing/kernels/pretend_gpu.py). On a GPU they run there. Several ranks shard the
linear by sequence parallelism, as a column-parallel and as a row-parallel linear.

--pairs adds, on one rank, two linears with a SwiGLU between them, whose Y is kept in BF16 or E4M3.
--mistake NAME makes a known mistake in the executor in C++. Prints JSON: for each case whether the
results are equal, how many forward and backward passes ran in C++, and why not all did.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_fp4 import get_recipe
from megatron_fp4.arithmetic.philox import Key, Placement
from megatron_fp4.cpp import extension, lowering
from megatron_fp4.cpp.executor import CppExecutor
from megatron_fp4.execution.call import Call, Site
from megatron_fp4.execution.communication import TensorParallel
from megatron_fp4.execution.weights import WeightCache
from megatron_fp4.linear import (
    execute_by,
    in_python,
    linear_after_swiglu,
    linear_before_swiglu,
    quantized_linear,
)
from megatron_fp4.mcore.runtime import gloo
from megatron_fp4.monitor import NonFiniteMonitor
from megatron_fp4.plan.setting import column_parallel, row_parallel

TOKENS, INPUTS, OUTPUTS = 64, 64, 64  # on each rank
HIDDEN = 256  # the columns of a SwiGLU, which kernels take
# Two linears with a SwiGLU between them, with `Site.kept_y`.
PAIRS = {"swiglu": None, "swiglu of e4m3": torch.float8_e4m3fn}
STEPS, MICROBATCHES = 3, 2
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# Whether W's operands are held, and whether dW is added to main_grad. The interpreter is slow.
FORMS = [(True, True)] if INTERPRETED else [(False, True), (True, True), (True, False)]


def no_words(self: Any, word: int, argument: int) -> bool:
    return False


def no_last_use(self: Any) -> dict[int, tuple[int, int]]:
    first = _uses(self)
    return {memory: (begin, begin) for memory, (begin, _) in first.items()}


_uses = lowering._Lowering._uses
# What each replaces in `lowering._Lowering`.
MISTAKES: dict[str, tuple[str, Callable[..., Any]]] = {
    "a step that stays": ("_is_word", no_words),
    "memory that is used again too early": ("_uses", no_last_use),
}


@dataclass
class Case:
    """One linear, or two with a SwiGLU between them.

    kind: "alone", "column", "row", or one of PAIRS. held: whether the microbatches of a step share
    W's operands. fuses: whether dW is added to main_grad. has_bias: of the linear.
    """

    recipe: str
    kind: str
    held: bool
    fuses: bool
    has_bias: bool
    device: str

    def site(self, monitor: NonFiniteMonitor, average: Tensor | None, name: str = "fc") -> Site:
        parallel, places = None, {}
        if self.kind in ("column", "row"):
            sharded = column_parallel if self.kind == "column" else row_parallel
            ranks, group = dist.get_world_size(), dist.group.WORLD
            assert group is not None
            parallel = TensorParallel(group, sharded(ranks, sequence_parallel=True))
            places = {"w": Placement(first_row=OUTPUTS * dist.get_rank())}

        def observe(gemm: str, letter: str, tally: Tensor) -> None:
            monitor.observe(name, gemm, letter, tally)

        return Site(
            name, places, parallel, "packed" if self.held else None,
            kept_y=PAIRS.get(self.kind), fuses=self.fuses, average=average, observe=observe,
            tallies=monitor,
        )  # fmt: skip


@dataclass
class Found:
    """What a linear computed. tensors: Y and all gradients of all passes. tallies: of the monitor.
    kinds: what the executor in C++ knows of its calls."""

    tensors: list[Tensor] = field(default_factory=list)
    tallies: list[Any] = field(default_factory=list)
    kinds: list[Any] = field(default_factory=list)


def run(case: Case, executor: Callable[..., Any], tallies: Any) -> Found:
    """Trains nothing: runs the passes of some steps, with other data in each."""
    execute_by(executor)
    random = torch.Generator(case.device).manual_seed(_rank())

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, device=case.device).bfloat16()

    recipe, monitor, cache = get_recipe(case.recipe), NonFiniteMonitor(), WeightCache()
    monitor.from_cpp = tallies
    weight = normal(OUTPUTS, INPUTS).requires_grad_()
    weight.main_grad = torch.zeros(OUTPUTS, INPUTS, device=case.device)  # type: ignore[attr-defined]
    bias = normal(OUTPUTS).requires_grad_() if case.has_bias else None
    average = None if recipe.weight_average is None else weight.detach().float() * 1.01
    site, found = case.site(monitor, average), Found()
    ranks = 1 if case.kind == "alone" else dist.get_world_size()
    tokens = TOKENS * (ranks if case.kind == "row" else 1)
    for step, i in itertools.product(range(1, STEPS + 1), range(MICROBATCHES)):
        microbatch = (step + i) % MICROBATCHES  # not that of the call that was recorded
        held = cache.at(step) if case.held else None
        rows = torch.arange(TOKENS * ranks, device=case.device) + 1000 * microbatch
        x = normal(tokens // 4, 4, INPUTS).requires_grad_()
        call = Call(Key(2**40 + 7, step), microbatch, 0, rows)
        y = quantized_linear(x, weight, bias, recipe, site, call, held)
        torch.autograd.backward(y, normal(*y.shape))
        gradient = weight.main_grad.clone() if case.fuses else weight.grad  # type: ignore[attr-defined]
        found.tensors += [y.detach(), x.grad, gradient]  # type: ignore[list-item]
        assert getattr(weight, "grad_added_to_main_grad", False) == case.fuses
        assert weight.grad is not None  # Megatron's hooks demand it
        weight.grad = None
        if bias is not None:
            found.tensors.append(bias.grad)  # type: ignore[arg-type]
            bias.grad = None
    monitor._close()
    assert monitor._verdict is not None
    found.tallies = [monitor._verdict.labels, monitor._verdict.tallies.tolist()]
    found.kinds = list(site.kinds.values())
    return found


def run_pair(case: Case, executor: Callable[..., Any], tallies: Any) -> Found:
    """As `run`, for two linears with a SwiGLU between them."""
    execute_by(executor)
    random = torch.Generator(case.device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, device=case.device).bfloat16()

    recipe, monitor, found = get_recipe(case.recipe), NonFiniteMonitor(), Found()
    monitor.from_cpp = tallies
    weights = [(normal(*shape) / 8).requires_grad_() for shape in ((2 * HIDDEN, 64), (64, HIDDEN))]
    averages = [None if recipe.weight_average is None else w.detach().float() for w in weights]
    for w in weights:
        w.main_grad = torch.zeros(w.shape, device=case.device)  # type: ignore[attr-defined]
    sites = [case.site(monitor, a, name) for a, name in zip(averages, ("fc1", "fc2"), strict=True)]
    caches = [WeightCache(), WeightCache()]
    for step, i in itertools.product(range(1, STEPS + 1), range(MICROBATCHES)):
        microbatch = (step + i) % MICROBATCHES
        held = [cache.at(step) if case.held else None for cache in caches]
        x = normal(TOKENS // 4, 4, 64).requires_grad_()
        rows = torch.arange(TOKENS, device=case.device) + 1000 * microbatch
        call = Call(Key(2**40 + 7, step), microbatch, 0, rows)
        between = linear_before_swiglu(x, weights[0], recipe, sites[0], call, held[0])
        y = StorageWeakRef(between.y.untyped_storage())
        z = linear_after_swiglu(between, weights[1], recipe, sites[1], call, held[1])
        del between
        assert y.expired() == (sites[0].kept_y is not None)  # nothing else keeps Y itself
        torch.autograd.backward(z, normal(*z.shape))
        found.tensors += [z.detach(), x.grad]  # type: ignore[list-item]
        for w in weights:
            found.tensors.append(w.main_grad.clone() if case.fuses else w.grad)  # type: ignore
            w.grad = None
    monitor._close()
    assert monitor._verdict is not None
    found.tallies = [monitor._verdict.labels, monitor._verdict.tallies.tolist()]
    found.kinds = [kind for site in sites for kind in site.kinds.values()]
    return found


def compared(case: Case, loaded: Any) -> dict[str, Any]:
    runs = run_pair if case.kind in PAIRS else run
    expected = runs(case, in_python, None)
    executor = CppExecutor(loaded, on_cpu=True)
    found = runs(case, executor, loaded.Tallies())
    passes = STEPS * MICROBATCHES * (2 if case.kind in PAIRS else 1)
    pairs = list(zip(expected.tensors, found.tensors, strict=True))
    return {
        "equal": all(torch.equal(a, b) for a, b in pairs) and expected.tallies == found.tallies,
        "passes": passes,
        "in C++": passes - sum(kind.calls for kind in found.kinds),
        "recorded": [sum(each is not None for each in kind.passes) for kind in found.kinds],
        "problems": [kind.problem for kind in found.kinds if kind.problem is not None],
    }


def cases(recipes: list[str], pairs: bool) -> list[Case]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    kinds = ["column", "row"] if dist.is_initialized() else ["alone", *(PAIRS if pairs else ())]
    return [
        Case(recipe, kind, held, fuses, has_bias=not held, device=device)
        for recipe in recipes
        for kind in kinds
        for held, fuses in FORMS
    ]


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("recipes", nargs="+")
    parser.add_argument("--mistake", choices=MISTAKES)
    parser.add_argument("--pairs", action="store_true", help="two linears with a SwiGLU too")
    args = parser.parse_args()
    if "RANK" in os.environ:
        gloo.use_one_worker()
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if INTERPRETED:
        from testing.kernels import pretend_gpu

        pretend_gpu.install()
    if args.mistake is not None:
        setattr(lowering._Lowering, *MISTAKES[args.mistake])
    loaded = extension.load()
    found = {
        f"{case.recipe} {case.kind}{' held' * case.held}{' fused' * case.fuses}": compared(
            case, loaded
        )
        for case in cases(args.recipes, args.pairs)
    }
    if not _rank():
        json.dump(found, sys.stdout)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
