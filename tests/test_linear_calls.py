"""Random bits and autograd of the linear: what a call depends on, what it must leave alone."""

from __future__ import annotations

import math
import weakref
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from megatron_fp4 import (
    ConfigError,
    GemmRecipe,
    Quantizer,
    Recipe,
    get_recipe,
    linear,
)
from megatron_fp4.arithmetic.hadamard import Hadamard
from megatron_fp4.arithmetic.philox import Key, random_signs, stream_id
from megatron_fp4.arithmetic.quantized_tensor import QuantizedTensor
from megatron_fp4.errors import SizeError
from megatron_fp4.execution import backward
from megatron_fp4.execution.call import Call, Site
from megatron_fp4.linear import quantized_linear
from megatron_fp4.monitor import NonFinite, NonFiniteMonitor
from megatron_fp4.recipe import GEMMS, OPERANDS
from megatron_fp4.recipes import uniform_recipes
from testing.builders.small_recipes import small_recipe
from testing.oracles import relative_error
from tests.test_linear import (
    BOUND,
    IN,
    OUT,
    SEED,
    STEP,
    TOKENS,
    Problem,
    Results,
    mxfp4_rht_sr,
    problem,
    q,
    run,
    value,
)

# --- keys -----------------------------------------------------------------------------------------

ALL = uniform_recipes()


def equal(a: Results, b: Results) -> dict[str, bool]:
    return {name: torch.equal(a[name], b[name]) for name in a}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ALL)
def test_a_rerun_is_bit_exact(name: str, dtype: torch.dtype) -> None:
    p = problem(dtype)
    assert all(equal(run(p, small_recipe(name)), run(p, small_recipe(name))).values())


@pytest.mark.parametrize("other", [{"seed": 1}, {"step": 18}, {"name": "fc2"}], ids=str)
def test_random_bits_are_of_seed_step_and_name(other: dict[str, Any]) -> None:
    p = problem()
    same = equal(run(p, "tetrajet"), run(p, "tetrajet", **other))
    assert same["y"] and not (same["dx"] or same["dw"] or same["db"])


def test_microbatches_share_all_but_the_signs_of_wgrad() -> None:
    """W is prepared once a step, so dgrad's signs are the step's; wgrad's are fresh."""
    p, recipe = problem(), get_recipe("mxfp4-rht-sr")
    found = []
    for microbatch in (0, 1):
        x, w = p.x.clone().requires_grad_(), p.w.clone().requires_grad_()
        call = Call(Key(SEED, STEP), microbatch)
        quantized_linear(x, w, None, recipe, call=call).backward(p.dy)
        found.append({"dx": x.grad, "dw": w.grad})
    expected = run(p, recipe)
    assert torch.equal(found[0]["dx"], expected["dx"])  # type: ignore[arg-type]
    assert torch.equal(found[1]["dx"], expected["dx"])  # type: ignore[arg-type]
    assert torch.equal(found[0]["dw"], expected["dw"])  # type: ignore[arg-type]
    signs = random_signs(64, Key(SEED, STEP), stream_id("linear:wgrad"), draw=1)
    expected_dw = mxfp4_rht_sr(p, wgrad_signs=signs)["dw"]
    assert relative_error(found[1]["dw"], expected_dw) < BOUND[torch.float32]  # type: ignore


def test_repeated_calls_multiply_the_same_w() -> None:
    """W is quantized once a step, whichever call comes first; X is rounded anew in each."""
    p, noisy = problem(), Quantizer(rule="ceil", rounding="stochastic")

    def outputs(fprop: GemmRecipe) -> list[torch.Tensor]:
        recipe = Recipe("noisy", fprop=fprop)
        calls = [Call(Key(SEED, STEP), 0, repeat) for repeat in (0, 1)]
        return [quantized_linear(p.x, p.w, None, recipe, call=call) for call in calls]

    assert torch.equal(*outputs(GemmRecipe(None, noisy)))
    assert not torch.equal(*outputs(GemmRecipe(noisy, None)))


