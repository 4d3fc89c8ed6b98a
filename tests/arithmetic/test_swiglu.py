"""SwiGLU and its gradient against float64, as torch differentiates it."""

import pytest
import torch
from torch.nn import functional as F

from megatron_fp4.arithmetic.swiglu import swiglu, swiglu_gradient


def matrices(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    y = torch.randn(64, 2 * 96, generator=generator) * 4
    return y.to(dtype), torch.randn(64, 96, generator=generator).to(dtype)


def exact(
    y: torch.Tensor, gradient: torch.Tensor, swapped: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """(SwiGLU of y, its gradient) in float64. swapped: with the gate in the right half."""
    leaf = y.double().requires_grad_()
    gate, up = leaf.chunk(2, -1)[:: -1 if swapped else 1]
    result = F.silu(gate) * up
    result.backward(gradient.double())
    assert leaf.grad is not None
    return result.detach(), leaf.grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_it_is_rounded_once(dtype: torch.dtype) -> None:
    """Float32 arithmetic errs by less than 2^-20 of the terms; then half a step of the dtype."""
    y, gradient = matrices(dtype)
    info = torch.finfo(dtype)
    gate, up = y.double().chunk(2, -1)
    sigmoid = torch.sigmoid(gate)
    # Of the gate's gradient, whose two terms may cancel, and of the other half's.
    terms = up.abs() * (sigmoid + (gate * sigmoid * (1 - sigmoid)).abs()), F.silu(gate).abs()
    errors = (
        2.0**-20 * (F.silu(gate) * up).abs(),
        2.0**-20 * torch.cat([gradient.double().abs() * each for each in terms], -1),
    )
    found, wanted = (swiglu(y), swiglu_gradient(gradient, y)), exact(y, gradient)
    for each, right, error in zip(found, wanted, errors, strict=True):
        assert each.dtype == dtype and each.shape == right.shape
        rounding = info.eps / 2 * (right.abs() + error) + info.smallest_normal * info.eps / 2
        assert bool(((each.double() - right).abs() <= error + rounding).all())


def test_halves_that_are_exchanged_would_be_noticed() -> None:
    y, gradient = matrices(torch.float32)
    result, slopes = exact(y, gradient, swapped=True)
    assert not torch.allclose(swiglu(y).double(), result, 1e-2)
    assert not torch.allclose(swiglu_gradient(gradient, y).double(), slopes, 1e-2)


def test_gates_whose_exponential_overflows() -> None:
    y = torch.tensor([[-300.0, 300.0, 0.0, 2.0, 2.0, 2.0]])
    assert torch.equal(swiglu(y), torch.tensor([[-0.0, 600.0, 0.0]]))
    assert torch.equal(
        swiglu_gradient(torch.ones(1, 3), y), torch.tensor([[0.0, 2.0, 1.0, -0.0, 300.0, 0.0]])
    )
