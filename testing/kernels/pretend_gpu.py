"""A pretended Hopper GPU, whose memory is the CPU's.

Triton's interpreter runs the kernels and torch's matmul the products of cuBLASLt. Both take plain
addresses, as on a GPU, from Python or from C++. Needs TRITON_INTERPRET=1.
"""

from __future__ import annotations

import ctypes
import itertools
from argparse import Namespace
from ctypes import CFUNCTYPE, c_float, c_int, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from megatron_fp4.cpp import lowering
from megatron_fp4.kernels import carrier, cublaslt, launch, quantize
from megatron_fp4.kernels.launch import NUMBERS, Launch, _like
from megatron_fp4.plan import cache as plan_cache
from megatron_fp4.target import Target

_DTYPES = {number: dtype for dtype, number in cublaslt._TYPES.items()}
_launches: list[Launch] = []  # by the number that stands for the driver's handle
_objects: dict[int, dict[str, Any]] = {}  # descriptors and layouts of cuBLASLt, by their handles
_handles = itertools.count(1)
scratch = 2  # pointers that follow the parameters of what is compiled, as in Triton 3.6


def install() -> None:
    """Makes this process plan all linears for the pretended GPU."""
    patched: Any = Launch
    patched._interpret, patched.compiled = _interpret, _compiled
    for module in (launch, quantize, carrier):
        patched = module
        patched.address = Tensor.data_ptr
    patched = cublaslt
    patched._function = _FUNCTIONS.__getitem__
    patched = plan_cache
    patched.target_of = lambda device: Target("cuda", (9, 0), None)
    patched = lowering
    patched.driver_launch = lambda: ctypes.cast(_launch_kernel, c_void_p).value


def memory(address: int, size: int) -> Tensor:
    """The bytes at an address: uint8 [size]. The memory must outlive the tensor."""
    return torch.frombuffer((ctypes.c_byte * size).from_address(address), dtype=torch.uint8)


# --- kernels ------------------------------------------------------------------------------------


def _interpret(self: Launch, arguments: Any) -> None:
    """As `Launch._interpret`, for pointers that are addresses too."""
    given = []
    for argument, kind in zip(arguments, self.flat_types, strict=True):
        if isinstance(kind, torch.dtype) and isinstance(argument, int):
            argument = memory(argument, 16) if argument else None  # the kernel knows the size
        given.append(argument.view(kind) if isinstance(argument, Tensor) else argument)
    nested = [
        given[at] if isinstance(at, int) else _like(kind, given[at])
        for kind, at in zip(self.types, self._parameters, strict=True)
    ]
    with _disable_current_modes():  # the interpreter's operators are none of the linear's
        self.kernel[self._grid](*nested, **self.constants, **self.options)


def _compiled(self: Launch, device: int, aligned: bool) -> Namespace:
    """As `Launch.compiled`. Of the PTX there are only the parameters."""
    _launches.append(self)
    kinds = [kind for kind in self.flat_types if kind != 1]
    sizes = [64 if isinstance(kind, torch.dtype) else 32 for kind in kinds] + [64] * scratch
    ptx = "\n".join(f".param .u{size} kernel_param_{i}," for i, size in enumerate(sizes))
    metadata = Namespace(num_warps=1, shared=0)
    return Namespace(function=len(_launches) - 1, metadata=metadata, asm={"ptx": ptx})


@CFUNCTYPE(c_int, c_void_p, *(ctypes.c_uint,) * 7, c_void_p, c_void_p, c_void_p)
def _launch_kernel(function: Any, *others: Any) -> int:
    """cuLaunchKernel."""
    start = _launches[function or 0]
    kinds = [kind for kind in start.flat_types if kind != 1]
    cells = iter((c_void_p * len(kinds)).from_address(others[-2]))
    arguments: list[Any] = []
    for kind in start.flat_types:
        if isinstance(kind, int) and kind == 1:
            arguments.append(1)
            continue
        number = c_int32 if kind in NUMBERS else c_int64
        arguments.append(number.from_address(next(cells)).value)  # type: ignore[arg-type]
    _interpret(start, arguments)
    return 0


