"""NVFP4 GEMMs by Transformer Engine's GEMM, without the GPU and the package that they need: a
stand-in decodes what it is given and multiplies in float64."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_fp4 import Quantizer, get_quantizer
from megatron_fp4.arithmetic.quantize import quantize_matrix
from megatron_fp4.arithmetic.quantized_tensor import QuantizedTensor
from megatron_fp4.arithmetic.quantizer import NVFP4
from megatron_fp4.multipliers import blackwell, choose, nvfp4
from megatron_fp4.multipliers.nvfp4 import TRIED, Nvfp4, problem_on
from megatron_fp4.operands import Made
from megatron_fp4.target import Target, target_of
from testing.builders import te_stand_in
from testing.builders.products import asked
from testing.oracles import normal, relative_error

CPU, GPU = torch.device("cpu"), torch.device("cuda")
Gemm = Callable[..., Any]


@pytest.fixture(autouse=True)
def stand_in() -> Iterator[None]:
    problem_on.cache_clear()
    with te_stand_in.stand_in():
        yield
    problem_on.cache_clear()


def decoded(stored: Any) -> Tensor:
    """float64 [rows, K] as Transformer Engine documents it: code * block scale * amax / 2688."""
    assert stored.columnwise_data is None and not stored.with_gemm_swizzled_scales
    codes, scales = stored.rowwise_data.numpy(), stored.rowwise_scale_inv.numpy()
    rows, k = codes.shape[0], 2 * codes.shape[1]
    assert scales.shape == (-(-rows // 128) * 128, -(-k // 64) * 4) and scales.dtype == np.uint8
    assert stored.amax_rowwise.shape == (1,) and stored.amax_rowwise.dtype == torch.float32
    nibbles = np.stack((codes & 15, codes >> 4), -1).reshape(rows, k)
    elements = nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    blocks = scales[:rows, : k // 16].copy().view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    values = torch.from_numpy(elements * blocks.repeat(16, 1))
    return values * (stored.amax_rowwise.double() / 2688)


def general_gemm(
    A: Any,
    B: Any,
    out_dtype: Any = None,
    layout: str = "TN",
    out: Tensor | None = None,
    accumulate: bool = False,
) -> tuple[Any, ...]:
    assert layout == "TN" and accumulate == (out is not None)
    made = decoded(B) @ decoded(A).t()
    if out is None:
        return made.to(out_dtype), None, None, None
    assert out.dtype == out_dtype
    return out.add_(made), None, None, None


def overwrites(A: Any, B: Any, **kwargs: Any) -> tuple[Any, ...]:
    if kwargs["out"] is not None:
        kwargs["out"].zero_()
    return general_gemm(A, B, **kwargs)


def without_tensor_scales(A: Any, B: Any, **kwargs: Any) -> tuple[Any, ...]:
    for stored in (A, B):
        stored.amax_rowwise = torch.full((1,), 2688.0)
    return general_gemm(A, B, **kwargs)


def raises(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    raise RuntimeError("cuBLASLt: no algorithm\nand a stack")


@pytest.fixture
def gemm(monkeypatch: pytest.MonkeyPatch) -> Callable[[Gemm], list[int]]:
    """Makes a function Transformer Engine's GEMM; returns its calls."""

    def install(function: Gemm) -> list[int]:
        from transformer_engine.pytorch import cpp_extensions

        calls: list[int] = []

        def counted(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            return function(*args, **kwargs)

        monkeypatch.setattr(cpp_extensions, "general_gemm", counted)
        return calls

    return install


def quantized(rows: int, k: int, seed: int, quantizer: Quantizer = NVFP4) -> QuantizedTensor:
    return quantize_matrix(
        3 * normal((rows, k), seed) * normal((rows, 1), seed + 9).exp(), quantizer, axis=1
    )


@pytest.mark.parametrize(
    "quantizer",
    [
        NVFP4,
        get_quantizer("nvfp4-four-over-six"),
        get_quantizer("nvfp4-17-16"),
        replace(NVFP4, tensor_max=0.0),
    ],
)
@pytest.mark.parametrize("correction", [1.0, 16 / 9])
@pytest.mark.parametrize("shape", TRIED, ids=str)
def test_products(
    quantizer: Quantizer,
    correction: float,
    shape: tuple[int, int, int],
    gemm: Callable[[Gemm], list[int]],
) -> None:
    calls = gemm(general_gemm)
    m, n, k = shape
    a, b = quantized(m, k, 1, quantizer), quantized(n, k, 2, quantizer)
    expected = correction * a.dequantize(torch.float64) @ b.dequantize(torch.float64).t()
    assert Nvfp4().decode([Made(a)], ["x"], torch.bfloat16)[0] is a
    found = Nvfp4().multiply(a, b, correction, torch.bfloat16)
    assert found.dtype == torch.bfloat16 and relative_error(found, expected) < 2**-8
    into = torch.full((m, n), 3.0)
    assert Nvfp4().multiply(a, b, correction, torch.bfloat16, into) is into
    assert relative_error(into, expected + 3.0) < 1e-6 and len(calls) == 2
    assert relative_error(found, expected / correction) > 0.1 or correction == 1.0  # the control


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({}, "nvfp4"),
        ({"shape": (48, 40, 64)}, "bf16"),
        ({"adds": True}, "bf16"),  # to sums in BF16
        ({"adds": True, "out_dtype": torch.float32}, "nvfp4"),
        ({"b": Quantizer(block=(16, 16))}, "bf16"),
    ],
    ids=["plain", "unaligned", "sums-in-bf16", "main_grad", "square-blocks"],
)
def test_what_it_cannot_is_multiplied_in_bf16(fields: dict[str, Any], name: str) -> None:
    product = asked(**{"a": NVFP4, "b": NVFP4} | fields)
    assert choose(product, Target("cuda", (10, 0))).multiplier.name == name


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (general_gemm, None),
        (overwrites, "errs by"),
        (without_tensor_scales, "errs by"),
        (raises, "raised RuntimeError: cuBLASLt: no algorithm"),
    ],
)
def test_the_check_at_the_start(
    function: Gemm, reason: str | None, gemm: Callable[[Gemm], list[int]]
) -> None:
    gemm(function)
    found = problem_on(CPU)
    assert (found is None) == (reason is None)
    assert reason is None or (found is not None and reason in found and "\n" not in found)


