"""The linear layer: each recipe's three GEMMs against a float64 composition, and autograd's ways of
calling it. The composition is written out recipe by recipe from the methods; of the package it
uses the quantizers, the random bits and nothing of linear, recipes or backends."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_fp4 import GemmRecipe, Quantizer, Recipe, get_recipe, linear
from megatron_fp4.arithmetic.philox import Key, random_bits16, random_signs, stream_id
from megatron_fp4.arithmetic.quantize import quantize_matrix
from megatron_fp4.arithmetic.quantized_tensor import QuantizedTensor
from megatron_fp4.recipe import HIGH_PRECISION
from testing.oracles import normal, relative_error

SEED, STEP = 0xABCDEF0123456789, 17
TOKENS, IN, OUT = 128, 192, 64
BOUND = {torch.bfloat16: 2e-3, torch.float32: 2e-4, torch.float64: 1e-12}
Results = dict[str, Tensor]


@dataclass(frozen=True)
class Problem:
    x: Tensor
    w: Tensor
    dy: Tensor
    bias: Tensor

    @property
    def raw(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.x.double(), self.w.double(), self.dy.double()


def problem(dtype: torch.dtype = torch.float32) -> Problem:
    """Skewed activations with outlier channels, rows of many sizes."""
    x = normal((TOKENS, IN), 1) * normal((TOKENS, 1), 5).exp() + 0.2
    x[:, 11] *= 25
    w = normal((OUT, IN), 2) * 0.05 * normal((OUT, 1), 6).exp()
    return Problem(
        x.to(dtype), w.to(dtype), normal((TOKENS, OUT), 3).to(dtype), normal((OUT,), 4).to(dtype)
    )


# --- the methods, written out ---------------------------------------------------------------------


def q(x: Tensor, axis: int, stream: str = "", **fields: Any) -> QuantizedTensor:
    """Quantize; stochastically with the bits of `stream` where there is one."""
    if not stream:
        return quantize_matrix(x, Quantizer(**fields), axis=axis)
    rows, columns = x.shape
    bits = random_bits16(rows, columns, Key(SEED, STEP), stream_id(stream))
    quantizer = Quantizer(rounding="stochastic", **fields)
    return quantize_matrix(x, quantizer, axis=axis, bits=bits)


def value(x: QuantizedTensor) -> Tensor:
    return x.dequantize(torch.float64)


def mxfp4(p: Problem) -> Results:
    x, w = value(q(p.x, 1)), value(q(p.w, 1))
    return {
        "y": x @ w.t(),
        "dx": value(q(p.dy, 1)) @ value(q(p.w, 0)),
        "dw": value(q(p.dy, 0)).t() @ value(q(p.x, 0)),
        "db": p.dy.double().sum(0),
    }


def tetrajet(p: Problem, mistake: str = "") -> Results:
    q1, q2 = value(q(p.x, 1, rule="ceil")), value(q(p.w, 1, rule="ceil"))
    x, w = (p.x, p.w) if mistake == "raw-requantization" else (q1, q2)
    # One draw serves both operands of dY; see docs/numerics.md, Random bits.
    q5_stream = "linear:wgrad:dy" if mistake == "q5-draws-alone" else "linear:dgrad:dy"
    q5_axis = 1 if mistake == "q5-along-outputs" else 0
    q3 = value(q(p.dy, 1, "linear:dgrad:dy", rule="ceil"))
    q4 = value(q(w, 0, "linear:dgrad:w", rule="ceil"))
    q5 = value(q(p.dy, q5_axis, q5_stream, rule="ceil"))
    q6 = value(q(x, 0, "linear:wgrad:x", rule="ceil"))
    return {"y": q1 @ q2.t(), "dx": q3 @ q4, "dw": q5.t() @ q6, "db": q3.sum(0)}


def transformed_product(
    gemm: str,
    a: tuple[str, Tensor],
    b: tuple[str, Tensor],
    mistake: str = "",
    signs: Tensor | None = None,
    **fields: Any,
) -> Tensor:
    """a^T b of operands that are transformed in groups of 64 and rounded stochastically.

    a, b: an operand's letter, and the operand [K, M] or [K, N], contracted along its first axis.
    fields: of its quantizer. signs: other signs than the stream's.
    """
    g = 64
    h = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(g)] for i in range(g)])
    if signs is None:
        signs = random_signs(g, Key(SEED, STEP), stream_id(f"linear:{gemm}"))
    s = (torch.diag(signs) @ h).double() / math.sqrt(g)
    if mistake == "signs-after-h":
        s = (h @ torch.diag(signs)).double() / math.sqrt(g)
    values = []
    for letter, operand in (a, b):
        turned = (operand.t().double().reshape(-1, g) @ s).view(operand.t().shape)
        if mistake == "transform-along-the-other-axis" and letter == "w":
            turned = (operand.double().reshape(-1, g) @ s).view(operand.shape).t()
        if gemm == "dgrad" and letter == "dy" or gemm == "wgrad":  # as the model holds it
            layout, axis = (turned, 1) if gemm == "dgrad" else (turned.t(), 0)
        else:
            layout, axis = turned.t(), 0
        bits = "linear:dgrad:dy" if letter == "dy" else f"linear:{gemm}:{letter}"
        quantized = q(layout.float().bfloat16(), axis, bits, **fields)
        values.append(value(quantized) if axis else value(quantized).t())
    return values[0] @ values[1].t()


def mxfp4_rht_sr(p: Problem, mistake: str = "", wgrad_signs: Tensor | None = None) -> Results:
    x, w, dy = p.raw
    dx = transformed_product("dgrad", ("dy", p.dy.t()), ("w", p.w), mistake, prescale=3 / 4)
    dw = transformed_product(
        "wgrad", ("dy", p.dy), ("x", p.x), mistake, wgrad_signs, prescale=3 / 4
    )
    return {"y": x @ w.t(), "dx": 16 / 9 * dx, "dw": 16 / 9 * dw, "db": dy.sum(0)}


def ue5m3(p: Problem, mistake: str = "") -> Results:
    """The second quantization reads the first in the model's precision, float32 at least."""
    form: dict[str, Any] = {"scale": "ue5m3", "block": (1, 16), "tensor_max": 32768.0}
    q1, q2 = (q(t, 1, rule="nearest", **form) for t in (p.x, p.w))
    x, w = (each.dequantize(torch.promote_types(p.x.dtype, torch.float32)) for each in (q1, q2))
    if mistake == "raw-requantization":
        x, w = p.x, p.w
    if mistake == "no-tensor-scale":
        form["tensor_max"] = 0.0
    form["rule"] = "nearest" if mistake == "scales-rounded-down" else "up"
    return {
        "y": value(q1) @ value(q2).t(),
        "dx": transformed_product("dgrad", ("dy", p.dy.t()), ("w", w), mistake, **form),
        "dw": transformed_product("wgrad", ("dy", p.dy), ("x", x), mistake, **form),
        "db": p.dy.double().sum(0),
    }


