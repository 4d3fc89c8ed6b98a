"""The NVFP4 recipes: each one's three GEMMs against a composition in float64 that is written out
here, with the known mistakes; and which of their gradients are unbiased. Of the package the
compositions use the quantizers and the random bits, and nothing of linear, recipes or execution."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_fp4 import ConfigError, GemmRecipe, Quantizer, Recipe, get_recipe, linear, quantize
from megatron_fp4.arithmetic.estimators import Estimator
from megatron_fp4.arithmetic.hadamard import Hadamard
from megatron_fp4.arithmetic.philox import Key, random_bits16, random_signs, stream_id
from megatron_fp4.arithmetic.quantize import quantize_matrix
from megatron_fp4.arithmetic.quantized_tensor import QuantizedTensor
from megatron_fp4.arithmetic.quantizer import NVFP4
from testing.oracles import normal, relative_error

SEED, STEP = 0xABCDEF0123456789, 17
TOKENS, IN, OUT = 128, 256, 128
BOUND = {torch.bfloat16: 2e-3, torch.float32: 2e-4, torch.float64: 1e-12}
# The first signs of docs/numerics.md's fixed vector.
FIXED = torch.tensor([1, 1, -1, -1, -1, 1, -1, 1, 1, -1, 1, 1, -1, 1, 1, 1.0])
ROW: dict[str, Any] = {"scale": "e4m3", "block": (1, 16), "rule": "nearest", "tensor_max": 448.0}
FOUR_OVER_SIX = ROW | {"rule": "four-over-six", "tensor_max": 256.0}
EDEN = ROW | {"tensor_max": 256.0, "inflate": 17 / 16 * 0.93, "unit_gain": 128}
SMALL = Quantizer(**EDEN | {"unit_gain": 64}, scale_rounding="stochastic")
TURNED = Hadamard(64)
Problem = tuple[Tensor, Tensor, Tensor]
Results = dict[str, Tensor]


def problem(dtype: torch.dtype) -> Problem:
    x = normal((TOKENS, IN), 1) * normal((TOKENS, 1), 5).exp() + 0.2
    x[:, 11] *= 25
    w = normal((OUT, IN), 2) * 0.05 * normal((OUT, 1), 6).exp()
    return x.to(dtype), w.to(dtype), normal((TOKENS, OUT), 3).to(dtype)


# --- the recipes ----------------------------------------------------------------------------------


def test_the_recipes_are_these() -> None:
    row, square = Quantizer(**ROW), Quantizer(**ROW | {"block": (16, 16)})
    noisy, adaptive = replace(row, rounding="stochastic"), Quantizer(**FOUR_OVER_SIX)
    eden = Quantizer(**EDEN, scale_rounding="stochastic")
    fixed = Hadamard(16, "fixed")
    nvidia_s, four, quartet = map(get_recipe, METHODS)
    assert nvidia_s.fprop == GemmRecipe(row, square) and nvidia_s.dgrad == GemmRecipe(noisy, square)
    assert nvidia_s.wgrad == GemmRecipe(noisy, row, fixed)
    assert four.fprop == GemmRecipe(adaptive, adaptive) == quartet.fprop
    assert four.dgrad == GemmRecipe(noisy, adaptive)
    assert four.wgrad == GemmRecipe(noisy, adaptive, fixed)
    assert quartet.dgrad == quartet.wgrad == GemmRecipe(eden, eden, Hadamard(128))
    assert (nvidia_s.backward, four.backward, quartet.backward) == ("raw", "raw", "forward")
    assert all(get_recipe(name).bias_gradient == "raw" for name in METHODS)


@pytest.mark.parametrize(
    ("name", "options", "check"),
    [
        ("nvfp4-nvidia", {"square_weights": "no"}, lambda r: r.fprop.b == r.dgrad.b == NVFP4),
        ("nvfp4-nvidia", {"stochastic": False}, lambda r: not r.draws),
        ("nvfp4-nvidia", {"gradient_rule": "up"}, lambda r: r.dgrad.a.rule == "up"),
        ("nvfp4-nvidia", {"hadamard": 0}, lambda r: r.wgrad.hadamard is None),
        ("nvfp4-nvidia", {"signs": "random"}, lambda r: r.wgrad.hadamard == Hadamard(16)),
        ("four-over-six", {"stochastic": False}, lambda r: not r.draws),
        ("four-over-six", {"gradient_rule": "up"}, lambda r: r.wgrad.a.rule == "up"),
        ("four-over-six", {"hadamard": 64}, lambda r: r.wgrad.hadamard.group == 64),
        ("four-over-six", {"signs": "none"}, lambda r: r.wgrad.hadamard.signs == "none"),
        ("quartet-2", {"four_over_six": False}, lambda r: r.fprop.a == r.fprop.b == NVFP4),
        ("quartet-2", {"hadamard": 64}, lambda r: r.wgrad == GemmRecipe(SMALL, SMALL, TURNED)),
        ("quartet-2", {"unit_gain": False}, lambda r: not (r.dgrad.a.draws or r.dgrad.a.unit_gain)),
    ],
)  # fmt: skip
def test_options(name: str, options: dict[str, Any], check: Callable[[Recipe], bool]) -> None:
    assert check(get_recipe(name, **options)) and not check(get_recipe(name))


def test_sizes_are_multiples_of_the_groups() -> None:
    """Of unit_gain too, where it is larger than the transform's group."""
    eden = Quantizer(**EDEN, scale_rounding="stochastic")
    recipe = Recipe("t", dgrad=GemmRecipe(eden, eden, Hadamard(16)))
    assert recipe.draws
    with pytest.raises(ConfigError, match="out_features is 64.* multiple of 128"):
        linear(torch.ones(4, 64), torch.ones(64, 64), recipe=recipe)
    with pytest.raises(ConfigError, match="a group of 16 or more, not 8"):
        get_recipe("quartet-2", hadamard=8)


