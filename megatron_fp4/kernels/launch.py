"""Launches Triton kernels with little host overhead.

Triton inspects all arguments of every launch to find the kernel that was compiled for such
arguments, which takes longer than many a kernel runs. A `Launch` is made once for sizes and formats
and states the types of its arguments. It compiles the kernel at its first call and passes plain
addresses and integers to what was compiled at all others.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
import triton
from torch import Tensor

from megatron_fp4.recording import WORDS, current, lasting

VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
# Whether Triton interprets the kernels on the CPU (TRITON_INTERPRET=1) instead of compiling them.
INTERPRETED: bool = triton.knobs.runtime.interpret

# The type of an int32 argument for whose value the kernel is not compiled anew. See `Launch`. An
# argument that differs between the calls of a linear has one of `recording.WORDS` as its type.
NUMBER = "number"
NUMBERS = NUMBER, *WORDS
_ANY_NUMBER = 3  # compiled for this one: Triton specializes for 1 and for multiples of 16
# Functions that profilers add, which Triton calls before and after each launch.
_HOOKS = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook


def kernel(
    *, fp_fusion: bool, do_not_specialize: Sequence[str] = ()
) -> Callable[[Callable[..., Any]], Any]:
    """A decorator that makes a Triton kernel, as triton.jit does, and stores `fp_fusion`.

    fp_fusion: whether the compiler may fuse a product and a sum, which are then rounded once
        instead of twice. Triton's default changes between versions, so every kernel states it: True
        where no code or scale depends on it.
    do_not_specialize: names of integer arguments for whose values the kernel is not compiled anew.
    """

    def made(function: Callable[..., Any]) -> Any:
        jitted: Any = triton.jit(function, do_not_specialize=do_not_specialize)
        jitted.fp_fusion = fp_fusion
        return jitted

    return made


def bits_of(number: float) -> int:
    """The bits of a number in float32, as an int32: a kernel gets numbers that way."""
    return int(struct.unpack("<i", struct.pack("<f", number))[0])


def options_of(kernel: Any, **others: Any) -> dict[str, Any]:
    """The options with which a kernel is compiled: `others` (num_warps, ...) and its own fp_fusion.

    Raises TypeError for a kernel that was not made by `kernel`.
    """
    if not hasattr(kernel, "fp_fusion"):
        raise TypeError(f"{kernel} says nothing about fusion: make it by launch.kernel")
    return others | {"enable_fp_fusion": kernel.fp_fusion}


def planned[Plan: Callable[..., Any]](launches: Plan) -> Plan:
    """Caches what a function makes for sizes and formats.

    The cache is bounded: a router may give an expert ever new numbers of tokens.
    """
    return lru_cache(4096)(launches)  # type: ignore[return-value]


def tiles(size: int, tile: int) -> int:
    """The number of tiles that cover `size` elements."""
    return -(-size // tile)


def in_words(x: Tensor) -> Tensor:
    """x, or a copy of it, whose elements are contiguous and begin at an even place: kernels read
    words of two."""
    if not x.is_contiguous() or x.data_ptr() % (2 * x.element_size()):
        return x.clone(memory_format=torch.contiguous_format)
    return x


def kept(
    make: Callable[..., Tensor], arguments: tuple[int, ...], like: Tensor, stream: int | None = None
) -> Tensor:
    """make(*arguments, device=like.device), made once for each stream of each GPU.

    While a CUDA graph is captured it is made in the graph and not kept: a graph's memory is used
    again by its other replays. stream: the handle of the current stream, if the caller has it.
    """
    device = like.device
    if device.type != "cuda":
        stream = 0
    elif torch._C._cuda_isCurrentStreamCapturing():
        return make(*arguments, device=device)
    elif stream is None:
        stream = torch._C._cuda_getCurrentRawStream(device.index)
    if current.recorder is None:  # as `lasting` does, in one call less
        return _kept(make, arguments, device, stream)
    return lasting(_kept, make, arguments, device, stream)


@lru_cache(256)
def _kept(
    make: Callable[..., Tensor], arguments: tuple[int, ...], device: torch.device, stream: int
) -> Tensor:
    return make(*arguments, device=device)


def _itself(x: Tensor) -> Tensor:
    return x


# The address of a tensor, for launches that take it several times. The tensor must live until the
# last of them. The interpreter takes the tensor itself.
address: Callable[[Tensor], Any] = _itself if INTERPRETED else Tensor.data_ptr


class Launch:
    """A kernel with its grid, the types of its arguments, its constants and options.

    types: one for each parameter that is no constant, in their order. A torch.dtype is a pointer to
        such elements, whatever the dtype of the tensor. An integer is the value of a size: the
        kernel is compiled for this size. NUMBER is an int32 that may differ between calls: one
        compiled kernel serves all its values. A (named) tuple of these is one parameter.
    constants: the values of the kernel's constants by name.
    options: num_warps, ...
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        types: Sequence[Any],
        constants: dict[str, Any],
        **options: Any,
    ) -> None:
        self.kernel, self.types, self.constants = kernel, tuple(types), constants
        self.options = options_of(kernel, **options)
        self._grid = (*grid, 1, 1)[:3]
        names = list(kernel.arg_names)[len(self.types) :]
        if sorted(names) != sorted(constants):  # the constants come last
            raise ValueError(f"{kernel}: its constants are {names}, not {list(constants)}")
        self._values = [constants[name] for name in names]
        self.flat_types = list(_flat(self.types))
        self._pointers = [
            i for i, kind in enumerate(self.flat_types) if isinstance(kind, torch.dtype)
        ]
        self._parameters = list(_slices(self.types))
        # By GPU, and whether all pointers are multiples of 16 bytes.
        self._compiled: dict[tuple[int, bool], _Compiled] = {}

    def __call__(self, where: torch.device, *arguments: Any) -> None:
        """Launches the kernel on the current stream of a GPU.

        arguments: tensors and integers in the order of `types`, without the tuples. A pointer may
        also be given as an `address`, or as None if the kernel does not read it.
        """
        if INTERPRETED:
            if current.recorder is not None:
                current.recorder.launched(self, arguments)
            self._interpret(arguments)
            return
        device, index = torch._C._cuda_getDevice(), where.index
        if index is not None and index != device:
            with torch.cuda.device(index):
                self(where, *arguments)
            return
        if current.recorder is not None:
            current.recorder.launched(self, arguments)
        places, given = 0, [*arguments]
        for i in self._pointers:
            each = given[i]
            if each is None:
                each = 0
            elif each.__class__ is not int:
                each = each.data_ptr()
            given[i] = each
            places |= each
        kind = device, places % 16 == 0
        if kind not in self._compiled:
            self._compiled[kind] = self._compile(aligned=kind[1])
        compiled, stream = self._compiled[kind], torch._C._cuda_getCurrentRawStream(device)
        flat = (*given,)  # slices of it are tuples, as Triton takes them
        nested = [flat[at] for at in self._parameters]
        if _HOOKS[0].calls or _HOOKS[1].calls:
            compiled.kernel[self._grid](*nested, *self._values, stream=stream)
            return
        compiled.launch(*self._grid, stream, *compiled.head, *nested, *self._values)

    def compiled(self, device: int, aligned: bool) -> Any:
        """What Triton compiles for a GPU: now, unless this launch has been called there.

        aligned: whether all pointers are multiples of 16 bytes. Raises LookupError in Triton's
        interpreter, which compiles nothing.
        """
        if INTERPRETED:
            raise LookupError("Triton interprets the kernels (TRITON_INTERPRET)")
        kind = device, aligned
        if kind not in self._compiled:
            with torch.cuda.device(device):
                self._compiled[kind] = self._compile(aligned)
        return self._compiled[kind].kernel

    @property
    def grid(self) -> tuple[int, ...]:
        """The number of programs along each of three axes."""
        return self._grid

    def _interpret(self, arguments: Sequence[Tensor | int | None]) -> None:
        """Runs the kernel in Triton's interpreter.

        On a GPU a pointer has the dtype that `types` gives, whatever the tensor's. The interpreter
        reads the dtype from the tensor, so tensors are viewed in the dtype of `types`. A GPU takes
        no number beyond int32, so that raises OverflowError here too.
        """
        for kind, argument in zip(self.flat_types, arguments, strict=True):
            if kind in NUMBERS and not -(2**31) <= cast(int, argument) < 2**31:
                raise OverflowError(f"{argument} is beyond int32, which a kernel takes")
        given = [
            argument.view(kind) if isinstance(argument, Tensor) else argument
            for kind, argument in zip(self.flat_types, arguments, strict=True)
        ]
        nested = [
            given[at] if isinstance(at, int) else _like(kind, given[at])
            for kind, at in zip(self.types, self._parameters, strict=True)
        ]
        self.kernel[self._grid](*nested, **self.constants, **self.options)

    def _compile(self, aligned: bool) -> _Compiled:
        """Compiles the kernel for the current GPU, and launches nothing."""
        made = self.kernel.warmup(
            *(_stand_in(each, aligned) for each in self.types),
            grid=self._grid, **self.constants, **self.options,
        )  # fmt: skip
        launch = made.run  # loads the kernel, and with it the function
        no_hooks = None, None, None
        if VERSION == (3, 6) and not launch.global_scratch_size + launch.profile_scratch_size:
            # What launch.__call__ passes on in this version, to a C function.
            flags = launch.launch_cooperative_grid, launch.launch_pdl
            head = made.function, *flags, None, None, made.packed_metadata, *no_hooks
            return _Compiled(made, launch.launch, head)
        return _Compiled(made, launch, (made.function, made.packed_metadata, *no_hooks))


