"""The gradient through the outer scale of X and W in a linear, against torch's autograd in float64.

The model of a quantizer is written out here as a function that autograd differentiates: it has the
values of the quantizer, the outer scale as a function of the largest magnitude, and block scales
that stand or follow a smoothed maximum. It uses nothing of estimators, plans or execution.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_fp4 import GemmRecipe, Quantizer, Recipe, get_quantizer, linear
from megatron_fp4.arithmetic.estimators import Estimator
from megatron_fp4.arithmetic.hadamard import Hadamard
from megatron_fp4.arithmetic.quantize import quantize_matrix
from megatron_fp4.arithmetic.quantized_tensor import QuantizedTensor
from testing.oracles import normal, relative_error

TOKENS, IN, OUT = 64, 96, 48
BOUND = {torch.bfloat16: 3e-3, torch.float32: 2e-4, torch.float64: 1e-11}
NVFP4 = get_quantizer("nvfp4")
QUANTIZERS = {
    "nvfp4": NVFP4,
    "ue5m3": Quantizer(scale="ue5m3", block=(1, 16), rule="up", tensor_max=32768.0),
    "square": Quantizer(scale="e4m3", block=(16, 16), rule="nearest", tensor_max=448.0),
    "row of nvfp4": replace(NVFP4, tensor_max=0.0, row_max=448.0),
    "row of mxfp4": Quantizer(rule="ceil", row_max=1.0),
    "rows of a tensor": replace(NVFP4, block=(1, 0)),
    "prescaled": replace(NVFP4, prescale=0.75),
}
ESTIMATORS = {
    "straight through": Estimator(form="straight-through", outer_scale="vjp"),
    "sigmoid": Estimator(form="sigmoid", outer_scale="vjp"),
    "softmax": Estimator(form="sigmoid", maximum="softmax", temperature=0.6, outer_scale="vjp"),
    "clipped": Estimator(
        form="straight-through", beyond="zero", maximum="softmax", outer_scale="vjp"
    ),
}


def problem(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    x = normal((TOKENS, IN), 1) * normal((TOKENS, 1), 5).exp() + 0.2
    x[:, 11] *= 25
    x[3, :32] = 0  # blocks of zeros
    x[9, 16:32] *= 1e-9  # a block whose scale is rounded to zero
    w = normal((OUT, IN), 2) * 0.05 * normal((OUT, 1), 6).exp()
    w[5, 20], w[6, 20] = w.abs().max() * 2, w.abs().max() * -2  # a tie
    return x.to(dtype), w.to(dtype), normal((TOKENS, OUT), 3).to(dtype)


def test_a_block_with_elements_has_a_scale_of_zero() -> None:
    """The problem has what its comments say."""
    x, w, _ = problem(torch.float64)
    q = quantize_matrix(x, NVFP4, axis=1)
    assert int(q.scales[9, 1]) == 0 and bool(x[9, 16:32].abs().min() > 0)
    assert int((w.abs() == w.abs().max()).sum()) == 2


def by_each(scales: Tensor, shape: torch.Size, block: tuple[int, int]) -> Tensor:
    """The block scale of each element."""
    height, length = block[0] or shape[0], block[1] or shape[1]
    grid = scales.view(shape[0] // height, shape[1] // length)
    return grid.repeat_interleave(height, 0).repeat_interleave(length, 1)


def modelled(x: Tensor, q: QuantizedTensor, e: Estimator, mistake: str = "") -> Tensor:
    """The decoded values of x without the prescale, float64, which autograd can differentiate.

    x: float64. q: what was quantized of it.
    """
    assert q.tensor_scale is not None
    block, p = q.quantizer.block, q.quantizer.prescale
    each_row = q.quantizer.row_max > 0 or mistake == "each row"
    m = x.abs().amax(1, keepdim=True) if each_row else x.abs().amax()
    m = m.detach() if mistake == "ignored" else m
    t = q.tensor_scale.double() * m / m.detach()
    z = x / t
    s = by_each(q.block_scales(torch.float64), x.shape, block)
    live = s > 0
    s = torch.where(live, s, 1) / p
    v = torch.where(live, z / s, 0).detach()
    slope = slope_of(v, e)
    if e.maximum == "softmax":
        s = s * smoothed_maximum(z, v, s, block, e)
    # f is a straight line around the place where it is differentiated.
    line = q.elements(torch.float64).view(x.shape) + slope * (z / s - (z / s).detach())
    rounded_to_zero = slope * (z - z.detach())
    return t * torch.where(live, s * line, rounded_to_zero)


def slope_of(v: Tensor, e: Estimator) -> Tensor:
    if e.form == "straight-through":
        return ((v.abs() <= 6.0001) | (e.beyond != "zero")).double()
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    low = (torch.bucketize(v.abs(), grid, right=True) - 1).clamp(0, 6)
    u = 2 * (v.abs() - grid[low]) / (grid[low + 1] - grid[low]) - 1
    ends = torch.tensor(e.k / 2, dtype=torch.float64).tanh()
    return 2 * e.k * torch.sigmoid(e.k * u) * torch.sigmoid(-e.k * u) / ends


def smoothed_maximum(
    z: Tensor, v: Tensor, scales: Tensor, block: tuple[int, int], e: Estimator
) -> Tensor:
    """1, whose derivative is that of each block's smoothed maximum over its maximum."""
    height, length = block[0] or z.shape[0], block[1] or z.shape[1]

    def blocks(each: Tensor) -> Tensor:
        cut = each.view(z.shape[0] // height, height, z.shape[1] // length, length)
        return cut.movedim(1, 2).reshape(-1, height * length)

    smooth = torch.logsumexp(blocks((z / scales.detach()).abs()) / e.temperature, 1) * e.temperature
    maxima = blocks(v.abs()).amax(1)
    ratio = 1 + (smooth - smooth.detach()) / torch.where(maxima == 0, 1, maxima)
    return by_each(ratio, z.shape, block)


def expected(g: Tensor, x: Tensor, quantizer: Quantizer, e: Estimator, mistake: str = "") -> Tensor:
    """The gradient of x from g, that of the decoded values."""
    q = quantize_matrix(x, quantizer, axis=1)
    leaf = x.double().requires_grad_()
    y = modelled(leaf, q, e, mistake)
    assert relative_error(y.detach(), q.dequantize(torch.float64) / quantizer.prescale) < 1e-6
    [found] = torch.autograd.grad(y, leaf, g.double())
    return found


def recipe_of(quantizer: Quantizer, backward: Any, e: Estimator, which: str = "xw") -> Recipe:
    return Recipe(
        "estimated",
        fprop=GemmRecipe(quantizer, quantizer, correction=quantizer.prescale**-2),
        backward=backward,
        estimator=e if "w" in which else None,
        x_estimator=e if "x" in which else None,
    )


def run(recipe: Recipe, dtype: torch.dtype) -> dict[str, Tensor]:
    x, w, dy = problem(dtype)
    leaves = x.requires_grad_(), w.requires_grad_()
    linear(*leaves, recipe=recipe, seed=9, step=4).backward(dy)
    return {"dx": x.grad, "dw": w.grad}  # type: ignore[dict-item]


def wanted(
    quantizer: Quantizer, backward: str, e: Estimator, dtype: torch.dtype, mistake: str = ""
) -> dict[str, Tensor]:
    """dX and dW, with backward GEMMs in high precision."""
    x, w, dy = problem(dtype)
    of_x, of_w = (
        t.double()
        if backward == "raw"
        else quantize_matrix(t, quantizer, axis=1).dequantize(torch.float64)
        for t in (x, w)
    )
    dx, dw = dy.double() @ of_w, dy.double().t() @ of_x
    return {
        "dx": expected(dx, x, quantizer, e, mistake),
        "dw": expected(dw, w, quantizer, e, mistake),
    }


def errors(found: dict[str, Tensor], right: dict[str, Tensor]) -> dict[str, float]:
    return {name: relative_error(found[name], right[name]) for name in right}


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_against_autograd(quantizer: str, name: str) -> None:
    chosen, e = QUANTIZERS[quantizer], ESTIMATORS[name]
    for backward in ("raw", "forward") if chosen.prescale == 1 else ("raw",):
        found = run(recipe_of(chosen, backward, e), torch.float64)
        right = wanted(chosen, backward, e, torch.float64)
        for gradient, error in errors(found, right).items():
            assert error < BOUND[torch.float64], (backward, gradient)
        # The negative controls.
        for mistake in ("ignored", *["each row"] * (not chosen.row_max)):
            wrong = wanted(chosen, backward, e, torch.float64, mistake)
            for gradient, error in errors(found, wrong).items():
                assert error > 1e-6, (backward, gradient, mistake)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("quantizer", ["nvfp4", "row of nvfp4"])
def test_in_the_dtypes_of_training(quantizer: str, dtype: torch.dtype) -> None:
    """Straight through, where no slope can be taken on the other side of a bend."""
    chosen, e = QUANTIZERS[quantizer], ESTIMATORS["straight through"]
    found = run(recipe_of(chosen, "raw", e), dtype)
    for gradient, error in errors(found, wanted(chosen, "raw", e, dtype)).items():
        assert error < BOUND[dtype], gradient


@pytest.mark.parametrize("quantizer", ["nvfp4", "row of nvfp4"])
def test_after_a_hadamard_transform(quantizer: str) -> None:
    """The largest magnitude is that of the transformed operand."""
    chosen, e, g = QUANTIZERS[quantizer], ESTIMATORS["straight through"], 16
    recipe = recipe_of(chosen, "raw", e)
    recipe = replace(recipe, fprop=replace(recipe.fprop, hadamard=Hadamard(g, "none")))
    found = run(recipe, torch.float64)
    rows = [[(-1.0) ** (i & j).bit_count() for j in range(g)] for i in range(g)]
    s = torch.block_diag(*[torch.tensor(rows, dtype=torch.float64) / g**0.5] * (IN // g))
    x, w, dy = problem(torch.float64)
    for name, matrix, straight in (("dx", x, dy @ w), ("dw", w, dy.t() @ x)):
        turned = (matrix @ s).bfloat16()
        right = expected(straight @ s, turned, chosen, e) @ s.t()
        assert relative_error(found[name], right) < BOUND[torch.float64]
        ignored = expected(straight @ s, turned, chosen, e, "ignored") @ s.t()
        assert relative_error(found[name], ignored) > 1e-4


def test_an_estimator_of_one_leaves_the_other_gradient() -> None:
    e = ESTIMATORS["straight through"]
    plain = run(recipe_of(NVFP4, "raw", e, ""), torch.bfloat16)
    for which, same, other in (("x", "dw", "dx"), ("w", "dx", "dw")):
        found = run(recipe_of(NVFP4, "raw", e, which), torch.bfloat16)
        assert torch.equal(found[same], plain[same])
        changed = found[other] != plain[other]
        assert 1 <= int(changed.sum()) <= (1 if which == "x" else 2)  # the largest magnitudes