def dge_factor(scaled: np.ndarray) -> np.ndarray:
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    i = np.clip(np.searchsorted(grid, np.abs(scaled), side="right") - 1, 0, 6)
    u = np.abs(2 * (np.abs(scaled) - grid[i]) / (grid[i + 1] - grid[i]) - 1)
    with np.errstate(divide="ignore"):
        return np.minimum(u ** (1 / 5 - 1) / 5, 3.0)


def dge_occ(p: Problem, mistake: str = "") -> Results:
    vector: dict[str, Any] = {"scale": "fp32", "block": (1, 0), "rule": "absmax"}
    low, high = np.quantile(p.x.double().numpy(), [0.01, 0.99], axis=1, keepdims=True)
    clamped = torch.from_numpy(np.clip(p.x.double().numpy(), low, high)).to(p.x.dtype)
    residual = (p.x - clamped).double()
    qx, qw = (
        q(p.x if mistake == "scale-before-clamp" else clamped, 1, **vector),
        q(p.w, 1, **vector),
    )
    _, w, dy = p.raw
    y = value(qx) @ value(qw).t()
    if mistake != "no-compensation":
        y = y + residual @ w.t()
    e5m2 = {**vector, "element": "e5m2"}
    wide = p.dy.double() if p.dy.dtype == torch.float64 else p.dy.float()
    folded = value(q(wide / qw.scales.t(), 1, **e5m2))
    dx = folded @ qw.elements(torch.float64)
    folded = value(q(wide / qx.scales, 0, **e5m2))
    dw = folded.t() @ qx.elements(torch.float64)
    scale = torch.ones(()) if mistake == "dge-of-unscaled-w" else qw.scales
    factor = torch.from_numpy(dge_factor((w * scale).numpy()))
    if mistake == "no-dge":
        factor = torch.ones(())
    # The residual meets the unquantized W: no estimator stands between it and W's gradient.
    dw = dw * factor + dy.t() @ residual
    if mistake == "dge-on-dx":
        dx = dx * factor.mean()
    if mistake == "residual-left-out-of-wgrad":
        dw = dw - dy.t() @ residual
    return {"y": y, "dx": dx, "dw": dw, "db": dy.sum(0)}