def test_an_estimator_takes_no_corrected_scales() -> None:
    eden = Quantizer(**EDEN)
    with pytest.raises(ConfigError, match="no unit_gain"):
        Recipe("t", fprop=GemmRecipe(eden, eden), estimator=Estimator())


# --- the methods, written out ---------------------------------------------------------------------


def q(x: Tensor, axis: int, stream: str = "", **fields: Any) -> QuantizedTensor:
    """Quantizes; with the bits of `stream` where there is one, for scales under `unit_gain` and
    else for elements."""
    if not stream:
        return quantize_matrix(x, Quantizer(**fields), axis=axis)
    drawn = "scale_rounding" if fields.get("unit_gain") else "rounding"
    bits = random_bits16(x.shape[0], x.shape[1], Key(SEED, STEP), stream_id(stream))
    quantizer = Quantizer(**{drawn: "stochastic"} | fields)
    return quantize_matrix(x, quantizer, axis=axis, bits=bits)


def value(x: QuantizedTensor) -> Tensor:
    return x.dequantize(torch.float64)


def turned(x: Tensor, axis: int, signs: Tensor) -> Tensor:
    """x, transformed along an axis in groups of as many elements as there are signs."""
    g = len(signs)
    h = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(g)] for i in range(g)])
    s = (torch.diag(signs) @ h).double() / math.sqrt(g)
    moved = x.double().movedim(axis, -1)
    return (moved.reshape(-1, g) @ s).view(moved.shape).movedim(-1, axis).float().bfloat16()


def nvidia(p: Problem, mistake: str = "") -> Results:
    x, w, dy = p
    square = ROW | {"block": (1, 16) if mistake == "weights-in-rows" else (16, 16)}
    qx, qw = value(q(x, 1, **ROW)), value(q(w, 1, **square))
    return {"y": qx @ qw.t(), **_nvidia_backward(p, qw, ROW, mistake)}


def four_over_six(p: Problem, mistake: str = "") -> Results:
    x, w, _ = p
    form = FOUR_OVER_SIX
    if mistake == "no-room-for-4":
        form = form | {"tensor_max": 448.0}
    if mistake == "always-6":
        form = form | {"rule": "nearest"}
    y = value(q(x, 1, **form)) @ value(q(w, 1, **form)).t()
    return {"y": y, **_nvidia_backward(p, value(q(w, 0, **form)), form, mistake)}


def _nvidia_backward(p: Problem, w: Tensor, form: dict[str, Any], mistake: str) -> Results:
    """dX and dW of the decoded W, and of X in this form."""
    x, _, dy = p
    stream = "linear:dgrad:dy"  # of dY in both
    dx = value(q(dy, 1, "" if mistake == "dy-to-nearest" else stream, **ROW)) @ w
    if mistake == "transform-in-dgrad":
        dx = value(q(turned(dy, 1, FIXED), 1, stream, **ROW)) @ value(
            q(turned(p[1], 0, FIXED), 0, **form)
        )
    signs = FIXED
    if mistake == "random-signs":
        signs = random_signs(16, Key(SEED, STEP), stream_id("linear:wgrad"))
    one, other = (turned(each, 0, signs) for each in (dy, x))
    if mistake == "no-transform":
        one, other = dy, x
    noise = "linear:wgrad:x" if mistake == "x-stochastic" else ""
    if mistake == "x-stochastic":
        form = ROW
    dw = value(q(one, 0, stream, **ROW)).t() @ value(q(other, 0, noise, **form))
    return {"dx": dx, "dw": dw}


