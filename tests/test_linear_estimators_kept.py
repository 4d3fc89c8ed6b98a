"""Gradient estimators of X and W, whatever is kept of these for backward, and where X is the result
of a SwiGLU or a norm that the linear computes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_fp4 import GemmRecipe, Quantizer, Recipe, get_quantizer, get_recipe
from megatron_fp4.arithmetic.estimators import Estimator
from megatron_fp4.arithmetic.hadamard import Hadamard
from megatron_fp4.arithmetic.philox import Key
from megatron_fp4.arithmetic.rms_norm import RmsNorm, normed
from megatron_fp4.arithmetic.rms_norm import factors as row_factors
from megatron_fp4.arithmetic.swiglu import swiglu, swiglu_gradient
from megatron_fp4.execution.call import Call, Site
from megatron_fp4.execution.norm import before_linear
from megatron_fp4.execution.weights import HeldWeight
from megatron_fp4.linear import linear_after_swiglu, linear_before_swiglu, quantized_linear
from megatron_fp4.operands import Activated
from megatron_fp4.setting import holds
from testing.oracles import normal

TOKENS, IN, OUT = 64, 96, 64
CEIL = Quantizer(rule="ceil")


def problem() -> tuple[Tensor, Tensor, Tensor]:
    """X, W and dY in BF16."""
    x = normal((TOKENS, IN), 1) * normal((TOKENS, 1), 5).exp() + 0.2
    x[3, :32] = 0  # a block of zeros
    w, dy = normal((OUT, IN), 2) * 0.05, normal((TOKENS, OUT), 3)
    return x.bfloat16(), w.bfloat16(), dy.bfloat16()


BOTH = Estimator(form="sigmoid", maximum="softmax")
STOCHASTIC = get_quantizer("mxfp4-ceil-sr")
KEPT = {
    "raw": replace(get_recipe("mxfp4"), estimator=BOTH, x_estimator=BOTH),
    "transformed": replace(
        get_recipe("tetrajet"),
        fprop=GemmRecipe(CEIL, CEIL, Hadamard(32)),
        estimator=BOTH,
        x_estimator=BOTH,
    ),
    "forward": replace(get_recipe("tetrajet"), estimator=BOTH, x_estimator=BOTH),
    "noise": replace(
        get_recipe("tetrajet"),
        fprop=GemmRecipe(STOCHASTIC, STOCHASTIC),
        estimator=BOTH,
        x_estimator=BOTH,
    ),
}


def called(recipe: Recipe, site: Site, held: HeldWeight | None, again: bool) -> list[Tensor]:
    """Y, dX and dW of two microbatches of a step."""
    x, w, dy = problem()
    w.requires_grad_()
    found = []
    for microbatch in range(2):
        rows = (x + microbatch).detach().requires_grad_()
        call = Call(Key(3, 5), microbatch)

        def forward(x: Tensor, call: Call = call) -> Tensor:
            return quantized_linear(x, w, None, recipe, site, call, held)

        y = checkpoint(forward, rows, use_reentrant=False) if again else forward(rows)
        y.backward(dy)
        found += [y.detach(), rows.grad]
    return [*found, w.grad]  # type: ignore[list-item]


@pytest.mark.parametrize("name", KEPT)
def test_what_is_kept_changes_no_bit(name: str) -> None:
    plain = called(KEPT[name], Site(), None, False)
    for keeps_w in (None, "packed", "decoded", "fprop", "remade"):
        for packs_x in (True, False):
            for again in (False, True):
                site = Site(keeps_w=keeps_w, packs_x=packs_x)  # type: ignore[arg-type]
                held = HeldWeight() if holds(keeps_w) else None  # type: ignore[arg-type]
                found = called(KEPT[name], site, held, again)
                assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
    # The control: without estimators other gradients.
    other = called(replace(KEPT[name], estimator=None, x_estimator=None), Site(), None, False)
    assert not torch.equal(other[1], plain[1]) and not torch.equal(other[-1], plain[-1])


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("kept_y", [None, torch.float8_e4m3fn], ids=str)
def test_x_may_be_a_swiglu(name: str, kept_y: torch.dtype | None) -> None:
    """The estimator of X multiplies the gradient of the SwiGLU's result."""
    recipe, site = KEPT[name], Site("fc2", kept_y=kept_y)
    y = normal((TOKENS, 2 * IN), 8, torch.bfloat16)
    _, w, dy = problem()
    result = torch.zeros(TOKENS, IN, dtype=torch.bfloat16, requires_grad=True)
    joined = linear_after_swiglu(Activated(y, result), w, recipe, site, Call(), None)
    joined.backward(dy)
    x = swiglu(y).requires_grad_()
    apart = quantized_linear(x, w, None, recipe, site, Call())
    apart.backward(dy)
    assert torch.equal(joined, apart) and torch.equal(result.grad, x.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", KEPT)
def test_a_swiglu_may_follow(name: str) -> None:
    recipe = KEPT[name]
    x, w, dy = problem()
    joined = linear_before_swiglu(
        x.requires_grad_(), w.requires_grad_(), recipe, Site(), Call(), None
    )
    joined.result.backward(dy[:, : OUT // 2])
    other, v = (t.detach().clone().requires_grad_() for t in (x, w))
    y = quantized_linear(other, v, None, recipe, Site(), Call())
    y.backward(swiglu_gradient(dy[:, : OUT // 2], y.detach()))
    assert torch.equal(x.grad, other.grad) and torch.equal(w.grad, v.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", KEPT)
def test_x_may_be_a_norm(name: str) -> None:
    recipe = KEPT[name]
    x, w, dy = problem()
    norm = RmsNorm(torch.linspace(0.5, 2, IN).bfloat16(), 1e-6)
    stands = x.clone().requires_grad_()
    before, _ = before_linear(stands, norm)
    before.retain_grad()
    joined = quantized_linear(before, w, None, recipe, Site(norm=norm), Call())
    joined.backward(dy)
    result = normed(x, row_factors(x, norm.eps), norm.gain).requires_grad_()
    apart = quantized_linear(result, w, None, recipe, Site(), Call())
    apart.backward(dy)
    assert torch.equal(joined, apart) and torch.equal(before.grad, result.grad)  # type: ignore[arg-type]


def test_frozen_weights_and_inputs() -> None:
    """Where one gradient is not asked for, the other stays as it is."""
    for recipe in KEPT.values():
        x, w, dy = problem()
        y = quantized_linear(x.requires_grad_(), w.requires_grad_(), None, recipe, Site(), Call())
        y.backward(dy)
        for frozen in ("x", "w"):
            a, b = x.detach().clone(), w.detach().clone()
            (b if frozen == "x" else a).requires_grad_()
            quantized_linear(a, b, None, recipe, Site(), Call()).backward(dy)
            found, wanted = (b.grad, w.grad) if frozen == "x" else (a.grad, x.grad)
            assert torch.equal(found, wanted)  # type: ignore[arg-type]


def test_no_tokens() -> None:
    for recipe in KEPT.values():
        w = torch.randn(OUT, IN).bfloat16().requires_grad_()
        x = torch.zeros(0, IN).bfloat16().requires_grad_()
        quantized_linear(x, w, None, recipe, Site(), Call()).sum().backward()
        assert x.grad is not None and x.grad.shape == (0, IN)