class _Compiled(NamedTuple):
    """What Triton compiled. launch: called with grid, stream, `head` and the kernel's arguments."""

    kernel: Any
    launch: Any
    head: tuple[Any, ...]


class _Pointer:
    """Stands for a tensor when a kernel is compiled."""

    def __init__(self, dtype: torch.dtype, aligned: bool) -> None:
        self.dtype, self._address = dtype, 0 if aligned else 1

    def data_ptr(self) -> int:
        return self._address


def _stand_in(kind: Any, aligned: bool) -> Any:
    """An argument of this type (`Launch.types`), for which Triton is to compile a kernel."""
    if isinstance(kind, torch.dtype):
        return _Pointer(kind, aligned)
    if isinstance(kind, tuple):
        return _like(kind, [_stand_in(each, aligned) for each in kind])
    return _ANY_NUMBER if kind in NUMBERS else kind


def _like(kind: tuple[Any, ...], values: Sequence[Any]) -> tuple[Any, ...]:
    """A tuple of these values, with the names of `kind` if it is a named tuple."""
    return kind._make(values) if hasattr(kind, "_make") else tuple(values)


def _flat(types: Sequence[Any]) -> Iterator[Any]:
    """The types without the tuples."""
    for kind in types:
        if isinstance(kind, tuple):
            yield from kind
        else:
            yield kind


def _slices(types: Sequence[Any]) -> Iterator[int | slice]:
    """Where the parameters stand among the arguments: an index, or the slice of a tuple."""
    start = 0
    for kind in types:
        size = len(kind) if isinstance(kind, tuple) else 1
        yield slice(start, start + size) if isinstance(kind, tuple) else start
        start += size
