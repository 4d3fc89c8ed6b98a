"""Starting Triton kernels with little work on the host.

Triton looks at all arguments of every call to find the kernel that was compiled for their like,
which takes longer than many a kernel runs. A Launch is made once for what calls have in common.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

VERSION = tuple(map(int, triton.__version__.split(".")[:2]))


def kernel(
    *, fp_fusion: bool, do_not_specialize: Sequence[str] = ()
) -> Callable[[Callable[..., Any]], Any]:
    """Makes a Triton kernel of a function, as triton.jit does, and keeps what it says of fusion.

    fp_fusion: whether the compiler may fuse a product and the sum that it goes into, which are then
    rounded once and not twice. Every kernel says so, since Triton's default changes between
    versions and bits may hang on it: True where no code or scale does.
    do_not_specialize: names of integer arguments whose values the kernel is not compiled anew for.
    """

    def made(function: Callable[..., Any]) -> Any:
        jitted: Any = triton.jit(function, do_not_specialize=do_not_specialize)
        jitted.fp_fusion = fp_fusion
        return jitted

    return made


def options_of(kernel: Any, **others: Any) -> dict[str, Any]:
    """Options that a kernel is compiled with: `others` (num_warps, ...) and what it says itself.
    Raises TypeError for a kernel that was not made by `kernel`."""
    if not hasattr(kernel, "fp_fusion"):
        raise TypeError(f"{kernel} says nothing about fusion: make it by launch.kernel")
    return others | {"enable_fp_fusion": kernel.fp_fusion}


def run(kernel: Any, grid: tuple[int, ...], arguments: Sequence[Any], **constants: Any) -> Any:
    """Starts a kernel as Triton does, and returns what was compiled. constants: its constants by
    name, and options."""
    return kernel[grid](*arguments, **options_of(kernel, **constants))


def planned[Plan: Callable[..., Any]](launches: Plan) -> Plan:
    """Keeps what a function makes for sizes and kinds: as many as a run meets, where all tokens
    are one microbatch's, and not one for each number of tokens that a router ever gave an expert.
    """
    return lru_cache(4096)(launches)  # type: ignore[return-value]


def tiles(size: int, tile: int) -> int:
    """How many it takes to cover `size`."""
    return -(-size // tile)


def on(x: Tensor) -> AbstractContextManager[Any]:
    """While it is entered kernels start on x's GPU."""
    if not x.is_cuda or x.device.index == torch._C._cuda_getDevice():
        return _HERE
    return torch.cuda.device(x.device)


_HERE = nullcontext()


def stream_of(x: Tensor) -> int:
    """The current stream of x's GPU; 0 on a CPU."""
    return torch._C._cuda_getCurrentRawStream(x.device.index) if x.is_cuda else 0


def captured(x: Tensor) -> bool:
    """Whether what is done with x becomes part of a CUDA graph."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def kept(make: Callable[..., Tensor], number: int, like: Tensor) -> Tensor:
    """make(number, device=like's), kept for like's stream. In a CUDA graph it is made there: what
    one leaves in memory is no one else's."""
    if captured(like):
        return make(number, device=like.device)
    return _kept(make, number, like.device, stream_of(like))


@lru_cache(256)
def _kept(make: Callable[..., Tensor], number: int, device: torch.device, stream: int) -> Tensor:
    return make(number, device=device)


class Launch:
    """A kernel with its grid, constants and options. Its calls differ in their tensors, not in
    their dtypes, and in integers that are not specialized and fit 32 bits; others (sizes) are the
    same in all.

    seen_as: what some pointers are to the kernel, by their names, where that is not their dtype.
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        constants: dict[str, Any],
        seen_as: dict[str, torch.dtype] | None = None,
        **options: Any,
    ) -> None:
        self._kernel, self._grid = kernel, (*grid, 1, 1)[:3]
        self._constants, self._options = constants, options_of(kernel, **options)
        names = list(kernel.arg_names)
        plain = [name for name in names if name not in constants]
        assert names == plain + names[len(plain) :]  # constants come last
        self._values = [constants[name] for name in names[len(plain) :]]
        self._pointers = [i for i, name in enumerate(plain) if name.endswith("_ptr")]
        self._seen_as = {plain.index(name): dtype for name, dtype in (seen_as or {}).items()}
        self._interpreted = triton.knobs.runtime.interpret
        self._started: dict[int, Any] = {}  # by device

    def __call__(self, arguments: list[Tensor | int | None]) -> None:
        """Launch it on the current stream of the first tensor's GPU, with what is not constant; a
        pointer that the kernel does not read may be None."""
        if self._interpreted:
            self._compiled(arguments)
            return
        device, index = torch._C._cuda_getDevice(), arguments[0].device.index  # type: ignore
        if index is not None and index != device:
            with torch.cuda.device(index):
                self(arguments)
            return
        places, given = 0, arguments.copy()
        for i in self._pointers:
            if (tensor := given[i]) is None:
                given[i] = 0
            else:
                place = tensor.data_ptr()  # type: ignore[union-attr]
                places |= place
                given[i] = place  # a number takes Triton less time than a tensor
        if places % 16:
            self._compiled(arguments)
            return
        start = self._started.get(device)
        if start is None:
            self._started[device] = self._compiled(arguments)[self._grid]
            return
        start(*given, *self._values, stream=torch._C._cuda_getCurrentRawStream(device))

    def _compiled(self, arguments: list[Tensor | int | None]) -> Any:
        """The kernel for these arguments, which it has been launched with."""
        given = [arguments[0] if argument is None else argument for argument in arguments]
        for i, dtype in self._seen_as.items():
            given[i] = given[i].view(dtype)  # type: ignore[union-attr]
        return self._kernel[self._grid](*given, **self._constants, **self._options)
