"""Starting Triton kernels with little work on the host.

Triton looks at all arguments of every call to find the kernel that was compiled for their like,
which takes longer than many a kernel runs. Here one that was found is found again by the kinds of
sizes and the constants that it was compiled for.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

_found: dict[tuple[Any, ...], Any] = {}


def tiles(size: int, tile: int) -> int:
    """How many it takes to cover `size`."""
    return -(-size // tile)


def on(x: Tensor) -> AbstractContextManager[Any]:
    """While it is entered kernels start on x's GPU."""
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(x.device)


def stream_of(x: Tensor) -> int:
    """The current stream of x's GPU; 0 on a CPU."""
    return torch._C._cuda_getCurrentRawStream(x.device.index) if x.is_cuda else 0


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    arguments: list[Tensor | int],
    constants: dict[str, Any],
    **options: Any,
) -> None:
    """kernel[grid](*arguments, **constants, **options) on the current GPU. What the tensors' dtypes
    are hangs on the constants alone; integers that are not specialized fit 32 bits."""
    places = 0
    for argument in arguments:
        if isinstance(argument, Tensor):
            places |= argument.data_ptr()
    if triton.knobs.runtime.interpret or places % 16:
        kernel[grid](*arguments, **constants, **options)
        return
    sizes, names = _specialized(kernel)
    key = (
        id(kernel),
        torch.cuda.current_device(),
        *[_kind(arguments[i]) for i in sizes],
        *constants.values(),
        *options.values(),
    )
    compiled = _found.get(key)
    if compiled is None:
        _found[key] = kernel[grid](*arguments, **constants, **options)
        return
    compiled[(*grid, 1, 1)[:3]](*arguments, *[constants[name] for name in names])


def _kind(size: Any) -> Any:
    """What of a size Triton compiles anew for."""
    return size if size == 1 else (size % 16 == 0, size < 2**31)


@cache
def _specialized(kernel: Any) -> tuple[list[int], list[str]]:
    """(the places of integers for which kernels are compiled anew, the constants' names), in the
    order of its parameters, of which the constants are the last."""
    plain = [p for p in kernel.params if not p.is_constexpr]
    names = [p.name for p in kernel.params if p.is_constexpr]
    assert [p.name for p in kernel.params] == [p.name for p in plain] + names
    sizes = [p.num for p in plain if not p.do_not_specialize and not p.name.endswith("_ptr")]
    return sizes, names
