"""Counts the tensors that a pass of a linear allocates, in Python and in C++.

    TRITON_INTERPRET=1 python testing/scripts/count_allocations.py RECIPE [--apart]

The passes run as on a Hopper GPU (testing/kernels/pretend_gpu.py). Triton's interpreter allocates
too, the same in both executors. A dispatch mode sees what the executor in Python allocates by
itself, and a profile sees all, so that the difference is the interpreter's. Passes in C++ run in
no dispatch mode: theirs is the profile less the interpreter's part.

--apart is a known mistake: the executor in C++ allocates each tensor by itself. Prints JSON: the
allocations by executor, in the forward and the backward pass of the two microbatches of a step, of
which the second finds W's operands held.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_fp4.arithmetic.philox import Key
from megatron_fp4.cpp import extension, lowering
from megatron_fp4.cpp.executor import CppExecutor
from megatron_fp4.execution.call import Call, Site
from megatron_fp4.execution.weights import WeightCache
from megatron_fp4.linear import execute_by, in_python, quantized_linear
from testing.builders.small_recipes import small_recipe
from testing.kernels import pretend_gpu

SIZE = 64
STEPS, MICROBATCHES = 3, 2
NEW = "aten::new_empty", "aten::new_zeros", "aten::zeros"


class Seen(TorchDispatchMode):
    """Counts the allocations that PyTorch dispatches."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, operator: Any, types: Any, given: Any = (), named: Any = None
    ) -> Any:
        self.count += operator.overloadpacket in (
            torch.ops.aten.empty,
            torch.ops.aten.new_empty,
            torch.ops.aten.new_zeros,
        )
        return operator(*given, **(named or {}))


class Profiled(AbstractContextManager["Profiled"]):
    """Counts all allocations but those within other operators of PyTorch."""

    def __enter__(self) -> Profiled:
        self._profile = profile(activities=[ProfilerActivity.CPU])
        self._profile.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._profile.__exit__(*error)
        parents = (
            "" if event.cpu_parent is None else event.cpu_parent.name
            for event in self._profile.events()
            if event.name == "aten::empty"
        )
        self.count = sum(each in NEW or not each.startswith("aten::") for each in parents)


def counts(
    name: str, executor: Callable[..., Any], counter: Callable[[], Seen | Profiled]
) -> list[int]:
    """The allocations of each pass of the last step of a linear."""
    execute_by(executor)
    recipe, cache = small_recipe(name), WeightCache()
    weight = torch.randn(SIZE, SIZE).bfloat16().requires_grad_()
    weight.main_grad = torch.zeros(SIZE, SIZE)  # type: ignore[attr-defined]
    site, found = Site("fc", keeps_w="packed", fuses=True), []
    for step, microbatch in itertools.product(range(STEPS), range(MICROBATCHES)):
        x = torch.randn(SIZE, SIZE).bfloat16().requires_grad_()
        call, held = Call(Key(1, step), microbatch), cache.at(step)
        with counter() as forward:
            y = quantized_linear(x, weight, None, recipe, site, call, held)
        gradient = torch.ones_like(y)
        with counter() as backward:
            torch.autograd.backward(y, gradient)
        found += [forward.count, backward.count]
    return found[-2 * MICROBATCHES :]


def main() -> None:
    name = sys.argv[1]
    pretend_gpu.install()
    if "--apart" in sys.argv:
        lowering._Lowering._arenas = lambda self, outcome: {}  # type: ignore[method-assign]
    own, plain = counts(name, in_python, Seen), counts(name, in_python, Profiled)
    native = counts(name, CppExecutor(extension.load(), on_cpu=True), Profiled)
    in_cpp = [all_of - (both - mine) for all_of, both, mine in zip(native, plain, own, strict=True)]
    json.dump({"Python": own, "C++": in_cpp}, sys.stdout)


if __name__ == "__main__":
    main()
