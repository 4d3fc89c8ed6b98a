"""The numbers by which cuBLASLt is called, against NVIDIA's headers, and the calls themselves
without a GPU."""

import ctypes
import itertools
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import nvidia
import pytest
import torch

from megatron_fp4.kernels import cublaslt
from megatron_fp4.multipliers.hopper import Hopper
from megatron_fp4.operands import Decoded

INCLUDES = [file.parent for path in nvidia.__path__ for file in Path(path).rglob("cublasLt.h")]


def header(name: str) -> str:
    if not INCLUDES:
        pytest.skip("no cuBLAS headers beside this torch")
    return (INCLUDES[0] / name).read_text()


@pytest.mark.parametrize(
    ("file", "name", "value"),
    [
        ("cublasLt.h", "CUBLASLT_MATMUL_DESC_TRANSA", cublaslt._TRANSA),
        ("cublasLt.h", "CUBLASLT_MATMUL_DESC_A_SCALE_POINTER", cublaslt._A_SCALE),
        ("cublasLt.h", "CUBLASLT_MATMUL_DESC_B_SCALE_POINTER", cublaslt._B_SCALE),
        ("cublasLt.h", "CUBLASLT_MATMUL_DESC_FAST_ACCUM", cublaslt._FAST_ACCUM),
        ("cublasLt.h", "CUBLASLT_MATMUL_DESC_A_SCALE_MODE", cublaslt._A_MODE),
        ("cublasLt.h", "CUBLASLT_MATMUL_DESC_B_SCALE_MODE", cublaslt._B_MODE),
        ("cublasLt.h", "CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F", cublaslt._OUTER_VECTOR),
        ("cublasLt.h", "CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES", cublaslt._WORKSPACE_BYTES),
        ("cublasLt.h", "CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES", cublaslt._ALIGNMENTS[0]),
        ("cublasLt.h", "CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES", cublaslt._ALIGNMENTS[3]),
        ("cublas_api.h", "CUBLAS_COMPUTE_32F", cublaslt._COMPUTE_32F),
        ("cublas_api.h", "CUBLAS_OP_T", cublaslt._TRANSPOSED),
        ("library_types.h", "CUDA_R_32F", cublaslt._TYPES[torch.float32]),
        ("library_types.h", "CUDA_R_16BF", cublaslt._TYPES[torch.bfloat16]),
        ("library_types.h", "CUDA_R_8F_E4M3", cublaslt._TYPES[torch.float8_e4m3fn]),
        ("library_types.h", "CUDA_R_8F_E5M2", cublaslt._TYPES[torch.float8_e5m2]),
    ],
)
def test_numbers_are_nvidia_s(file: str, name: str, value: int) -> None:
    found = re.search(rf"\b{name}\s*=\s*(\d+)", header(file))
    assert found is not None and int(found[1]) == value


@pytest.mark.parametrize("name", cublaslt._ARGUMENTS)
def test_a_function_s_arguments_are_as_many_as_nvidia_s(name: str) -> None:
    """ctypes passes arguments without a type as 32-bit integers, which cuts addresses off."""
    declared = re.search(rf"CUBLASWINAPI {name}\((.*?)\);", header("cublasLt.h"), re.S)
    assert declared is not None
    parameters = declared[1].split(",")
    types = cublaslt._ARGUMENTS[name]
    assert len(types) == len(parameters)
    for declaration, kind in zip(parameters, types, strict=True):
        is_size = "size_t" in declaration
        is_attribute = "Attributes_t" in declaration
        wanted = ctypes.c_size_t if is_size else ctypes.c_int if is_attribute else ctypes.c_void_p
        assert kind is wanted, declaration


