"""Counts the Python calls of one linear's forward and backward pass, as on a Hopper GPU.

    python -m testing.scripts.host_calls

No GPU is needed. Linears are planned for compute capability 9.0, and launches of kernels and calls
of cuBLASLt do nothing, so all results are uninitialized memory. Prints JSON: for each recipe and
each way to call a linear the number of calls, by cProfile, on a cold plan and on a warm one.

It is a process of its own because what other tests leave behind, such as cached recipes and modes
of torch, changes the number.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from benchmarks.host_linear import calls
from megatron_fp4 import decoding, get_recipe, linear
from megatron_fp4.arithmetic.philox import Key
from megatron_fp4.execution.call import Call, Site
from megatron_fp4.kernels import block_values, cublaslt, launch
from megatron_fp4.linear import quantized_linear
from megatron_fp4.multipliers import base
from megatron_fp4.plan import cache as plan_cache
from megatron_fp4.target import Target

SIZE = 256
RECIPES = ("tetrajet", "mxfp4")


def pretend_gpu(capability: tuple[int, int] = (9, 0)) -> None:
    """Makes this process plan linears on the CPU for a GPU, and launch nothing.

    capability: the GPU's, by default Hopper's.
    """
    patched: Any = launch
    patched.Launch._compile = lambda self, aligned: launch._Compiled(None, _launched, ())
    patched = torch._C
    patched._cuda_getDevice = lambda: 0
    patched._cuda_getCurrentRawStream = lambda device: 0
    patched = cublaslt
    patched._function = _function
    # Memory on a CPU is not always aligned to 256 bytes, and another alignment is another plan.
    patched._plan = _aligned(cublaslt._Plan)
    patched = decoding
    patched._has_kernel = lambda x: block_values.decodes(x.quantizer)
    patched = base
    patched._has_scale_kernel = lambda product, dtype: True
    patched = plan_cache
    patched.target_of = lambda device: Target("cuda", capability, None)


def _launched(*arguments: Any) -> None:
    pass


def _function(name: str) -> Any:
    """Stands for a function of cuBLASLt.

    What runs in every pass is a C function that returns 0. cProfile does not count its calls, as it
    does not count those of cuBLASLt's own functions.
    """
    if name in ("cublasLtMatmul", "cublasLtMatmulDescSetAttribute"):
        return ctypes.CDLL(None).sched_yield

    def call(*arguments: Any) -> int:
        if name == "cublasLtMatmulAlgoGetHeuristic":
            arguments[-1]._obj.value = 1  # one algorithm is found
        return 0

    return call


def _aligned(make: Any) -> Any:
    """`cublaslt._plan` for memory that is aligned to 256 bytes."""
    plans: dict[Any, Any] = {}

    @cache
    def plan(shape: Any, types: Any, alpha: float, adds: bool, alignment: int, device: Any) -> Any:
        kind = shape, types, alpha, adds
        if kind not in plans:
            plans[kind] = make(shape, types, alpha, adds, 256, device)
            for each in (16, 32, 64, 128, 256):  # a warm call finds a plan for its alignment
                plan(*kind, each, device)
        return plans[kind]

    return plan


def of_megatron(name: str) -> Callable[[], None]:
    """A forward and a backward pass of one linear, as Megatron's layers call it."""
    x, w = (torch.zeros(SIZE, SIZE).bfloat16().requires_grad_() for _ in range(2))
    dy = torch.zeros(SIZE, SIZE).bfloat16()
    w.main_grad = torch.zeros(SIZE, SIZE)  # type: ignore[attr-defined]
    recipe, site = get_recipe(name), Site("fc1", fuses=True)

    def step() -> None:
        y = quantized_linear(x, w, None, recipe, site, Call(Key(1, 2)))
        torch.autograd.backward(y, dy)

    return step


def public(name: str) -> Callable[[], None]:
    """A forward and a backward pass by `linear`, which checks its arguments."""
    x, w = (torch.zeros(SIZE, SIZE).bfloat16().requires_grad_() for _ in range(2))
    dy, recipe = torch.zeros(SIZE, SIZE).bfloat16(), get_recipe(name)
    return lambda: torch.autograd.backward(linear(x, w, recipe=recipe), dy)


def main() -> None:
    pretend_gpu()
    found = {}
    for make in (of_megatron, public):
        for name in RECIPES:
            step = make(name)
            cold = calls(step)
            step()
            found[f"{make.__name__} {name}"] = cold, calls(step)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
