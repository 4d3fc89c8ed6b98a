"""A linear that subtracts the mean of X: against a float64 composition that shares only quantizers
with it, with the known mistakes; what it gains; evaluation, recomputation, joined linears."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_fp4 import GemmRecipe, Linear, Quantizer, Recipe, get_quantizer, get_recipe, linear
from megatron_fp4.arithmetic.estimators import Estimator
from megatron_fp4.arithmetic.hadamard import Hadamard
from megatron_fp4.arithmetic.quantize import quantize_matrix
from megatron_fp4.arithmetic.rms_norm import RmsNorm, factors, normed
from megatron_fp4.arithmetic.swiglu import swiglu
from megatron_fp4.arithmetic.token_mean import centered, mean_of, token_sums
from megatron_fp4.execution.call import Call, Site
from megatron_fp4.linear import linear_after_swiglu, linear_before_swiglu, quantized_linear
from megatron_fp4.recipe import HIGH_PRECISION
from testing.linears import Results, errors, gradients
from testing.linears import quantized as q
from testing.linears import results as run
from testing.oracles import normal, relative_error

TOKENS, IN, OUT = 128, 192, 64
BOUND = {torch.bfloat16: 2e-3, torch.float32: 2e-4, torch.float64: 1e-12}

CEIL, FLOOR = Quantizer(rule="ceil"), Quantizer()
VECTOR, E5M2 = get_quantizer("vector"), replace(get_quantizer("vector"), element="e5m2")
BOTH, BACKWARD = GemmRecipe(CEIL, CEIL), GemmRecipe(FLOOR, FLOOR)


def recipe(name: str, fprop: GemmRecipe, others: GemmRecipe, **fields: Any) -> Recipe:
    """others: dgrad and wgrad."""
    return Recipe(name, "", fprop, others, others, x_mean="subtracted", **fields)


RECIPES = {
    "raw": recipe("raw", BOTH, BACKWARD),
    "twice": recipe("twice", BOTH, BACKWARD, backward="forward"),
    "as-fprop": recipe("as-fprop", BOTH, HIGH_PRECISION, backward="forward"),
    "raw-in-bf16": recipe("raw-in-bf16", BOTH, HIGH_PRECISION),
    "wgrad-alone": recipe("wgrad-alone", HIGH_PRECISION, BACKWARD),
    "rows": recipe("rows", GemmRecipe(VECTOR, VECTOR), GemmRecipe(E5M2), backward="forward"),
    "estimated": recipe("estimated", BOTH, BACKWARD, estimator=Estimator(form="spline")),
}


def problem(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """X with a strong mean and rows of many sizes, W, dY whose sum over tokens is not small."""
    x = normal((TOKENS, IN), 1) * (0.5 * normal((TOKENS, 1), 5)).exp() + 4 * normal((IN,), 7)
    w = normal((OUT, IN), 2) * 0.05 * normal((OUT, 1), 6).exp()
    return x.to(dtype), w.to(dtype), (normal((TOKENS, OUT), 3) + 0.5).to(dtype)


# --- the method, written out ----------------------------------------------------------------------


def mean_over_tokens(x: Tensor, mistake: str = "") -> Tensor:
    """By numpy, in float64, rounded to float32 and then to x's dtype."""
    values = x.double().numpy()
    if mistake == "over features":
        values = np.broadcast_to(values.mean(1).mean(keepdims=True), (1, x.shape[1]))
    if mistake == "of half the tokens":
        values = values[: len(values) // 2]
    mean = torch.from_numpy(values.mean(0))
    return mean if x.dtype == torch.float64 else mean.float().to(x.dtype)


def spline(scaled: np.ndarray) -> np.ndarray:
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    i = np.clip(np.searchsorted(grid, np.abs(scaled), side="right") - 1, 0, 6)
    u = np.abs(2 * (np.abs(scaled) - grid[i]) / (grid[i + 1] - grid[i]) - 1)
    return np.where(u <= 0.5, 2.0, 0.0)


def composition(name: str, dtype: torch.dtype, mistake: str = "") -> Results:
    x, w, dy = problem(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    mean = mean_over_tokens(x, mistake)
    rest = (x.to(wide) - mean.to(wide)).to(dtype)
    forward = VECTOR if name == "rows" else CEIL
    qx, qw = q(rest, forward, 1), q(w, forward, 1)
    y = qx @ qw.t()
    if name == "wgrad-alone":
        y = x.double() @ w.double().t()
    elif mistake == "by the quantized W":
        y += mean.double() @ qw.t()
    elif mistake != "left out of Y":
        y += mean.double() @ w.double().t()
    if name == "rows":
        folds = [quantize_matrix(each, VECTOR, axis=1).scales for each in (w, rest)]
        dx = q(dy.to(wide) / folds[0].t(), E5M2, 1) @ (qw * folds[0].double())
        dw = q(dy.to(wide) / folds[1], E5M2, 0).t() @ (qx * folds[1].double())
    elif name in ("as-fprop", "raw-in-bf16"):
        taken = (qx, qw) if name == "as-fprop" else (x.double(), w.double())
        dx, dw = dy.double() @ taken[1], dy.double().t() @ taken[0]
    else:
        again = (qx.to(wide), qw.to(wide)) if name == "twice" else (rest, w)
        dx = q(dy, FLOOR, 1) @ q(again[1], FLOOR, 0)
        dw = q(dy, FLOOR, 0).t() @ q(again[0], FLOOR, 0)
    rank_one = torch.outer(dy.double().sum(0), mean.double())
    if name == "estimated":
        scales = quantize_matrix(w, CEIL, axis=1).block_scales(torch.float64)
        scaled = w.double() / scales.repeat_interleave(32, 1)
        factor = torch.from_numpy(spline(scaled.numpy()))
        dw = (dw + rank_one * (mistake == "estimated too")) * factor
        rank_one = rank_one * (mistake != "estimated too")
    if name != "raw-in-bf16" and mistake != "left out of dW":
        dw = dw + rank_one
    return {"y": y, "dx": dx, "dw": dw}


@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_against_the_composition(name: str, dtype: torch.dtype) -> None:
    found = errors(run(*problem(dtype), RECIPES[name]), composition(name, dtype))
    for gemm, error in found.items():
        assert error < BOUND[dtype], (gemm, error)


@pytest.mark.parametrize("name", ["raw", "twice", "rows"])
@pytest.mark.parametrize(
    ("mistake", "gemm"),
    [
        ("over features", "y"),
        ("over features", "dw"),
        ("of half the tokens", "y"),
        ("of half the tokens", "dw"),
        ("left out of Y", "y"),
        ("by the quantized W", "y"),
        ("left out of dW", "dw"),
    ],
)
def test_known_mistakes_lie_outside_the_bound(name: str, mistake: str, gemm: str) -> None:
    wrong = composition(name, torch.float32, mistake)
    found = errors(run(*problem(), RECIPES[name]), wrong)
    assert found[gemm] > 10 * BOUND[torch.float32]


def test_no_estimator_multiplies_the_mean() -> None:
    wrong = composition("estimated", torch.float32, "estimated too")
    assert errors(run(*problem(), RECIPES["estimated"]), wrong)["dw"] > 10 * BOUND[torch.float32]


@pytest.mark.parametrize("main_grad", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["twice", "estimated"])
def test_the_mean_is_added_to_main_grad(name: str, main_grad: torch.dtype) -> None:
    """Once, and to a BF16 main_grad with one rounding."""
    x, w, dy = problem(torch.bfloat16)
    weight = w.clone().requires_grad_()
    weight.main_grad = normal((OUT, IN), 9).to(main_grad)  # type: ignore[attr-defined]
    before = weight.main_grad.double()  # type: ignore[attr-defined]
    quantized_linear(x, weight, None, RECIPES[name], Site(fuses=True)).backward(dy)
    found = weight.main_grad.double()  # type: ignore[attr-defined]
    wanted = before + composition(name, torch.bfloat16)["dw"]
    bound = 2e-4 if main_grad == torch.float32 else 2**-8
    assert relative_error(found, wanted) < bound


@pytest.mark.parametrize("hadamard", [None, Hadamard(32), Hadamard(64, "fixed")], ids=str)
@pytest.mark.parametrize("base", ["tetrajet", "mxfp4-rht-sr", "ue5m3", "tetrajet-ema", "fp8"])
def test_other_words_see_x_without_its_mean(base: str, hadamard: Hadamard | None) -> None:
    """A linear is the same linear of X minus its mean, and the products of the mean: Hadamard
    transforms, stochastic rounding, Q-EMA, outer scales. In float64."""
    x, w, dy = problem(torch.float64)
    plain = get_recipe(base)
    if hadamard is not None and base != "tetrajet-ema":
        plain = replace(plain, fprop=replace(plain.fprop, hadamard=hadamard))
    mean = x.mean(0)
    rest, found = run(x - mean, w, dy, plain), run(x, w, dy, replace(plain, x_mean="subtracted"))
    if plain.fprop.a is not None:
        rest["y"] = rest["y"] + mean @ w.t()
    else:
        del rest["y"]
    rest["dw"] = rest["dw"] + torch.outer(dy.sum(0), mean)
    for gemm, error in errors(found, rest).items():
        assert error < 1e-9, (gemm, error)  # X - mean has the mean's last digit, and a transform
    assert relative_error(run(x, w, dy, plain)["dw"], rest["dw"]) > 1e-3  # the control


# --- the mean's bits ------------------------------------------------------------------------------


def test_the_mean_is_the_exact_one_rounded() -> None:
    x = problem(torch.bfloat16)[0][:96]  # a number of tokens that divides nothing
    exact = [sum(map(Fraction, column.tolist())) / 96 for column in x.double().t()]
    wanted = np.array([float(each) for each in exact]).astype(np.float32)
    found = mean_of(token_sums(x), 96, x.dtype)
    assert found.dtype == torch.bfloat16
    assert np.array_equal(found.float().numpy(), wanted.astype(ml_dtypes.bfloat16).astype("f4"))
    rest = centered(x, found)
    wide = x.float().numpy() - found.float().numpy()
    assert np.array_equal(rest.float().numpy(), wide.astype(ml_dtypes.bfloat16).astype("f4"))


def test_the_order_of_the_tokens_does_not_change_the_mean() -> None:
    x = normal((4096, 64), 1).exp()
    order = torch.randperm(4096, generator=torch.Generator().manual_seed(2))
    found = [mean_of(token_sums(each), 4096, x.dtype) for each in (x, x[order])]
    assert torch.equal(*found)
    narrow = [each.sum(0) for each in (x, x[order])]  # negative control: sums in float32
    assert not torch.equal(*narrow)


def test_no_tokens_have_a_mean_of_zeros() -> None:
    x, w, _ = problem(torch.bfloat16)
    assert linear(x[:0], w, recipe=RECIPES["twice"]).shape == (0, OUT)
    assert not mean_of(token_sums(x[:0]), 0, x.dtype).any()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_value_that_is_not_finite_shows_in_each_token(bad: float) -> None:
    x, w, _ = problem()
    x[5, 7] = bad
    assert linear(x, w, recipe=RECIPES["twice"]).isnan().all()


# --- what is gained -------------------------------------------------------------------------------


def test_the_error_of_y_falls_by_the_share_of_the_mean() -> None:
    """With X = m + Z, of Gaussian means with variance 63 and Gaussian Z with variance 1, each token
    is Gaussian with variance 64 along its features, and without its mean with variance 1: the same
    numbers times 8, a power of two. Relative rounding errors of both operands are then the same,
    and the errors of Y, in proportion to what is quantized, 8 to 1.

    The errors by W's rounding are products with one mean, for each of the OUT outputs: their share
    of the squared error, a half, varies by sqrt(2 / OUT) of itself. Within four of these."""
    outputs = 512
    x = normal((256, 256), 1) * (256 / 255) ** 0.5 + 63**0.5 * normal((256,), 2)
    w = normal((outputs, 256), 3)
    exact = x.double() @ w.double().t()
    plain = replace(RECIPES["raw"], x_mean="kept")
    kept, subtracted = (
        relative_error(linear(x, w, recipe=each), exact) for each in (plain, RECIPES["raw"])
    )
    spread = 0.5 * (2 / outputs) ** 0.5 / 2
    assert abs(subtracted * 8 / kept - 1) < 4 * spread
    # Negative control: without a mean nothing is gained.
    x = x - x.mean(0)
    exact = x.double() @ w.double().t()
    kept, subtracted = (
        relative_error(linear(x, w, recipe=each), exact) for each in (plain, RECIPES["raw"])
    )
    assert abs(subtracted / kept - 1) < 4 * spread


# --- evaluation and recomputation -----------------------------------------------------------------


def test_tokens_see_later_ones_in_training_alone() -> None:
    x, w, _ = problem()
    layer = Linear(IN, OUT, bias=False, recipe=RECIPES["twice"])
    layer.weight.data.copy_(w)
    changed = x.clone()
    changed[-1] += 100
    assert not torch.equal(layer(x)[:-1], layer(changed)[:-1])
    layer.eval()
    assert torch.equal(layer(x)[:-1], layer(changed)[:-1])
    plain = replace(RECIPES["twice"], x_mean="kept")
    assert torch.equal(layer(x), linear(x, w, recipe=plain))
    assert RECIPES["twice"].in_evaluation == plain and plain.in_evaluation is plain


def test_a_recomputed_pass_subtracts_the_mean_too() -> None:
    """The first forward pass of a checkpoint runs without gradients, and is no evaluation."""
    x, w, dy = problem(torch.bfloat16)
    layer = Linear(IN, OUT, bias=False, recipe=RECIPES["twice"], dtype=torch.bfloat16)
    layer.weight.data.copy_(w)
    found = []
    for recomputes in (False, True):
        layer.steps, layer.weight.grad = 0, None
        leaf = x.clone().requires_grad_()
        y = checkpoint(layer, leaf, use_reentrant=True) if recomputes else layer(leaf)
        assert isinstance(y, Tensor)
        y.backward(dy)
        found.append((y.detach(), leaf.grad, layer.weight.grad))
    for plain, again in zip(*found, strict=True):
        assert plain is not None and again is not None and torch.equal(plain, again)


# --- joined linears -------------------------------------------------------------------------------


@pytest.mark.parametrize("packs_x", [True, False])
@pytest.mark.parametrize("name", ["raw", "twice", "raw-in-bf16", "wgrad-alone"])
def test_a_norm_that_the_linear_computes(name: str, packs_x: bool) -> None:
    x, w, dy = problem(torch.bfloat16)
    norm = RmsNorm(normal((IN,), 4).bfloat16() + 2, 1e-5, False)
    site, w = Site(packs_x=packs_x), w.requires_grad_()
    whole = normed(x, factors(x, 1e-5), norm.gain)
    joined = quantized_linear(x, w, None, RECIPES[name], replace(site, norm=norm))
    apart = quantized_linear(whole, w, None, RECIPES[name], site)
    assert all(map(torch.equal, gradients(joined, dy, w), gradients(apart, dy, w)))


@pytest.mark.parametrize("packs_x", [True, False])
@pytest.mark.parametrize("name", ["raw", "twice", "raw-in-bf16", "wgrad-alone"])
def test_a_swiglu_that_the_linears_compute(name: str, packs_x: bool) -> None:
    """The mean of fc2's X, the SwiGLU, is subtracted, and fc1's dY, its gradient, is summed."""
    x, w, _ = problem(torch.bfloat16)
    first = torch.cat((w, w.flip(0))).requires_grad_()
    second = normal((96, OUT), 8).bfloat16().requires_grad_()
    dy = (normal((TOKENS, 96), 3) + 1).bfloat16()
    site, followed = Site(packs_x=packs_x), RECIPES[name]
    between = linear_before_swiglu(x, first, followed, site, Call(), None)
    y, dw1, dw2 = gradients(
        linear_after_swiglu(between, second, followed, site, Call(), None), dy, first, second
    )
    made = quantized_linear(x, first, None, followed, site)
    leaf = made.detach().requires_grad_()
    activated = swiglu(leaf)
    apart = quantized_linear(activated, second, None, followed, site)
    wanted_y, grad_y, wanted_dw2 = gradients(apart, dy, leaf, second)
    assert torch.equal(y, wanted_y) and torch.equal(dw2, wanted_dw2)
    (wanted_dw1,) = torch.autograd.grad(made, first, grad_y)
    assert relative_error(dw1, wanted_dw1) < 0.02  # autograd's SwiGLU rounds more often
