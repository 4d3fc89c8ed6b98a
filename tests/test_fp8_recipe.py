"""The recipe fp8, whose oracle are torch's own conversions to FP8."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from megatron_fp4 import linear


def values(x: Tensor, dtype: torch.dtype, axis: int) -> Tensor:
    """x rounded to FP8 with a factor for each line along `axis`, in float64."""
    largest = x.float().abs().amax(axis, keepdim=True)
    # torch may multiply by a rounded reciprocal where one side is a number.
    factor = torch.full_like(largest, torch.finfo(dtype).max) / largest
    return (x.float() * factor).to(dtype).double() / factor.double()


def expected(x: Tensor, w: Tensor, dy: Tensor, gradient: torch.dtype) -> list[Tensor]:
    e4m3 = torch.float8_e4m3fn
    return [
        values(x, e4m3, 1) @ values(w, e4m3, 1).t(),
        values(dy, gradient, 1) @ values(w, e4m3, 0),
        values(dy, gradient, 0).t() @ values(x, e4m3, 0),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64, 96, 32), (33, 128, 160)])
def test_all_products_are_those_of_torchs_casts(
    dtype: torch.dtype, shape: tuple[int, int, int]
) -> None:
    tokens, inputs, outputs = shape
    torch.manual_seed(tokens)
    x, w, dy = (
        (torch.randn(size) * torch.logspace(-2, 1, size[1])).to(dtype)
        for size in ((tokens, inputs), (outputs, inputs), (tokens, outputs))
    )
    x.requires_grad_(), w.requires_grad_()
    y = linear(x, w, recipe="fp8")
    y.backward(dy)
    found = [y.detach(), x.grad, w.grad]
    args = x.detach(), w.detach(), dy
    rtol = 1e-5 if dtype == torch.float32 else 2**-8
    for own, oracle in zip(found, expected(*args, torch.float8_e5m2), strict=True):
        assert own is not None
        torch.testing.assert_close(
            own.double(), oracle, rtol=rtol, atol=rtol * float(oracle.abs().max())
        )
    # The control: dY in E4M3 is noticed.
    other = expected(*args, torch.float8_e4m3fn)[1]
    assert x.grad is not None
    assert (x.grad.double() - other).abs().max() > 2 * rtol * other.abs().max()


def test_hopper_multiplies_it() -> None:
    words = "plan --recipe fp8 --in 4096 --out 14336 --tokens 8192 --gpu sm_90".split()
    done = subprocess.run(
        [sys.executable, "-m", "megatron_fp4", *words], capture_output=True, text=True, check=True
    )
    assert done.stdout.count("product  by hopper") == 3
    assert "kept for backward  X as codes" in done.stdout
