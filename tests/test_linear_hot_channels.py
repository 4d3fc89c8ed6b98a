"""A linear with hot channels of X: against a float64 composition that shares only quantizers with
it, with the known mistakes; what it gains; joined linears, sizes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_fp4 import GemmRecipe, Quantizer, Recipe, get_recipe, linear
from megatron_fp4.arithmetic.hadamard import Hadamard
from megatron_fp4.arithmetic.hot_channels import HotChannels
from megatron_fp4.arithmetic.rms_norm import RmsNorm, factors, normed
from megatron_fp4.arithmetic.swiglu import swiglu
from megatron_fp4.errors import SizeError
from megatron_fp4.execution.call import Call, Site
from megatron_fp4.linear import linear_after_swiglu, linear_before_swiglu, quantized_linear
from megatron_fp4.plan.compiler import compile_plan
from megatron_fp4.plan.show import show
from megatron_fp4.recipe import HIGH_PRECISION
from megatron_fp4.setting import Setting, column_parallel
from megatron_fp4.target import Target
from testing.linears import Results, errors, gradients
from testing.linears import quantized as q
from testing.linears import results as run
from testing.oracles import normal, relative_error

TOKENS, IN, OUT = 128, 192, 64
BOUND = {torch.bfloat16: 2e-3, torch.float32: 2e-4, torch.float64: 1e-12}

CEIL, FLOOR = Quantizer(rule="ceil"), Quantizer()
BOTH, BACKWARD = GemmRecipe(CEIL, CEIL), GemmRecipe(FLOOR, FLOOR)
HOT = Recipe("hot", "", BOTH, BACKWARD, BACKWARD, outliers=HotChannels(32, 2))
RECIPES = {
    "raw": HOT,
    "twice": replace(HOT, name="twice", backward="forward"),
    "as-fprop": replace(
        HOT, name="as-fprop", dgrad=HIGH_PRECISION, wgrad=HIGH_PRECISION, backward="forward"
    ),
    "raw-in-bf16": replace(HOT, name="raw-in-bf16", dgrad=HIGH_PRECISION, wgrad=HIGH_PRECISION),
}


def problem(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """X with channels of many sizes, which differ in half of the tokens; W; dY."""
    x = normal((TOKENS, IN), 1) * (1.5 * normal((IN,), 7)).exp()
    x[TOKENS // 2 :] *= (1.5 * normal((IN,), 8)).exp()
    w = normal((OUT, IN), 2) * 0.05
    return x.to(dtype), w.to(dtype), normal((TOKENS, OUT), 3).to(dtype)


def hot_channels(x: Tensor, mistake: str) -> np.ndarray:
    """By numpy: the two largest of each 32 sums of squares."""
    values = x.double().numpy()
    if mistake == "of half the tokens":
        values = values[: len(values) // 2]
    scores = (values**2).sum(0).reshape(-1, 32)
    order = np.argsort(scores if mistake == "the smallest" else -scores, axis=1)[:, :2]
    return np.sort(order + np.arange(0, IN, 32)[:, None], axis=None)


def composition(name: str, dtype: torch.dtype, mistake: str = "") -> Results:
    x, w, dy = problem(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    hot = torch.from_numpy(hot_channels(x, mistake))
    cold = x.clone()
    if mistake != "left in X":
        cold[:, hot] = 0
    qx, qw = q(cold, CEIL, 1), q(w, CEIL, 1)
    over = qw if mistake == "by the quantized W" else w.double()
    y = qx @ qw.t() + x.double()[:, hot] @ over[:, hot].t()
    taken = (x, w) if name.startswith("raw") else (qx.to(wide), qw.to(wide))
    if name in ("as-fprop", "raw-in-bf16"):
        dx, dw = dy.double() @ taken[1].double(), dy.double().t() @ taken[0].double()
    else:
        dx = q(dy, FLOOR, 1) @ q(taken[1], FLOOR, 0)
        dw = q(dy, FLOOR, 0).t() @ q(taken[0], FLOOR, 0)
    if not name.startswith("raw") and mistake != "left out of dW":
        dw[:, hot] += dy.double().t() @ x.double()[:, hot]
    return {"y": y, "dx": dx, "dw": dw}


@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_against_the_composition(name: str, dtype: torch.dtype) -> None:
    found = errors(run(*problem(dtype), RECIPES[name]), composition(name, dtype))
    for gemm, error in found.items():
        assert error < BOUND[dtype], (gemm, error)


@pytest.mark.parametrize(
    ("mistake", "gemm"),
    [
        ("of half the tokens", "y"),
        ("of half the tokens", "dw"),
        ("the smallest", "y"),
        ("left in X", "y"),
        ("by the quantized W", "y"),
        ("left out of dW", "dw"),
    ],
)
def test_known_mistakes_lie_outside_the_bound(mistake: str, gemm: str) -> None:
    found = run(*problem(), RECIPES["twice"])
    assert errors(found, composition("twice", torch.float32, mistake))[gemm] > 2e-3


@pytest.mark.parametrize("main_grad", [torch.float32, torch.bfloat16], ids=str)
def test_the_product_is_added_to_main_grad(main_grad: torch.dtype) -> None:
    """Once, and to a BF16 main_grad with one rounding."""
    x, w, dy = problem(torch.bfloat16)
    weight = w.clone().requires_grad_()
    weight.main_grad = normal((OUT, IN), 9).to(main_grad)  # type: ignore[attr-defined]
    before = weight.main_grad.double()  # type: ignore[attr-defined]
    quantized_linear(x, weight, None, RECIPES["twice"], Site(fuses=True)).backward(dy)
    found = weight.main_grad.double()  # type: ignore[attr-defined]
    wanted = before + composition("twice", torch.bfloat16)["dw"]
    assert relative_error(found, wanted) < (2e-4 if main_grad == torch.float32 else 2**-8)


@pytest.mark.parametrize("hadamard", [None, Hadamard(32), Hadamard(64, "fixed")], ids=str)
@pytest.mark.parametrize("base", ["tetrajet", "ue5m3", "tetrajet-ema", "fp8", "quartet-2"])
def test_other_words_see_x_without_its_hot_channels(base: str, hadamard: Hadamard | None) -> None:
    """A linear is the same linear of X with zeros there, and the products of the hot channels. In
    float64, with a backward pass that reads what fprop multiplied."""
    x, w, dy = problem(torch.float64)
    options = {"hadamard": 64} if base == "quartet-2" else {}
    plain = replace(get_recipe(base, **options), backward="forward")
    if hadamard is not None and base != "tetrajet-ema":
        plain = replace(plain, fprop=replace(plain.fprop, hadamard=hadamard))
    cold, columns = HotChannels().split(x)
    hot = columns.channels
    rest = run(cold, w, dy, plain)
    rest["y"] = rest["y"] + x[:, hot] @ w[:, hot].t()
    rest["dw"][:, hot] += dy.t() @ x[:, hot]
    found = run(x, w, dy, replace(plain, outliers=HotChannels()))
    for gemm, error in errors(found, rest).items():
        assert error < 1e-12, (gemm, error)
    assert relative_error(run(x, w, dy, plain)["y"], rest["y"]) > 1e-3  # the control


def test_the_error_of_y_falls_by_the_share_of_the_hot_channel() -> None:
    """One channel of each 32 of X is 2^10 times as large as the others, so that these become 0 and
    the hot one keeps its rounding error. With hot channels the others have the error of an X
    without large ones."""
    x, w = normal((256, 256), 1), normal((512, 256), 2)
    hot = slice(5, None, 32)
    large = x.clone()
    large[:, hot] *= 2**10
    followed = replace(HOT, outliers=HotChannels())
    small = x.clone()
    small[:, hot] = 0
    exact, exact_small = large.double() @ w.double().t(), small.double() @ w.double().t()
    plain = (linear(large, w, recipe=replace(HOT, outliers=None)) - exact).norm()
    split = (linear(large, w, recipe=followed) - exact).norm()
    alone = (linear(small, w, recipe=replace(HOT, outliers=None)) - exact_small).norm()
    assert split < plain / 100
    # Products of 2^10 are summed in float32, whose last bit they round.
    assert abs(float(split / alone) - 1) < 0.01


# --- joined linears, sizes, words -----------------------------------------------------------------


@pytest.mark.parametrize("packs_x", [True, False])
@pytest.mark.parametrize("name", RECIPES)
def test_a_norm_that_the_linear_computes(name: str, packs_x: bool) -> None:
    x, w, dy = problem(torch.bfloat16)
    norm = RmsNorm(normal((IN,), 4).bfloat16() + 2, 1e-5, False)
    site, w = Site(packs_x=packs_x), w.requires_grad_()
    whole = normed(x, factors(x, 1e-5), norm.gain)
    joined = quantized_linear(x, w, None, RECIPES[name], replace(site, norm=norm))
    apart = quantized_linear(whole, w, None, RECIPES[name], site)
    assert all(map(torch.equal, gradients(joined, dy, w), gradients(apart, dy, w)))


@pytest.mark.parametrize("packs_x", [True, False])
@pytest.mark.parametrize("name", RECIPES)
def test_a_swiglu_that_the_linears_compute(name: str, packs_x: bool) -> None:
    x, w, _ = problem(torch.bfloat16)
    first = torch.cat((w, w.flip(0))).requires_grad_()
    second = normal((96, OUT), 8).bfloat16().requires_grad_()
    dy = normal((TOKENS, 96), 3).bfloat16()
    site, followed = Site(packs_x=packs_x), RECIPES[name]
    between = linear_before_swiglu(x, first, followed, site, Call(), None)
    y, dw2 = gradients(
        linear_after_swiglu(between, second, followed, site, Call(), None), dy, second
    )
    activated = swiglu(quantized_linear(x, first, None, followed, site).detach())
    wanted = gradients(quantized_linear(activated, second, None, followed, site), dy, second)
    assert torch.equal(y, wanted[0]) and torch.equal(dw2, wanted[1])


def test_inputs_that_groups_do_not_divide_are_refused() -> None:
    followed = replace(HOT, outliers=HotChannels(64))
    with pytest.raises(SizeError, match="in_features is 96, not a multiple of 64, in which recipe"):
        linear(normal((32, 96), 1), normal((32, 96), 2), recipe=followed)


def test_the_plan_in_words() -> None:
    target = Target("cuda", (9, 0))
    setting = Setting(256, 128, 64, torch.bfloat16, target, torch.bfloat16)
    text = show(compile_plan(RECIPES["twice"], setting))
    assert "X        without its outliers, E2M1" in text
    assert "outliers  multiplied in high precision by bf16, added to Y and dW" in text
    assert "no kernel splits hot channels off X: PyTorch does, from X as a matrix" in text
    assert "summed over the ranks" not in text
    sharded = replace(setting, sharding=column_parallel(2, sequence_parallel=True))
    text = show(compile_plan(RECIPES["twice"], sharded))
    assert "outliers  chosen by sums over the ranks, multiplied in high precision" in text