def test_the_heuristic_s_result_has_its_size() -> None:
    text = header("cublasLt.h")
    end = text.index("} cublasLtMatmulHeuristicResult_t")
    fields = re.sub(r"/\*.*?\*/", "", text[text.rindex("typedef struct", 0, end) : end], flags=re.S)
    assert re.findall(r"^\s+(\w+) \w+(?:\[(\d+)\])?;", fields, re.M) == [
        ("cublasLtMatmulAlgo_t", ""), ("size_t", ""), ("cublasStatus_t", ""), ("float", ""),
        ("int", "4"),
    ]  # fmt: skip
    assert re.search(r"uint64_t data\[8\];\s*} cublasLtMatmulAlgo_t;", text)
    assert ctypes.sizeof(cublaslt._Heuristic) == 64 + 8 + 4 + 4 + 16


def test_a_plan_is_made_once_for_a_factor_and_the_scales_are_each_call_s(monkeypatch: Any) -> None:
    calls: list[tuple[str, tuple[Any, ...]]] = []

    def function(name: str) -> Any:
        def call(*arguments: Any) -> int:
            calls.append((name, arguments))
            if name == "cublasLtMatmulAlgoGetHeuristic":
                arguments[-1]._obj.value = 1  # one algorithm
            return 0

        return call

    monkeypatch.setattr(cublaslt, "_function", function)
    cublaslt._plan.cache_clear()
    a, b = torch.zeros(32, 64).to(torch.float8_e5m2), torch.zeros(48, 64).to(torch.float8_e4m3fn)
    out, rows, columns = torch.zeros(32, 48), torch.ones(32, 1), torch.ones(48, 1)
    forms = Decoded(a, rows), Decoded(b, columns)
    for alpha in (1.0, 2.0, 2.0):
        assert Hopper().multiply(*forms, alpha, out.dtype, into=out) is out
    names = [name for name, _ in calls]
    assert names.count("cublasLtMatmulAlgoGetHeuristic") == 2  # one for each alpha
    products = [arguments for name, arguments in calls if name == "cublasLtMatmul"]
    assert [arguments[2]._obj.value for arguments in products] == [1.0, 2.0, 2.0]
    for arguments in products:  # cuBLAS's A is b, its B is a, and C is D, with beta 1
        addresses = [arguments[i] for i in (3, 5, 8, 10)]
        assert addresses == [t.data_ptr() for t in (b, a, out, out)]
        assert arguments[7]._obj.value == 1.0 and len(arguments) == 16
    layouts = [args[1:] for name, args in calls if name == "cublasLtMatrixLayoutCreate"]
    # Columns first: type, rows, columns, leading dimension.
    assert [[getattr(x, "value", x) for x in layout] for layout in layouts] == [
        [28, 64, 48, 64], [29, 64, 32, 64], [0, 48, 32, 48],
    ] * 2  # fmt: skip
    cublaslt._plan.cache_clear()
    cublaslt._handle.cache_clear()


def test_the_descriptors_of_a_plan_are_destroyed_with_it(monkeypatch: Any) -> None:
    alive: set[int] = set()
    handles = itertools.count(1)

    def function(name: str) -> Any:
        def call(*arguments: Any) -> int:
            if name in ("cublasLtMatmulDescCreate", "cublasLtMatrixLayoutCreate"):
                arguments[0]._obj.value = next(handles)
                alive.add(arguments[0]._obj.value)
            if name in ("cublasLtMatmulDescDestroy", "cublasLtMatrixLayoutDestroy"):
                alive.remove(arguments[0].value)
            if name == "cublasLtMatmulAlgoGetHeuristic":
                arguments[-1]._obj.value = 1
            return 0

        return call

    monkeypatch.setattr(cublaslt, "_function", function)
    monkeypatch.setattr(cublaslt, "_plan", lru_cache(2)(cublaslt._Plan))

    def plan(rows: int) -> None:
        fp8 = torch.float8_e4m3fn
        cublaslt._plan((rows, 32, 64), (fp8, fp8, torch.bfloat16), 1.0, False, 16, 0)

    plan(16)
    first = set(alive)
    plan(32)
    assert len(alive) == 8
    plan(16)  # so that the other is the least recently used
    plan(48)
    assert len(alive) == 8 and first < alive
    cublaslt._plan.cache_clear()
    assert not alive
    cublaslt._handle.cache_clear()