METHODS: dict[str, Callable[..., Results]] = {
    "mxfp4": mxfp4,
    "tetrajet": tetrajet,
    "mxfp4-rht-sr": mxfp4_rht_sr,
    "dge-occ": dge_occ,
    "ue5m3": ue5m3,
}


def run(p: Problem, recipe: Any, shape: tuple[int, ...] = (TOKENS,), **options: Any) -> Results:
    """The linear's output and gradients, x of [*shape, IN]."""
    x, w, bias = (t.clone().requires_grad_() for t in (p.x.view(*shape, IN), p.w, p.bias))
    options = {"seed": SEED, "step": STEP, **options}
    y = linear(x, w, bias, recipe=recipe, **options)
    y.backward(p.dy.view(*shape, OUT))
    assert y.shape == (*shape, OUT) and y.dtype == p.x.dtype
    found = {"y": y, "dx": x.grad, "dw": w.grad, "db": bias.grad}
    for name, like in (("dx", x), ("dw", w), ("db", bias)):
        gradient = found[name]
        assert gradient is not None
        assert gradient.shape == like.shape and gradient.dtype == like.dtype
    # The bias is a second rounding of a BF16 output: test_bias.
    found["y"] = linear(p.x, p.w, recipe=recipe, **options)
    found["dx"] = x.grad.view(-1, IN)  # type: ignore[union-attr]
    return found  # type: ignore[return-value]


def errors(found: Results, expected: Results) -> dict[str, float]:
    return {name: relative_error(found[name], expected[name]) for name in expected}