# --- cuBLASLt -----------------------------------------------------------------------------------


def _made(out: int, **fields: Any) -> int:
    handle = next(_handles)
    _objects[handle] = fields
    c_uint64.from_address(out).value = handle
    return 0


@CFUNCTYPE(c_int, c_void_p)
def _create(out: int) -> int:
    return _made(out)


@CFUNCTYPE(c_int, c_void_p, c_int, c_int)
def _create_operation(out: int, compute: int, scale: int) -> int:
    return _made(out)


@CFUNCTYPE(c_int, c_void_p, c_int, c_uint64, c_uint64, c_int64)
def _create_layout(out: int, dtype: int, rows: int, columns: int, stride: int) -> int:
    return _made(out, dtype=_DTYPES[dtype], rows=rows, columns=columns)


@CFUNCTYPE(c_int, c_void_p)
def _nothing(given: int) -> int:
    return 0


@CFUNCTYPE(c_int, c_void_p)
def _destroy(handle: int) -> int:
    del _objects[handle]
    return 0


@CFUNCTYPE(c_int, c_void_p, c_int, c_void_p, c_size_t)
def _set(handle: int, attribute: int, value: int, size: int) -> int:
    if size == 8:
        _objects[handle][str(attribute)] = c_uint64.from_address(value).value
    return 0


@CFUNCTYPE(c_int, *(c_void_p,) * 7, c_int, c_void_p, c_void_p)
def _find(*arguments: Any) -> int:
    c_int.from_address(arguments[-1]).value = 1  # one algorithm is found
    return 0


@CFUNCTYPE(c_int, *(c_void_p,) * 14, c_size_t, c_void_p)
def _matmul(
    handle: int, operation: int, alpha: int, b: int, b_form: int, a: int, a_form: int, beta: int,
    c: int, c_form: int, out: int, out_form: int, *others: Any,
) -> int:  # fmt: skip
    with _disable_current_modes():
        _multiply(_objects[operation], alpha, b, b_form, a, a_form, beta, out, out_form)
    return 0


def _multiply(
    described: dict[str, int], alpha: int, b: int, b_form: int, a: int, a_form: int, beta: int,
    out: int, out_form: int,
) -> None:  # fmt: skip
    first, second = _matrix(a, a_form).float(), _matrix(b, b_form).float()
    scales = [
        memory(described[str(attribute)], 4 * len(matrix)).view(torch.float32)
        for attribute, matrix in ((cublaslt._B_SCALE, first), (cublaslt._A_SCALE, second))
    ]
    found = first @ second.t() * scales[0][:, None] * scales[1] * c_float.from_address(alpha).value
    written = _matrix(out, out_form)
    adds = c_float.from_address(beta).value
    written.copy_(written + found if adds else found)


def _matrix(address: int, layout: int) -> Tensor:
    """A matrix by its layout, row-major: [columns, rows] of cuBLAS."""
    form = _objects[layout]
    rows, columns, dtype = form["columns"], form["rows"], form["dtype"]
    return memory(address, rows * columns * dtype.itemsize).view(dtype).view(rows, columns)


_FUNCTIONS: dict[str, Any] = {
    "cublasLtCreate": _create,
    "cublasLtMatmulDescCreate": _create_operation,
    "cublasLtMatrixLayoutCreate": _create_layout,
    "cublasLtMatmulPreferenceCreate": _create,
    "cublasLtMatmulPreferenceSetAttribute": _set,
    "cublasLtMatmulDescSetAttribute": _set,
    "cublasLtMatmulDescDestroy": _destroy,
    "cublasLtMatrixLayoutDestroy": _destroy,
    "cublasLtMatmulPreferenceDestroy": _nothing,
    "cublasLtMatmulAlgoGetHeuristic": _find,
    "cublasLtMatmul": _matmul,
}