def test_without_transformer_engine_it_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install" in str(problem_on(CPU))


@pytest.mark.parametrize(
    ("capability", "operands", "name"),
    [
        ((10, 0), (NVFP4, NVFP4), "nvfp4"),
        ((12, 0), (NVFP4, NVFP4), "nvfp4"),
        ((9, 0), (NVFP4, NVFP4), "bf16"),
        ((12, 0), (NVFP4, Quantizer()), "bf16"),
        ((12, 0), (NVFP4, torch.bfloat16), "bf16"),
        ((12, 0), (Quantizer(), Quantizer()), "blackwell"),
    ],
    ids=str,
)
def test_who_is_chosen(
    capability: tuple[int, int],
    operands: tuple[Any, Any],
    name: str,
    gemm: Callable[[Gemm], list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gemm(general_gemm)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(nvfp4, "problem_on", lambda device: problem_on(CPU))
    monkeypatch.setattr(blackwell, "problem_on", lambda device: None)
    monkeypatch.setattr("megatron_fp4.multipliers.hopper._rows_can_be_scaled", lambda: True)
    assert choose(asked(*operands), target_of(GPU)).multiplier.name == name
    if name == "nvfp4":  # where the GEMM is wrong
        problem_on.cache_clear()
        monkeypatch.delitem(sys.modules, "megatron_fp4.kernels.te_nvfp4")
        gemm(raises)
        choice = choose(asked(*operands), target_of(GPU))
        assert choice.multiplier.name == "bf16"
        assert "raised RuntimeError" in dict(choice.passed_over)["nvfp4"]