@pytest.mark.parametrize("shape", [(TOKENS,), (32, 4), (2, 16, 4)], ids=["2d", "3d", "4d"])
@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("name", METHODS)
def test_against_the_composition(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    p = problem(dtype)
    bound = BOUND[dtype]
    if name == "dge-occ" and dtype == torch.bfloat16:
        bound *= 2  # the compensation's own product is rounded to BF16 before it is added
    for gemm, error in errors(run(p, name, shape), METHODS[name](p)).items():
        assert error < bound, (gemm, error)


MISTAKES = [
    ("tetrajet", "raw-requantization", "dx"),
    ("tetrajet", "raw-requantization", "dw"),
    ("tetrajet", "q5-draws-alone", "dw"),
    ("tetrajet", "q5-along-outputs", "dw"),
    ("mxfp4-rht-sr", "signs-after-h", "dx"),
    ("ue5m3", "raw-requantization", "dx"),
    ("ue5m3", "raw-requantization", "dw"),
    ("ue5m3", "signs-after-h", "dx"),
    ("ue5m3", "transform-along-the-other-axis", "dx"),
    ("ue5m3", "scales-rounded-down", "dx"),
    ("ue5m3", "scales-rounded-down", "dw"),
    ("ue5m3", "no-tensor-scale", "dw"),
    ("dge-occ", "scale-before-clamp", "y"),
    ("dge-occ", "no-compensation", "y"),
    ("dge-occ", "dge-of-unscaled-w", "dw"),
    ("dge-occ", "no-dge", "dw"),
    ("dge-occ", "dge-on-dx", "dx"),
    ("dge-occ", "residual-left-out-of-wgrad", "dw"),
]


@pytest.mark.parametrize(("name", "mistake", "gemm"), MISTAKES, ids=lambda v: v)
def test_known_mistakes_lie_outside_the_bound(name: str, mistake: str, gemm: str) -> None:
    """Negative controls: the composition with one mistake in it."""
    p = problem()
    wrong = METHODS[name](p, mistake)
    assert errors(run(p, name), wrong)[gemm] > 10 * BOUND[torch.float32]


def test_fp4_does_not_leak_into_a_high_precision_forward() -> None:
    p = problem()
    plain = p.x @ p.w.t()
    assert torch.equal(run(p, "mxfp4-rht-sr")["y"], plain)


def test_fp8_forward() -> None:
    p = problem()
    fp8: dict[str, Any] = {"element": "e4m3", "scale": "fp32", "block": (0, 0), "rule": "absmax"}
    expected = value(q(p.x, 1, **fp8)) @ value(q(p.w, 1, **fp8)).t()
    found = run(p, get_recipe("mxfp4-rht-sr", forward="fp8"))
    assert relative_error(found["y"], expected) < BOUND[torch.float32]
    assert relative_error(found["dx"], mxfp4_rht_sr(p)["dx"]) < BOUND[torch.float32]


def test_the_residual_stays_out_of_wgrad_where_asked() -> None:
    p = problem()
    expected = dge_occ(p, "residual-left-out-of-wgrad")
    recipe = get_recipe("dge-occ", residual_in_wgrad=False)
    assert errors(run(p, recipe), expected)["dw"] < BOUND[torch.float32]


def test_raw_wgrad_has_each_outlier_once() -> None:
    """Where backward takes the raw X, the residual is in it already."""
    p = problem()
    plain = replace(
        get_recipe("dge-occ", dge=False), backward="raw", dgrad=HIGH_PRECISION, wgrad=HIGH_PRECISION
    )
    assert errors(run(p, plain), {"dw": p.dy.t() @ p.x})["dw"] < BOUND[torch.float32]


@pytest.mark.parametrize(
    "scale",
    [
        {"scale": "fp32", "block": (1, 0), "rule": "absmax"},
        {"scale": "fp32", "block": (0, 0), "rule": "absmax"},
        {"scale": "e8m0", "block": (1, 0), "rule": "ceil"},
        {"scale": "e8m0", "block": (0, 0), "rule": "ceil"},
        {"scale": "e4m3", "block": (1, 0), "rule": "nearest"},
        {"scale": "e4m3", "block": (1, 0), "rule": "nearest", "tensor_max": 448.0},
        {"scale": "e4m3", "block": (1, 16), "rule": "nearest", "row_max": 448.0},
        {"scale": "e8m0", "block": (1, 16), "rule": "mse", "row_max": 1.0},
        {"scale": "fp32", "block": (1, 16), "rule": "absmax"},
    ],
    ids=lambda fields: " ".join(map(str, fields.values())),
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_backward_takes_what_forward_multiplied_whatever_its_scale(
    scale: dict[str, Any], dtype: torch.dtype
) -> None:
    """dY in high precision: the products with decoded operands, but for dY's own casting."""
    quantizer, gradient = Quantizer(**scale), get_recipe("dge-occ").dgrad.a
    forward, backward = GemmRecipe(quantizer, quantizer), GemmRecipe(gradient)
    recipe = Recipe("t", fprop=forward, dgrad=backward, wgrad=backward, backward="forward")
    p = problem(dtype)
    found = run(p, recipe)
    x, w = (
        quantize_matrix(t.detach(), quantizer, axis=1).dequantize(torch.float64) for t in (p.x, p.w)
    )
    dy = p.dy.double()
    for name, expected in (("dx", dy @ w), ("dw", dy.t() @ x)):
        assert relative_error(found[name], expected) < 0.15, name  # E5M2 has two bits


WORDS: dict[str, dict[str, Any]] = {
    "row-scales": {"block": (1, 16), "row_max": 1.0},
    "row-scales-in-ue5m3": {
        "scale": "ue5m3", "block": (1, 16), "rule": "up", "row_max": 32768.0,
    },
    "float32-scales": {"scale": "fp32", "block": (1, 32), "rule": "absmax"},
    "uniform": {"element": "e1m2", "rule": "ceil"},
    "uniform-in-ue5m3": {
        "element": "e1m2", "scale": "ue5m3", "block": (1, 16), "rule": "up", "tensor_max": 32768.0,
    },
}  # fmt: skip


@pytest.mark.parametrize("backward", ["forward", "raw"])
@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("word", WORDS)
def test_other_scales_and_elements(word: str, dtype: torch.dtype, backward: Any) -> None:
    """Quantized in all three GEMMs, stochastically in two, against the composition."""
    p, form = problem(dtype), WORDS[word]
    nearest = Quantizer(**form)
    noisy = replace(nearest, rounding="stochastic")
    forward, gemm = GemmRecipe(nearest, nearest), GemmRecipe(noisy, noisy)
    recipe = Recipe("t", "", forward, gemm, gemm, backward=backward)
    q1, q2 = q(p.x, 1, **form), q(p.w, 1, **form)
    x, w = p.x, p.w
    if backward == "forward":
        wide = torch.promote_types(dtype, torch.float32)
        x, w = q1.dequantize(wide), q2.dequantize(wide)
    expected = {
        "y": value(q1) @ value(q2).t(),
        "dx": value(q(p.dy, 1, "linear:dgrad:dy", **form))
        @ value(q(w, 0, "linear:dgrad:w", **form)),
        "dw": value(q(p.dy, 0, "linear:dgrad:dy", **form)).t()
        @ value(q(x, 0, "linear:wgrad:x", **form)),
    }
    for name, error in errors(run(p, recipe), expected).items():
        assert error < BOUND[dtype], (name, error)
    plain: dict[str, Any] = {"block": (1, 16)} if word == "float32-scales" else {"row_max": 0.0}
    other = q(p.x, 1, **form | plain | {"element": "e2m1"})  # the control
    assert relative_error(other.dequantize(), value(q1)) > 10 * BOUND[torch.float32]


@pytest.mark.parametrize("word", ["uniform", "uniform-in-ue5m3"])
def test_codes_of_a_uniform_grid_that_are_read_as_e2m1_are_noticed(word: str) -> None:
    quantizer, p = Quantizer(**WORDS[word]), problem()
    recipe = Recipe("t", fprop=GemmRecipe(quantizer, quantizer))
    each = [quantize_matrix(t, quantizer, axis=1) for t in (p.x, p.w)]
    wrong = [value(replace(t, quantizer=replace(quantizer, element="e2m1"))) for t in each]
    found = run(p, recipe)["y"]
    assert relative_error(found, value(each[0]) @ value(each[1]).t()) < BOUND[torch.float32]
    assert relative_error(found, wrong[0] @ wrong[1].t()) > 0.1
