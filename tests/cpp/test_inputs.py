"""What a recorded call may be repeated with: tensors of the same form, and none without tokens."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from megatron_fp4 import get_recipe
from megatron_fp4.arithmetic.philox import Key
from megatron_fp4.cpp import extension
from megatron_fp4.cpp.executor import CppExecutor
from megatron_fp4.execution.call import Call, Site
from megatron_fp4.linear import execute_by, in_python, quantized_linear

pytestmark = pytest.mark.slow
TOKENS, SIZE = 64, 64


@pytest.fixture(autouse=True)
def in_cpp() -> Iterator[None]:
    execute_by(CppExecutor(extension.load(), on_cpu=True))
    yield
    execute_by(in_python)


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None, site: Site, recipe: str = "fp8"
) -> tuple[Tensor, Tensor]:
    """(Y by the executor, Y in Python)."""
    call = Call(Key(1))
    y = quantized_linear(x, weight, bias, get_recipe(recipe), site, call)
    return y, in_python(x, weight, bias, get_recipe(recipe), Site("alone"), call, None)


def matrices() -> tuple[Tensor, Tensor]:
    """X and W."""
    return torch.randn(TOKENS, SIZE).bfloat16(), torch.randn(SIZE, SIZE).bfloat16()


@pytest.mark.parametrize("first", [torch.bfloat16, torch.float32])
def test_a_bias_of_another_dtype_or_stride_is_read_as_it_is(first: torch.dtype) -> None:
    site, (x, weight) = Site("fc1"), matrices()
    wide = torch.randn(2 * SIZE)
    second = torch.float32 if first == torch.bfloat16 else torch.bfloat16
    for bias in (*[wide[:SIZE].to(first)] * 3, wide[:SIZE].to(second), wide[::2].to(first)):
        found, wanted = product(x, weight, bias, site)
        assert torch.equal(found, wanted), bias.dtype


@pytest.mark.parametrize("recipe", ["fp8", "tetrajet", "mxfp4-rht-sr", "dge-occ"])
def test_a_recorded_linear_runs_in_inference_mode(recipe: str) -> None:
    site, (x, weight) = Site("fc1"), matrices()
    with torch.no_grad():
        for _ in range(3):
            product(x, weight, None, site, recipe)
    with torch.inference_mode():
        for _ in range(3):
            found, wanted = product(torch.clone(x), weight, None, site, recipe)
            assert torch.equal(found, wanted)


def test_a_call_without_tokens_is_not_recorded_and_warns_of_nothing() -> None:
    site, (x, weight) = Site("fc1"), matrices()
    with warnings.catch_warnings(action="error"):
        for tokens in (0, 0, 0, TOKENS, 0):
            y, _ = product(x[:tokens], weight, None, site)
            assert y.shape == (tokens, SIZE)
    assert len(site.kinds) == 1
