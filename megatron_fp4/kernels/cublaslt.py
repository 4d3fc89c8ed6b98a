"""FP8 products by cuBLASLt, which torch._scaled_mm calls too but not all of it: sums that go into a
float32 matrix that is there already (beta = 1), and a scale for each row with float32 output.

    D[i, j] = alpha a_scale[i] b_scale[j] sum_k a[i, k] b[j, k] + beta D[i, j]

cuBLAS counts columns first, so that D is computed as its transpose: its A is b and its B is a.
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
from functools import cache
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from megatron_fp4.kernels.launch import kept, on, stream_of

# Of cublasLt.h and library_types.h; the values have not changed since CUDA 12.
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
# Of a preference: bytes of workspace, and the alignments of A, B, C and D.
_WORKSPACE_BYTES, _ALIGNMENTS = 1, (5, 6, 7, 8)
WORKSPACE = 32 << 20  # what NVIDIA recommends for Hopper
_WORKSPACE, _EIGHT = c_size_t(WORKSPACE), c_size_t(8)  # as arguments


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
    """The one that torch has loaded."""
    assert torch.version.cuda is not None
    return ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}")


def version() -> tuple[int, int]:
    """Major and minor."""
    major, rest = divmod(_library().cublasLtGetVersion(), 10_000)
    return major, rest // 100


@cache
def _function(name: str) -> Any:
    return getattr(_library(), name)


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
    """Descriptors and algorithm for one kind of product."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        types: tuple[torch.dtype, torch.dtype, torch.dtype],
        accumulates: bool,
        alignment: int,
        device: int,
    ) -> None:
        m, n, k = shape
        a, b, out = (_TYPES[dtype] for dtype in types)
        self.operation = c_void_p()
        self._places = c_uint64(), c_uint64()
        self._scales = [(_A_SCALE, byref(self._places[0])), (_B_SCALE, byref(self._places[1]))]
        _call(
            "cublasLtMatmulDescCreate", byref(self.operation), _COMPUTE_32F, _TYPES[torch.float32]
        )
        self._set(_TRANSA, c_int32(_TRANSPOSED))
        # Fast sums keep some fourteen bits: an error of 1e-3, where 2e-4 is allowed.
        self._set(_FAST_ACCUM, c_int8(0))
        self._set(_A_MODE, c_int32(_OUTER_VECTOR))
        self._set(_B_MODE, c_int32(_OUTER_VECTOR))
        self.a, self.b, self.out = _layout(b, k, n), _layout(a, k, m), _layout(out, n, m)
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
        # The heuristic asks whether there are scales at all.
        self._scaled(1 << 20, 1 << 20)
        _call(
            "cublasLtMatmulAlgoGetHeuristic", self.handle, self.operation, self.a, self.b,
            self.out, self.out, preference, 1, byref(found), byref(count),
        )  # fmt: skip
        _call("cublasLtMatmulPreferenceDestroy", preference)
        if not count.value or found.state:
            raise CublasError(f"cuBLASLt has no algorithm for {shape} {types}")
        self._found, beta = found, c_float(1.0 if accumulates else 0.0)
        self._algorithm, self._beta = byref(found.algorithm), byref(beta)
        self._lock = Lock()

    def _set(self, attribute: int, value: ctypes._SimpleCData) -> None:  # type: ignore[type-arg]
        _call(
            "cublasLtMatmulDescSetAttribute", self.operation, attribute, byref(value),
            c_size_t(ctypes.sizeof(value)),
        )  # fmt: skip

    def _scaled(self, a: int, b: int) -> None:
        """Scales lie at these addresses: cuBLAS's A is our b."""
        first, second = self._places
        first.value, second.value = b, a
        for attribute, place in self._scales:
            _call("cublasLtMatmulDescSetAttribute", self.operation, attribute, place, _EIGHT)

    def run(
        self, places: tuple[int, int, int, int, int], stream: int, workspace: int, alpha: float
    ) -> None:
        """Launch it. places: the addresses of a, b, their scales and the output."""
        a, b, a_scale, b_scale, out = places
        factor, to, (first, second) = c_float(alpha), c_void_p(out), self._places
        with self._lock:  # the scales' addresses are the descriptor's; cuBLAS's A is our b
            first.value, second.value = b_scale, a_scale
            for attribute, place in self._scales:
                _call("cublasLtMatmulDescSetAttribute", self.operation, attribute, place, _EIGHT)
            _call(
                "cublasLtMatmul", self.handle, self.operation,
                byref(factor), c_void_p(b), self.a, c_void_p(a), self.b,
                self._beta, to, self.out, to, self.out,
                self._algorithm, c_void_p(workspace), _WORKSPACE, c_void_p(stream),
            )  # fmt: skip


def _layout(dtype: int, rows: int, columns: int) -> c_void_p:
    layout = c_void_p()
    _call(
        "cublasLtMatrixLayoutCreate", byref(layout), dtype, c_uint64(rows), c_uint64(columns),
        c_int64(rows),
    )  # fmt: skip
    return layout


def _bytes(count: int, device: torch.device) -> Tensor:
    return torch.empty(count, dtype=torch.uint8, device=device)


_plan = cache(_Plan)


def product(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    out: Tensor,
    *,
    alpha: float = 1.0,
    accumulates: bool = False,
) -> Tensor:
    """a [M, K], b [N, K]: FP8, not both E5M2; a_scale [M], b_scale [N]: float32; out [M, N]: BF16
    or float32, written or added to. All are row-major, and M, N and K multiples of 16. Returns out.

    Raises CublasError where the library has no algorithm for it.
    """
    places = a.data_ptr(), b.data_ptr(), a_scale.data_ptr(), b_scale.data_ptr(), out.data_ptr()
    at = places[0] | places[1] | places[4]
    types, alignment = (a.dtype, b.dtype, out.dtype), min(at & -at, 256)
    (m, k), (n, _) = a.shape, b.shape
    # A handle is made for the current device, and a product runs on it.
    with on(a):
        plan = _plan((m, n, k), types, accumulates, alignment, a.device.index)
        plan.run(places, stream_of(a), kept(_bytes, WORKSPACE, a).data_ptr(), alpha)
    return out
