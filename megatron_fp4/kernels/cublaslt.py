"""FP8 GEMMs on tensor cores by cuBLASLt.

    D[i, j] = alpha a_scale[i] b_scale[j] sum_k a[i, k] b[j, k] + beta D[i, j]

torch._scaled_mm calls cuBLASLt too, but cannot add to a float32 matrix (beta = 1), nor write
float32 with a scale for each row. cuBLAS matrices are column-major, so it computes the transpose of
D: its A is b and its B is a.
"""

from __future__ import annotations

import ctypes
from ctypes import (
    byref,
    c_float,
    c_int,
    c_int8,
    c_int32,
    c_int64,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
)
from functools import cache, lru_cache
from threading import Lock
from typing import Any, NamedTuple
from weakref import finalize

import torch
from torch import Tensor

from megatron_fp4.kernels.launch import kept
from megatron_fp4.recording import current

# Values of cublasLt.h and library_types.h, unchanged since CUDA 12.
_TYPES = {
    torch.float32: 0,
    torch.bfloat16: 14,
    torch.float8_e4m3fn: 28,
    torch.float8_e5m2: 29,
}
_COMPUTE_32F = 68
_TRANSPOSED = 1
_OUTER_VECTOR = 3  # CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F
_TRANSA, _A_SCALE, _B_SCALE, _FAST_ACCUM, _A_MODE, _B_MODE = 3, 17, 18, 25, 31, 32
# Attributes of a preference: bytes of workspace, and the alignments of A, B, C and D.
_WORKSPACE_BYTES, _ALIGNMENTS = 1, (5, 6, 7, 8)
WORKSPACE = 32 << 20  # what NVIDIA recommends for Hopper


class _Heuristic(ctypes.Structure):
    _fields_ = [
        ("algorithm", c_uint64 * 8),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    ]


class CublasError(RuntimeError):
    """cuBLASLt refused a product."""


@cache
def _library() -> ctypes.CDLL:
    """The library that torch has loaded."""
    assert torch.version.cuda is not None
    return ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}")


def version() -> tuple[int, int]:
    """Major and minor."""
    major, rest = divmod(_library().cublasLtGetVersion(), 10_000)
    return major, rest // 100


@cache
def _function(name: str) -> Any:
    """A function of the library. The two that each product calls take plain integers."""
    function = getattr(_library(), name)
    function.argtypes = _ARGUMENTS.get(name)
    return function


_ARGUMENTS = {
    "cublasLtMatmulDescSetAttribute": [c_void_p, c_int, c_void_p, c_size_t],
    "cublasLtMatmul": [c_void_p] * 14 + [c_size_t, c_void_p],
}


def _call(name: str, *arguments: object) -> None:
    status = _function(name)(*arguments)
    if status:
        raise CublasError(f"{name}: status {status}")


@cache
def _handle(device: int) -> c_void_p:
    handle = c_void_p()
    _call("cublasLtCreate", byref(handle))
    return handle


