"""E[dX] and E[dW] over more than 1e4 independent draws, within the central-limit bound; the known
mistakes fail the same check.

One step holds REPLICAS independent draws of one small problem, laid side by side along the axis
that the backward GEMM contracts: X and dY are repeated along tokens for dW, W and dY along outputs
for dX. Each element has its own random bits and each replica its own blocks and Hadamard groups,
so the product, divided by REPLICAS, is the mean of that many independent samples of the gradient.

For each of the 4096 elements of a gradient, t = (mean over steps - expected) / standard error is
Student's t where the gradient is unbiased (each step averages 64 * REPLICAS products, nearly
normal). It is mapped to a normal deviate, and the largest of all may exceed the LIMIT that a fair
gradient exceeds once in a million runs, by Bonferroni's bound: no independence is assumed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import NormalDist

import pytest
import torch
from torch import Tensor

from megatron_fp4 import GemmRecipe, Quantizer, Recipe, get_recipe, linear, quantize, recipe_fields
from megatron_fp4.arithmetic import quantizer
from megatron_fp4.arithmetic.philox import Signs, stream_id
from megatron_fp4.execution import call, forward
from megatron_fp4.execution.backward import Backward
from megatron_fp4.linear import _site
from testing.oracles import normal

SIZE, REPLICAS = 64, 32
STEPS = 320  # * REPLICAS = 10240 draws
FEW = 24  # enough for the mistakes, which are gross
LIMIT = NormalDist().inv_cdf(1 - 1e-6 / (2 * (2 * SIZE * SIZE + 2)))


def _operand(seed: int) -> Tensor:
    """Gaussian, with rows of different sizes: blocks along the other axis then take other scales,
    and requantizing what the forward pass quantized is not the identity."""
    rows = normal((SIZE, 1), seed + 10).clamp(-2, 2).exp2()
    return normal((SIZE, SIZE), seed) * rows


X, W = _operand(1), _operand(2)
# dY has the signs of X: stochastic rounding moves magnitudes, so errors that share their bits
# would otherwise cancel over tokens of random signs, and hide on the diagonal of dW.
DY = normal((SIZE, SIZE), 3).abs() * X.sign()


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def sample_dx(recipe: Recipe, step: int) -> Tensor:
    """The mean of REPLICAS samples of dX."""
    x = X.clone().requires_grad_()
    weight, dy = W.repeat(REPLICAS, 1), DY.repeat(1, REPLICAS)
    (dx,) = torch.autograd.grad(linear(x, weight, recipe=recipe, step=step), x, dy)
    return dx / REPLICAS


def sample_dw(recipe: Recipe, step: int) -> Tensor:
    """The mean of REPLICAS samples of dW."""
    x, weight, dy = X.repeat(REPLICAS, 1), W.clone().requires_grad_(), DY.repeat(REPLICAS, 1)
    (dw,) = torch.autograd.grad(linear(x, weight, recipe=recipe, step=step), weight, dy)
    return dw / REPLICAS


@dataclass(frozen=True)
class Verdict:
    """The largest normal deviate over the elements, and that of the gradient's length along the
    expected one, which sees a small shrinkage of all elements at once."""

    worst: float
    length: float

    @property
    def unbiased(self) -> bool:
        return self.worst < LIMIT and self.length < LIMIT


def deviate(samples: Tensor, expected: Tensor) -> Tensor:
    """|normal deviate| of the mean of samples [n, ...] against the expected one."""
    n = samples.shape[0]
    rounding = 1e-6 * expected.abs().mean()  # of the float32 product, where nothing is random
    error = samples.std(0).square().div(n).add(rounding**2).sqrt()
    t, degrees = (samples.mean(0) - expected).abs() / error, n - 1
    # Student's t to a normal deviate: Abramowitz and Stegun, 26.7.8.
    return t * (1 - 1 / (4 * degrees)) / (1 + t.square() / (2 * degrees)).sqrt()


def judge(
    sample: Callable[[Recipe, int], Tensor],
    recipe: Recipe,
    expected: Tensor,
    steps: int,
    step_of: Callable[[int], int] = lambda i: i,
) -> Verdict:
    samples = torch.stack([sample(recipe, step_of(i)).double() for i in range(steps)])
    along = (samples * expected).sum((1, 2)) / expected.square().sum()
    length = deviate(along[:, None], torch.ones(1, dtype=torch.float64))
    return Verdict(float(deviate(samples, expected).max()), float(length))


def forward_quantized(recipe: Recipe) -> dict[str, Tensor]:
    """The gradients with the operands that the forward pass multiplied."""
    assert recipe.fprop.a is not None and recipe.fprop.b is not None
    x = quantize(X, recipe.fprop.a).dequantize(torch.float64)
    w = quantize(W, recipe.fprop.b).dequantize(torch.float64)
    return {"dx": DY.double() @ w, "dw": DY.double().t() @ x}


RAW = {"dx": DY.double() @ W.double(), "dw": DY.double().t() @ X.double()}
SAMPLE = {"dx": sample_dx, "dw": sample_dw}
TETRAJET, RHT = get_recipe("tetrajet"), get_recipe("mxfp4-rht-sr")
UE5M3 = get_recipe("ue5m3")
both = pytest.mark.parametrize("gradient", ["dx", "dw"])


@both
def test_tetrajet_is_the_gradient_of_its_forward_pass(gradient: str) -> None:
    expected = forward_quantized(TETRAJET)[gradient]
    verdict = judge(SAMPLE[gradient], TETRAJET, expected, STEPS)
    assert verdict.unbiased, verdict


@both
def test_mxfp4_rht_sr_is_the_raw_gradient(gradient: str) -> None:
    verdict = judge(SAMPLE[gradient], RHT, RAW[gradient], STEPS)
    assert verdict.unbiased, verdict


@both
def test_ue5m3_is_the_gradient_of_its_forward_pass(gradient: str) -> None:
    verdict = judge(SAMPLE[gradient], UE5M3, forward_quantized(UE5M3)[gradient], STEPS)
    assert verdict.unbiased, verdict


@pytest.mark.parametrize("base", [TETRAJET, RHT], ids=["tetrajet", "mxfp4-rht-sr"])
def test_dw_without_the_mean_of_x_is_that_with_it(base: Recipe) -> None:
    """dW is the gradient of the forward pass, Q(X - mean) + mean, or the raw gradient."""
    verdict = judge(sample_dw, subtracting(base), expected_with_mean(base), STEPS)
    assert verdict.unbiased, verdict


def subtracting(base: Recipe) -> Recipe:
    return replace(base, x_mean="subtracted")


def expected_with_mean(base: Recipe) -> Tensor:
    if base.fprop.a is None:
        return RAW["dw"]
    mean = X.double().mean(0).float()
    rest = quantize(X - mean, base.fprop.a).dequantize(torch.float64)
    return DY.double().t() @ (rest + mean.double())


# --- the known mistakes ---------------------------------------------------------------------------


@both
@pytest.mark.parametrize(
    "options",
    [{"rule": "floor"}, {"double_quantization": False}, {"backward_rounding": "nearest"}],
    ids=["floor-rule", "raw-requantization", "nearest"],
)
def test_tetrajet_mistakes_fail(options: dict, gradient: str) -> None:
    recipe = get_recipe("tetrajet", **options)
    expected = forward_quantized(recipe)[gradient]
    assert not judge(SAMPLE[gradient], recipe, expected, FEW).unbiased


def test_one_stream_for_q5_and_q6_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both operands of wgrad draw one stream: their rounding errors multiply to a bias of dW. That
    dY has one stream in both products gives none."""
    monkeypatch.setattr(
        call, "stream_id", lambda name: stream_id(name.replace("wgrad:x", "dgrad:dy"))
    )
    _site.cache_clear()  # whose streams are known
    expected = forward_quantized(TETRAJET)
    assert not judge(sample_dw, TETRAJET, expected["dw"], STEPS).unbiased
    assert judge(sample_dx, TETRAJET, expected["dx"], FEW).unbiased  # which has other streams
    _site.cache_clear()