@pytest.mark.parametrize("signs", ["random", "fixed", "none"])
def test_a_forward_transform_is_turned_back(signs: Any) -> None:
    """A Hadamard in fprop with double quantization: dgrad and wgrad take W and X in their own
    basis, as the forward pass saw them."""
    p, g, nearest = problem(), 32, Quantizer(rule="ceil")
    recipe = replace(get_recipe("tetrajet"), fprop=GemmRecipe(nearest, nearest, Hadamard(g, signs)))
    h = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(g)] for i in range(g)]).double()
    if signs != "none":
        drawn = (Key(0), "hadamard") if signs == "fixed" else (Key(SEED, STEP), "linear:fprop")
        h = torch.diag(random_signs(g, drawn[0], stream_id(drawn[1]))).double() @ h
    s = torch.block_diag(*[h / math.sqrt(g)] * (IN // g))
    q1 = value(q((p.x.double() @ s).float().bfloat16(), 1, rule="ceil"))
    q2 = value(q((p.w.double() @ s).float().bfloat16(), 1, rule="ceil"))
    x, w = (q1 @ s.t()).float(), (q2 @ s.t()).float()
    found = run(p, recipe)
    assert relative_error(found["y"], q1 @ q2.t()) < BOUND[torch.float32]
    q3, q5 = (q(p.dy, axis, "linear:dgrad:dy", rule="ceil") for axis in (1, 0))  # one draw
    q4, q6 = q(w, 0, "linear:dgrad:w", rule="ceil"), q(x, 0, "linear:wgrad:x", rule="ceil")
    assert relative_error(found["dx"], value(q3) @ value(q4)) < BOUND[torch.float32]
    assert relative_error(found["dw"], value(q5).t() @ value(q6)) < BOUND[torch.float32]


@pytest.mark.parametrize("signs", ["fixed", "random"])
def test_fixed_signs_are_of_no_seed_step_or_name(signs: Any) -> None:
    """Nothing is drawn; the control is that random signs are."""
    p, recipe = problem(), get_recipe("mxfp4-rht-sr", signs=signs, stochastic=False)
    assert recipe.draws == (signs == "random")
    expected = run(p, recipe)
    for other in ({"seed": 1}, {"step": 18}, {"name": "fc2"}):
        same = equal(expected, run(p, recipe, **other))
        assert same["y"] and same["db"]
        assert same["dx"] == same["dw"] == (signs == "fixed")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_without_its_gemms_a_recipe_is_the_plain_linear_bit_for_bit(dtype: torch.dtype) -> None:
    late = get_recipe("tetrajet").without(GEMMS)
    p = problem()
    results = []
    for product in (
        lambda x, w: quantized_linear(x, w, None, late),
        torch.nn.functional.linear,
    ):
        x, w = (t.to(dtype).requires_grad_() for t in (p.x, p.w))
        y = product(x, w)
        y.backward(p.dy.to(dtype))
        results.append((y, x.grad, w.grad))
    for ours, plain in zip(*results, strict=True):
        assert ours is not None and plain is not None and torch.equal(ours, plain)


# --- autograd's ways ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("needed", ["x", "w", "bias", "none"])
def test_only_what_needs_a_gradient_gets_one(name: str, needed: str) -> None:
    p = problem()
    leaves = {"x": p.x.clone(), "w": p.w.clone(), "bias": p.bias.clone()}
    if needed != "none":
        leaves[needed].requires_grad_()
    y = linear(
        leaves["x"], leaves["w"], leaves["bias"], recipe=small_recipe(name), seed=SEED, step=STEP
    )
    assert y.requires_grad == (needed != "none")
    if needed == "none":
        return
    y.backward(p.dy)
    letter = {"x": "dx", "w": "dw", "bias": "db"}[needed]
    gradient = leaves[needed].grad
    assert gradient is not None
    if needed == "bias" and small_recipe(name).bias_gradient == "quantized":
        assert relative_error(gradient, p.dy.double().sum(0)) < 1e-6  # raw: no dX, no Q3
    else:
        assert torch.equal(gradient, run(p, small_recipe(name))[letter])


@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("name", ALL)
def test_bias(name: str, dtype: torch.dtype) -> None:
    p = problem(dtype)
    plain = linear(p.x, p.w, recipe=small_recipe(name))
    y = linear(p.x, p.w, 64 * p.bias, recipe=small_recipe(name))
    assert relative_error(y, plain.double() + 64 * p.bias.double()) < BOUND[dtype]


def test_the_bias_is_added_before_y_is_rounded() -> None:
    """1 + 2^-9 and 3/8 of BF16's last place round to the next number together, and to 1 apart."""
    x, w = (torch.zeros(64, 64, dtype=torch.bfloat16) for _ in range(2))
    x[:, 0], x[:, 1], w[:, :2] = 1.0, 2.0**-9, 1.0
    bias = torch.full((64,), 0.375 * 2.0**-7, dtype=torch.bfloat16)
    y = quantized_linear(x, w, bias, get_recipe("mxfp4-rht-sr"))
    assert (y == 1 + 2.0**-7).all() and (x[:, 0] + bias == 1).all()


@pytest.mark.parametrize("name", ALL)
def test_no_tokens(name: str) -> None:
    x = torch.zeros(0, IN, requires_grad=True)
    w = problem().w.requires_grad_()
    linear(x, w, recipe=small_recipe(name)).sum().backward()
    assert x.grad is not None and x.grad.shape == (0, IN)
    assert w.grad is not None and not w.grad.any()


def test_noncontiguous_input_and_gradient() -> None:
    p = problem()
    x = p.x.t().contiguous().t().requires_grad_()
    w = p.w.clone().requires_grad_()
    linear(x, w, p.bias, recipe="tetrajet", seed=SEED, step=STEP).backward(
        p.dy.t().contiguous().t()
    )
    expected = run(p, "tetrajet")
    assert torch.equal(x.grad, expected["dx"])  # type: ignore[arg-type]
    assert torch.equal(w.grad, expected["dw"])  # type: ignore[arg-type]


def test_a_gradient_of_one_number_for_all() -> None:
    p = problem()
    w = p.w.clone().requires_grad_()
    linear(p.x, w, recipe="tetrajet").sum().backward()
    ones = p.w.clone().requires_grad_()
    linear(p.x, ones, recipe="tetrajet").backward(torch.ones(TOKENS, OUT))
    assert torch.equal(w.grad, ones.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("inside", [False, True], ids=["backward-outside", "backward-inside"])
@pytest.mark.parametrize("name", ALL)
def test_autocast(name: str, inside: bool) -> None:
    """As nn.functional.linear: operands are cast, gradients come back in their leaves' dtypes; and
    the products of backward are the same inside the region as outside."""
    p = problem()
    x, w, bias = (t.clone().requires_grad_() for t in (p.x, p.w, p.bias))
    with torch.autocast("cpu", torch.bfloat16):
        y = linear(x, w, bias, recipe=small_recipe(name), seed=SEED, step=STEP)
        if inside:
            y.backward(p.dy.bfloat16())
    if not inside:
        y.backward(p.dy.bfloat16())
    narrow_x, narrow_w = (t.bfloat16().requires_grad_() for t in (p.x, p.w))
    wide = p.bias.clone().requires_grad_()  # is added in float32
    recipe, call = small_recipe(name), Call(Key(SEED, STEP))
    site = Site() if recipe.weight_average is None else Site(average=p.w)  # W in float32
    expected = quantized_linear(narrow_x, narrow_w, wide, recipe, site, call)
    expected.backward(p.dy.bfloat16())
    assert y.dtype == torch.bfloat16 and torch.equal(y, expected)
    for found, leaf in zip((x, w, bias), (narrow_x, narrow_w, wide), strict=True):
        assert found.grad is not None and leaf.grad is not None
        assert found.grad.dtype == torch.float32 and torch.equal(found.grad, leaf.grad.float())


def test_autocast_leaves_float64_alone() -> None:
    """As it does in nn.functional.linear."""
    x, w = (t.double() for t in (problem().x, problem().w))
    with torch.autocast("cpu", torch.bfloat16):
        y = linear(x, w, recipe="tetrajet")
        with pytest.raises(ConfigError, match="x is float32 and weight float64"):
            linear(x.float(), w, recipe="tetrajet")
    assert y.dtype == torch.float64 and torch.equal(y, linear(x, w, recipe="tetrajet"))


# --- what a call shows the monitor ----------------------------------------------------------------


@pytest.mark.parametrize("bad", ["x", "w", "dy", "none"])
@pytest.mark.parametrize("name", ALL)
def test_a_nan_is_seen_in_the_operand_that_holds_it(name: str, bad: str) -> None:
    seen: list[tuple[str, str, int]] = []

    def observe(gemm: str, operand: str, tally: torch.Tensor) -> None:
        rounded, nans = tally.tolist()
        seen.append((gemm, operand, nans))
        assert rounded == 0

    tensors = {"x": torch.randn(TOKENS, IN), "w": torch.randn(OUT, IN)}
    tensors["dy"] = torch.randn(TOKENS, OUT)
    if bad != "none":
        tensors[bad][5, 7] = torch.nan  # an Inf of dge-occ is an outlier, and multiplied apart
    x, w = (tensors[name].requires_grad_() for name in "xw")
    y = quantized_linear(x, w, None, small_recipe(name), Site(observe=observe))
    y.backward(tensors["dy"])
    # Those that the recipe quantizes, in the order in which they are multiplied.
    recipe = small_recipe(name)
    first = [("wgrad", "x")] if recipe.fprop.a is None else []  # packed in forward
    assert [(gemm, operand) for gemm, operand, _ in seen] == first + [
        (gemm, operand)
        for gemm, operands in OPERANDS.items()
        for operand in operands
        if recipe.quantizer(gemm, operand) is not None
    ]
    assert ([operand for _, operand, nans in seen if nans] or ["none"])[0] == bad


def test_where_the_forward_pass_is_bf16_a_nan_is_still_seen_where_it_first_stood() -> None:
    """wgrad's copy of X is shown as it is made: backward starts with the last layer."""
    watching, recipe = NonFiniteMonitor(), get_recipe("mxfp4-rht-sr")
    x = torch.randn(TOKENS, IN)
    x[3, 5] = torch.nan
    for layer in ("fc1", "fc2"):
        w = torch.randn(IN, IN).requires_grad_()
        x = quantized_linear(x, w, None, recipe, Site(observe=partial(watching.observe, layer)))
    x.sum().backward()
    assert watching.look() == NonFinite(0, "fc1", "wgrad", "x")


# --- main_grad ------------------------------------------------------------------------------------


def added(p: Problem, name: str, *microbatches: int, zeros: bool = False) -> torch.Tensor:
    """main_grad of a BF16 weight after some microbatches."""
    w = p.w.clone().requires_grad_()
    w.main_grad = torch.zeros(OUT, IN)  # type: ignore[attr-defined]
    w.grad_added_to_main_grad, w.zero_out_wgrad = False, zeros  # type: ignore[attr-defined]
    for microbatch in microbatches:
        call = Call(Key(SEED, STEP), microbatch)
        quantized_linear(p.x, w, None, small_recipe(name), Site(fuses=True), call).backward(p.dy)
        # Autograd wants a gradient in its place: nobody's, or zeros.
        assert w.grad is not None and w.grad.shape == w.shape and w.grad.dtype == w.dtype
        assert not (zeros and w.grad.any())
        w.grad = None
    assert w.grad_added_to_main_grad  # type: ignore[attr-defined]
    return w.main_grad  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ALL)
def test_dw_is_added_to_main_grad_unrounded(name: str) -> None:
    """As Megatron's DistributedDataParallel asks for. What is added rounds to autograd's dW."""
    p = problem(torch.bfloat16)
    found = added(p, name, 0)
    rounded = run(p, small_recipe(name))["dw"]
    assert torch.equal(found.bfloat16(), rounded)
    assert not torch.equal(found, rounded.float())  # negative control: rounded first
    assert torch.equal(added(p, name, 0, 1, zeros=True), found + added(p, name, 1))


def test_without_a_main_grad_the_gradient_is_autograd_s() -> None:
    p = problem()
    w = p.w.clone().requires_grad_()
    site, call = Site(fuses=True), Call(Key(SEED, STEP))
    quantized_linear(p.x, w, None, get_recipe("tetrajet"), site, call).backward(p.dy)
    assert w.grad is not None and torch.equal(w.grad, run(p, "tetrajet")["dw"])


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_the_operands_of_dgrad_are_freed_before_wgrad_runs(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for dY's where the bias gradient sums it."""
    is_summed = small_recipe(name).bias_gradient == "quantized"
    assert left_of_dgrad(name, monkeypatch) == [is_summed, False]
    # The known mistake: all that is made is kept to the end.
    monkeypatch.setattr(backward.Backward, "_forget", lambda self, gemm: None)
    assert left_of_dgrad(name, monkeypatch) == [True, True]


def left_of_dgrad(name: str, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether dgrad's operands, dY and W, are still there when wgrad is to run."""
    p, run_gemm = problem(torch.bfloat16), backward.run_gemm
    made: list[weakref.ref[Any]] = []
    left: list[bool] = []

    def watched(gemm: Any, a: Any, b: Any, *args: Any, **kwargs: Any) -> Any:
        if gemm.name == "dgrad":
            operands = [operand.operand for operand in (a, b)]
            codes = [q.codes if isinstance(q, QuantizedTensor) else q for q in operands]
            made.extend(map(weakref.ref, codes))
        else:
            left.extend(tensor() is not None for tensor in made)
        return run_gemm(gemm, a, b, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(backward, "run_gemm", watched)
        x, w, bias = (t.clone().requires_grad_() for t in (p.x, p.w, p.bias))
        linear(x, w, bias, recipe=small_recipe(name)).backward(p.dy)
    return left


def test_tokens_are_checked_for_the_gemms_that_run() -> None:
    """Square blocks of X take whole blocks of tokens in the forward pass too: no advice to leave
    out gradients."""
    square = Quantizer(scale="e4m3", rule="nearest", block=(16, 16))
    recipe = Recipe("square", fprop=GemmRecipe(square, square))
    x, weight = torch.randn(5, 64), torch.randn(32, 64)
    with pytest.raises(SizeError, match="fc1: x has 5 tokens .*choose a multiple of 16$"):
        linear(x, weight, recipe=recipe, name="fc1")
    assert linear(x, weight, recipe="mxfp4").shape == (5, 32)  # wgrad alone contracts tokens
    with pytest.raises(SizeError, match="under torch.no_grad"):
        linear(x, weight.requires_grad_(), recipe="mxfp4")