def quartet_2(p: Problem, mistake: str = "") -> Results:
    x, w, dy = p
    qx, qw = q(x, 1, **FOUR_OVER_SIX), q(w, 1, **FOUR_OVER_SIX)
    wide = torch.promote_types(x.dtype, torch.float32)
    again = (
        (x, w) if mistake == "raw-requantization" else (qx.dequantize(wide), qw.dequantize(wide))
    )
    form = dict(EDEN)
    if mistake == "scales-to-nearest":
        form["scale_rounding"] = "nearest"
    if mistake == "not-inflated":
        form["inflate"] = 1.0
    if mistake == "a-gain-for-each-block":
        form["unit_gain"] = 16
    if mistake == "elements-stochastic":
        form = ROW | {"inflate": 17 / 16, "tensor_max": 256.0}
    products = {}
    for name, axis, letter, other in (("dx", 1, "w", again[1]), ("dw", 0, "x", again[0])):
        gemm = "dgrad" if name == "dx" else "wgrad"
        signs = random_signs(128, Key(SEED, STEP), stream_id(f"linear:{gemm}"))
        a = value(q(turned(dy, axis, signs), axis, "linear:dgrad:dy", **form))
        b = value(q(turned(other, 0, signs), 0, f"linear:{gemm}:{letter}", **form))
        products[name] = (a if axis else a.t()) @ b
    return {"y": value(qx) @ value(qw).t(), **products}


METHODS: dict[str, Callable[..., Results]] = {
    "nvfp4-nvidia": nvidia,
    "four-over-six": four_over_six,
    "quartet-2": quartet_2,
}


def run(p: Problem, recipe: str | Recipe) -> Results:
    x, w = (t.clone().requires_grad_() for t in p[:2])
    y = linear(x, w, recipe=recipe, seed=SEED, step=STEP)
    y.backward(p[2])
    assert x.grad is not None and w.grad is not None
    return {"y": y.detach(), "dx": x.grad, "dw": w.grad}


@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("name", METHODS)
def test_against_the_composition(name: str, dtype: torch.dtype) -> None:
    p = problem(dtype)
    found, expected = run(p, name), METHODS[name](p)
    for gemm in expected:
        assert relative_error(found[gemm], expected[gemm]) < BOUND[dtype], gemm


MISTAKES = [
    ("nvfp4-nvidia", "weights-in-rows", "y"),
    ("nvfp4-nvidia", "dy-to-nearest", "dx"),
    ("nvfp4-nvidia", "transform-in-dgrad", "dx"),
    ("nvfp4-nvidia", "random-signs", "dw"),
    ("nvfp4-nvidia", "no-transform", "dw"),
    ("nvfp4-nvidia", "x-stochastic", "dw"),
    ("four-over-six", "no-room-for-4", "y"),
    ("four-over-six", "always-6", "y"),
    ("four-over-six", "always-6", "dx"),
    ("four-over-six", "always-6", "dw"),
    ("quartet-2", "raw-requantization", "dx"),
    ("quartet-2", "raw-requantization", "dw"),
    ("quartet-2", "scales-to-nearest", "dx"),
    ("quartet-2", "not-inflated", "dw"),
    ("quartet-2", "a-gain-for-each-block", "dx"),
    ("quartet-2", "elements-stochastic", "dw"),
]


@pytest.mark.parametrize(("name", "mistake", "gemm"), MISTAKES, ids=lambda v: v)
def test_known_mistakes_lie_outside_the_bound(name: str, mistake: str, gemm: str) -> None:
    p = problem(torch.float32)
    wrong = METHODS[name](p, mistake)[gemm]
    assert relative_error(run(p, name)[gemm], wrong) > 10 * BOUND[torch.float32]


def test_dgrad_multiplies_the_w_of_fprop() -> None:
    """Blocks of 16 x 16 give W the same codes and scales along both axes; rows do not."""
    _, w, _ = problem(torch.float32)
    for name, same in (("nvfp4-nvidia", True), ("four-over-six", False)):
        recipe = get_recipe(name)
        forward, backward = recipe.fprop.b, recipe.dgrad.b
        assert forward is not None and backward == forward and recipe.backward == "raw"
        along = quantize_matrix(w, forward, axis=1).dequantize()
        assert torch.equal(along, quantize_matrix(w, forward, axis=0).dequantize()) == same


