"""Triton's block-scaled GEMM as a multiplier, without the GPU that it needs: a stand-in multiplies
in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_fp4.arithmetic.quantized_tensor import QuantizedTensor
from megatron_fp4.arithmetic.quantizer import get_quantizer
from megatron_fp4.kernels import native
from megatron_fp4.multipliers import blackwell, choose
from megatron_fp4.multipliers.blackwell import problem_on
from megatron_fp4.multipliers.trial import TRIED
from megatron_fp4.target import target_of
from testing.builders.products import asked

CPU, GPU = torch.device("cpu"), torch.device("cuda")
Codes = tuple[Tensor, Tensor]
Gemm = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    problem_on.cache_clear()
    yield
    problem_on.cache_clear()


def value(operand: Codes) -> Tensor:
    codes, scales = operand
    shape = torch.Size((len(codes), 2 * codes.shape[1]))
    quantizer = get_quantizer("mxfp4-ceil")
    return QuantizedTensor(codes, scales, None, quantizer, shape, 1).dequantize(torch.float64)


def right(
    a: Codes, b: Codes, out: Tensor, *, alpha: float = 1.0, accumulates: bool = False
) -> Tensor:
    found = alpha * value(a) @ value(b).t()
    return out.copy_(found + out if accumulates else found)


def without_alpha(a: Codes, b: Codes, out: Tensor, *, alpha: float = 1.0, **named: Any) -> Tensor:
    return right(a, b, out, **named)


def replaces(a: Codes, b: Codes, out: Tensor, *, alpha: float = 1.0, **named: Any) -> Tensor:
    return right(a, b, out, alpha=alpha)


def without_nan(a: Codes, b: Codes, out: Tensor, **named: Any) -> Tensor:
    return right(a, b, out, **named).nan_to_num_()


def other_rows(a: Codes, b: Codes, out: Tensor, **named: Any) -> Tensor:
    """Reads scales a row too late where there are several."""
    return right((a[0], a[1].roll(1, 0)), b, out, **named)


def raises(*args: Any, **named: Any) -> Tensor:
    raise RuntimeError("no kernel image is available for execution on the device\nand a stack")


def test_right_products_pass_once_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    dtypes = []

    def counted(a: Codes, b: Codes, out: Tensor, **named: Any) -> Tensor:
        dtypes.append(out.dtype)
        return right(a, b, out, **named)

    monkeypatch.setattr(native, "product", counted)
    assert problem_on(CPU) is None and problem_on(CPU) is None
    each = len(TRIED)
    assert dtypes == [torch.bfloat16] * each + [torch.float32] * 2 * each


@pytest.mark.parametrize(
    ("gemm", "reason"),
    [
        (without_alpha, "Triton's GEMM in float32 errs by 1.0e+00"),
        (replaces, "Triton's GEMM added to float32 errs by"),
        (without_nan, "Triton's GEMM in bfloat16 loses or misplaces a NaN"),
        (other_rows, "Triton's GEMM in bfloat16 loses or misplaces a NaN"),
        (raises, "Triton's GEMM in bfloat16 raised RuntimeError: no kernel image is available"),
    ],
)
def test_a_wrong_product_is_passed_over_and_named(
    gemm: Gemm, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "product", gemm)
    found = problem_on(CPU)
    assert found is not None and found.startswith(reason) and "\n" not in found


@pytest.mark.parametrize(("gemm", "name"), [(right, "blackwell"), (raises, "bf16")])
def test_who_is_chosen(gemm: Gemm, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (12, 0))
    monkeypatch.setattr(native, "product", gemm)
    monkeypatch.setattr(blackwell, "problem_on", lambda device: problem_on(CPU))
    choice = choose(asked(), target_of(GPU))
    assert choice.multiplier.name == name
    if name == "bf16":
        assert "raised RuntimeError" in dict(choice.passed_over)["blackwell"]