@pytest.mark.parametrize("base", [TETRAJET, RHT], ids=["tetrajet", "mxfp4-rht-sr"])
def test_a_mean_that_is_left_out_of_dw_fails(base: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Backward, "_with_mean", lambda self, wgrad, dw, mean: dw)
    assert not judge(sample_dw, subtracting(base), expected_with_mean(base), FEW).unbiased


@pytest.mark.parametrize("base", [TETRAJET, RHT], ids=["tetrajet", "mxfp4-rht-sr"])
def test_a_mean_over_features_fails(base: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is subtracted alone: what is added is the right one."""
    monkeypatch.setattr(forward, "centered", lambda x, mean: x - x.mean(1, keepdim=True))
    assert not judge(sample_dw, subtracting(base), expected_with_mean(base), FEW).unbiased


@both
def test_one_fixed_seed_fails(gradient: str) -> None:
    expected = forward_quantized(TETRAJET)[gradient]
    verdict = judge(SAMPLE[gradient], TETRAJET, expected, FEW, step_of=lambda i: 0)
    assert not verdict.unbiased


PRESCALED = Quantizer(prescale=3 / 4, rounding="stochastic")
PLAIN = Quantizer(rounding="stochastic")
CEIL = Quantizer(rule="ceil", rounding="stochastic")
RHT_MISTAKES = {
    "16-9-missing": GemmRecipe(PRESCALED, PRESCALED, RHT.dgrad.hadamard, 1.0),
    "16-9-of-one-prescale": GemmRecipe(PRESCALED, CEIL, RHT.dgrad.hadamard, 16 / 9),
    "no-three-quarters": GemmRecipe(PLAIN, PLAIN, RHT.dgrad.hadamard, 1.0),
    "nearest": GemmRecipe(Quantizer(), Quantizer(), RHT.dgrad.hadamard, 1.0),
}


@both
@pytest.mark.parametrize("mistake", RHT_MISTAKES)
def test_mxfp4_rht_sr_mistakes_fail(
    mistake: str, gradient: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A wrong correction is refused when the recipe is made; here it must get past that.
    monkeypatch.setattr(recipe_fields, "_check_correction", lambda recipe, gemm: None)
    gemm = RHT_MISTAKES[mistake]
    recipe = replace(RHT, dgrad=gemm, wgrad=gemm)
    assert not judge(SAMPLE[gradient], recipe, RAW[gradient], FEW).unbiased


@both
def test_other_signs_for_the_two_operands_fail(
    gradient: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = iter(range(1 << 30))
    monkeypatch.setattr(call, "Signs", lambda key, stream, draw: Signs(key, stream, next(calls)))
    assert not judge(SAMPLE[gradient], RHT, RAW[gradient], FEW).unbiased


@both
@pytest.mark.parametrize(
    "options",
    [
        {"backward_rule": "nearest"},  # a scale that is rounded down clips
        {"double_quantization": False},
        {"stochastic": False},
        {"tensor_max": 2.0**18},  # no room below UE5M3's maximum: the largest blocks clip
    ],
    ids=["nearest-scales", "raw-requantization", "nearest", "no-headroom"],
)
def test_ue5m3_mistakes_fail(options: dict, gradient: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nearest rounding after random signs errs by less than a hundredth: it takes more steps."""
    monkeypatch.setattr(quantizer, "_check_scales", lambda quantizer: None)
    recipe = get_recipe("ue5m3", **options)
    expected = forward_quantized(UE5M3)[gradient]
    assert not judge(SAMPLE[gradient], recipe, expected, 4 * FEW).unbiased


# --- the check itself -----------------------------------------------------------------------------


def test_the_limit_is_the_extreme_value_bound() -> None:
    """P(max of m deviates > LIMIT) <= m * 2 (1 - Phi(LIMIT)) = 1e-6."""
    m = 2 * SIZE * SIZE + 2
    assert m * math.erfc(LIMIT / math.sqrt(2)) == pytest.approx(1e-6, rel=1e-3)


@pytest.mark.parametrize("shift", [0.0, 0.05], ids=["fair", "biased-by-a-twentieth"])
def test_the_check_on_known_noise(shift: float) -> None:
    """Gaussian samples about the expected gradient pass; a twentieth of their spread off, fail."""
    expected = RAW["dx"]
    noise = normal((STEPS, SIZE, SIZE), 9).double()
    spread = 1 / math.sqrt(REPLICAS)
    samples = expected + spread * noise + shift
    verdict = judge(lambda recipe, i: samples[i], RHT, expected, STEPS)
    assert verdict.unbiased == (shift == 0.0), verdict