# --- the mean gradient ----------------------------------------------------------------------------

SIZE, STEPS = 128, 640
X, W = (
    normal((SIZE, SIZE), seed) * normal((SIZE, 1), seed + 10).clamp(-2, 2).exp2() for seed in (1, 2)
)
DY = normal((SIZE, SIZE), 3).abs() * X.sign()  # see tests/test_expected_gradients.py
LIMIT = 5.6  # standard errors; one of 2 * 128 * 128 elements exceeds it once in some 700 runs


def means(recipe: Recipe, dy: Tensor, steps: int = STEPS) -> dict[str, Tensor]:
    """The samples of dX and dW, float64 [steps, SIZE, SIZE]."""
    found: dict[str, list[Tensor]] = {"dx": [], "dw": []}
    for step in range(steps):
        x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
        pair = torch.autograd.grad(linear(x, w, recipe=recipe, step=step), (x, w), dy)
        for name, gradient in zip(found, pair, strict=True):
            found[name].append(gradient.double())
    return {name: torch.stack(samples) for name, samples in found.items()}


def deviates(samples: Tensor, expected: Tensor) -> tuple[float, float]:
    """The largest of the elements, and that of the length along the expected gradient: distances
    of the mean in standard errors."""

    def off(values: Tensor, target: Tensor) -> Tensor:
        error = values.std(0) / math.sqrt(len(values))
        return (values.mean(0) - target).abs() / error

    along = (samples * expected).sum((1, 2)) / expected.square().sum()
    return float(off(samples, expected).max()), float(off(along, torch.ones(())))


def of_forward(recipe: Recipe) -> dict[str, Tensor]:
    """The gradients with the operands that fprop multiplied."""
    assert recipe.fprop.a is not None and recipe.fprop.b is not None
    x = quantize(X, recipe.fprop.a).dequantize(torch.float64)
    w = quantize(W, recipe.fprop.b).dequantize(torch.float64)
    return {"dx": DY.double() @ w, "dw": DY.double().t() @ x}


def test_quartet_2_is_the_gradient_of_its_forward_pass() -> None:
    """On Gaussian operands. Without the gain of 1 it is about 1.6% too small."""
    recipe = get_recipe("quartet-2")
    expected, samples = of_forward(recipe), means(recipe, DY)
    for name in expected:
        worst, length = deviates(samples[name], expected[name])
        assert worst < LIMIT and length < LIMIT, name
    # The controls.
    biased = means(get_recipe("quartet-2", unit_gain=False), DY, 40)
    raw = {"dx": DY.double() @ W.double(), "dw": DY.double().t() @ X.double()}
    for name, target in expected.items():
        gain = (biased[name] * target).sum((1, 2)).mean() / target.square().sum()
        assert 0.980 < gain < 0.988
        assert deviates(biased[name], target)[1] > LIMIT
        assert deviates(samples[name], raw[name])[0] > LIMIT


def test_a_product_of_a_matrix_with_itself_keeps_a_bias() -> None:
    """Both operands share a rotation, so that errors of equal rows multiply: the diagonal of W^T W
    grows by the relative error of W. Stochastic rounding has errors of their own."""
    recipe = get_recipe("quartet-2")
    assert recipe.fprop.b is not None
    w = quantize(W, recipe.fprop.b).dequantize()
    expected = (w.t().double() @ w.double()).diagonal()
    noisy = Quantizer(rounding="stochastic", inflate=17 / 16, **ROW | {"tensor_max": 256.0})
    for other, least, most in ((False, 1.007, 1.012), (True, 0.998, 1.002)):
        gemm = replace(recipe.dgrad, a=noisy, b=noisy)
        chosen = replace(recipe, dgrad=gemm, wgrad=gemm) if other else recipe
        mean = means(chosen, w.t().contiguous(), 100)["dx"].mean(0).diagonal()
        assert least < (mean * expected).sum() / expected.square().sum() < most


def test_nvidia_s_dgrad_is_unbiased_if_nothing_is_clipped() -> None:
    """dW is not: X is rounded to nearest, under signs that never change."""
    expected = of_forward(get_recipe("nvfp4-nvidia"))
    for rule, unbiased in (("up", True), ("nearest", False)):
        samples = means(get_recipe("nvfp4-nvidia", gradient_rule=rule), DY, 160)
        worst, length = deviates(samples["dx"], expected["dx"])
        assert (worst < LIMIT and length < LIMIT) == unbiased
        assert deviates(samples["dw"], DY.double().t() @ X.double())[0] > LIMIT