class _Plan:
    """Descriptors and algorithm for products of one shape, of these dtypes of a, b and D.

    accumulates: whether beta is 1. alignment: of a, b and D, in bytes. The descriptors are
    destroyed with the object.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        types: tuple[torch.dtype, torch.dtype, torch.dtype],
        alpha: float,
        accumulates: bool,
        alignment: int,
        device: int,
    ) -> None:
        m, n, k = shape
        a, b, out = (_TYPES[dtype] for dtype in types)
        self.operation = c_void_p()
        self._places = c_uint64(), c_uint64()  # of the scales
        self._attributes = [(_A_SCALE, byref(self._places[0])), (_B_SCALE, byref(self._places[1]))]
        self._set_attribute = _function("cublasLtMatmulDescSetAttribute")
        self._multiply = _function("cublasLtMatmul")
        _call(
            "cublasLtMatmulDescCreate", byref(self.operation), _COMPUTE_32F, _TYPES[torch.float32]
        )
        self._destroy("cublasLtMatmulDescDestroy", self.operation)
        self._set(_TRANSA, c_int32(_TRANSPOSED))
        # Fast sums keep about fourteen bits: an error of 1e-3, where 2e-4 is allowed.
        self._set(_FAST_ACCUM, c_int8(0))
        self._set(_A_MODE, c_int32(_OUTER_VECTOR))
        self._set(_B_MODE, c_int32(_OUTER_VECTOR))
        self.a, self.b, self.out = _layout(b, k, n), _layout(a, k, m), _layout(out, n, m)
        for layout in (self.a, self.b, self.out):
            self._destroy("cublasLtMatrixLayoutDestroy", layout)
        self.handle, found, count = _handle(device), _Heuristic(), c_int()
        preference = c_void_p()
        _call("cublasLtMatmulPreferenceCreate", byref(preference))
        wanted: dict[int, Any] = {_WORKSPACE_BYTES: c_uint64(WORKSPACE)}
        wanted |= {attribute: c_uint32(alignment) for attribute in _ALIGNMENTS}
        for attribute, value in wanted.items():
            _call(
                "cublasLtMatmulPreferenceSetAttribute", preference, attribute, byref(value),
                c_size_t(ctypes.sizeof(value)),
            )  # fmt: skip
        for scale, (attribute, place) in zip(self._places, self._attributes, strict=True):
            scale.value = 1 << 20  # the heuristic asks whether there are scales
            _call("cublasLtMatmulDescSetAttribute", self.operation, attribute, place, 8)
        _call(
            "cublasLtMatmulAlgoGetHeuristic", self.handle, self.operation, self.a, self.b,
            self.out, self.out, preference, 1, byref(found), byref(count),
        )  # fmt: skip
        _call("cublasLtMatmulPreferenceDestroy", preference)
        if not count.value or found.state:
            raise CublasError(f"cuBLASLt has no algorithm for {shape} {types}")
        self._found = found
        self._factors = c_float(alpha), c_float(1.0 if accumulates else 0.0)
        self._alpha, self._beta = map(byref, self._factors)
        self._algorithm = byref(found.algorithm)
        self._lock = Lock()

    def _set(self, attribute: int, value: ctypes._SimpleCData) -> None:  # type: ignore[type-arg]
        size = c_size_t(ctypes.sizeof(value))
        _call("cublasLtMatmulDescSetAttribute", self.operation, attribute, byref(value), size)

    def _destroy(self, name: str, made: c_void_p) -> None:
        """Has `made` destroyed by this function when nothing refers to the plan any more."""
        finalize(self, _function(name), made).atexit = False  # the process ends with all of it

    def numbers(self) -> dict[str, Any]:
        """What a program in C++ needs for the product: addresses of functions of cuBLASLt, of the
        descriptors and the algorithm, and numbers."""
        return dict(
            set_attribute=_address(_function("cublasLtMatmulDescSetAttribute")),
            multiply=_address(_function("cublasLtMatmul")),
            handle=self.handle.value or 0,
            operation=self.operation.value or 0,
            a_layout=self.a.value or 0,
            b_layout=self.b.value or 0,
            out_layout=self.out.value or 0,
            algorithm=ctypes.addressof(self._found.algorithm),
            a_scale_attribute=_A_SCALE,
            b_scale_attribute=_B_SCALE,
            alpha=self._factors[0].value,
            beta=self._factors[1].value,
            workspace_bytes=WORKSPACE,
        )

    def run(self, places: tuple[int, int, int, int, int], stream: int, workspace: int) -> None:
        """Launches the product. places: the addresses of a, b, their scales and D."""
        a, b, a_scale, b_scale, out = places
        first, second = self._places
        with self._lock:  # other threads share the descriptor
            first.value, second.value = b_scale, a_scale  # cuBLAS's A is our b
            for attribute, place in self._attributes:
                if status := self._set_attribute(self.operation, attribute, place, 8):
                    raise CublasError(f"cublasLtMatmulDescSetAttribute: status {status}")
            status = self._multiply(
                self.handle, self.operation, self._alpha, b, self.a, a, self.b, self._beta,
                out, self.out, out, self.out, self._algorithm, workspace, WORKSPACE, stream,
            )  # fmt: skip
        if status:
            raise CublasError(f"cublasLtMatmul: status {status}")


def _address(function: Any) -> int:
    return ctypes.cast(function, c_void_p).value or 0


def _layout(dtype: int, rows: int, columns: int) -> c_void_p:
    layout = c_void_p()
    _call(
        "cublasLtMatrixLayoutCreate", byref(layout), dtype, c_uint64(rows), c_uint64(columns),
        c_int64(rows),
    )  # fmt: skip
    return layout


# A router may give an expert ever new numbers of tokens. The least recently used are dropped.
_plan = lru_cache(4096)(_Plan)


def _bytes(count: int, *, device: torch.device) -> Tensor:
    """Uninitialized memory."""
    return torch.empty(count, dtype=torch.uint8, device=device)


# A matrix [rows, K] of a product: its address and FP8 dtype, the address of its row scales, float32
# [rows], and the tensor that holds these.
ScaledMatrix = tuple[int, torch.dtype, int, Tensor]


def multiply(
    a: ScaledMatrix,
    b: ScaledMatrix,
    shape: tuple[int, int, int],
    out: Tensor,
    alpha: float = 1.0,
    accumulates: bool = False,
) -> None:
    """Multiplies two FP8 matrices: out = alpha * a @ b.T, with the scales of their rows.

    a: [M, K]. b: [N, K]. Both are row-major and not both E5M2, and must live until it returns.
    shape: (M, N, K), multiples of 16.
    out: [M, N], row-major, BF16 or float32.
    accumulates: the product is added to `out`.

    Raises CublasError if the library has no algorithm for it.
    """
    device = out.device
    index = device.index
    if index is not None and index != torch._C._cuda_getDevice():  # cuBLAS uses the current GPU
        with torch.cuda.device(device):
            multiply(a, b, shape, out, alpha, accumulates)
        return
    first, a_type, a_scales, _ = a
    second, b_type, b_scales, _ = b
    place = out.data_ptr()
    at = first | second | place
    alignment = at & -at if at % 256 else 256
    types = a_type, b_type, out.dtype
    plan = _plan(shape, types, alpha, accumulates, alignment, index)
    stream = 0 if index is None else torch._C._cuda_getCurrentRawStream(index)
    workspace = kept(_bytes, (WORKSPACE,), out, stream)  # a graph's own must live until the launch
    room = workspace.data_ptr()
    plan.run((first, second, a_scales, b_scales, place), stream, room)
    if current.recorder is not None:
        addresses = dict(
            a=first, b=second, a_scale=a_scales, b_scale=b_scales, out=place, workspace=room
        )
        form = shape, types, alpha, accumulates, alignment, index
        current.recorder.multiplied(LaunchedProduct(form, addresses))


class LaunchedProduct(NamedTuple):
    """A product that was launched.

    form: the arguments of its `_Plan`. addresses: of a, b, their scales, out and the workspace, by
    these names.
    """

    form: tuple[Any, ...]
    addresses: dict[str, int]

    def descriptors(self) -> tuple[_Plan, dict[str, Any]]:
        """(owner, descriptors): new descriptors for such products, as plain numbers by name.

        The products of `_plan` share theirs, and change them under a lock.
        """
        plan = _Plan(*self.form)
        return plan, plan.numbers()
