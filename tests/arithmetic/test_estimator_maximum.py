"""The gradient through a quantizer and the maximum of its blocks, against finite differences of a
smoothed quantizer in float64, and the forms of its factor.

The smoothed quantizer is written out here from the definitions, with a loop over the grid, and
shares no code with the estimators: f in place of rounding, and the scale m/6, which is not rounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_fp4 import ConfigError
from megatron_fp4.arithmetic.estimators import Estimator

GRID = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
BLOCK, BLOCKS = 16, 40
# |u| at which a form's f has a bend, or is too steep for finite differences.
KINKS = {"dge": (0.0, 1.0), "spline": (0.4, 1.0), "sigmoid": (1.0,), "straight-through": ()}
FORMS: dict[str, dict[str, Any]] = {
    "dge": {"k": 5.0, "clip": 1e9},
    "spline": {"width": 0.4},
    "sigmoid": {"k": 7.0},
    "straight-through": {},
}


def step(form: str, u: Tensor) -> Tensor:
    """The height of the model of a step, from 0 at u = -1 to 1 at u = 1."""
    if form == "dge":
        return (1 + u.sign() * u.abs() ** (1 / 5)) / 2
    if form == "spline":
        return (u / 0.4 / 2 + 1 / 2).clamp(0, 1)
    if form == "sigmoid":
        low, high = 1 / (1 + math.exp(7)), 1 / (1 + math.exp(-7))
        return (1 / (1 + (-7 * u).exp()) - low) / (high - low)
    return (1 + u) / 2


def smoothed(form: str, v: Tensor) -> Tensor:
    """f of scaled values; beyond 6 the last step goes on."""
    total = torch.zeros_like(v)
    for low, high in zip(GRID, GRID[1:], strict=False):
        u = 2 * (v.abs() - low) / (high - low) - 1
        height = step(form, u) if high == 6 else torch.where(u > 1, 1, step(form, u))
        total += (high - low) * torch.where(u < -1, 0, height)
    return v.sign() * total


def problem(form: str) -> tuple[Tensor, Tensor]:
    """(x, g) [BLOCKS, BLOCK] in float64: blocks with one maximum of either sign, whose other scaled
    values keep away from bends of f, and the gradient of the decoded values."""
    generator = torch.Generator().manual_seed(7)
    found: list[float] = []
    while len(found) < BLOCKS * BLOCK:
        size = float(torch.rand(1, generator=generator, dtype=torch.float64)) * 5.9
        low = max(i for i in range(7) if GRID[i] <= size)
        u = abs(2 * (size - GRID[low]) / (GRID[low + 1] - GRID[low]) - 1)
        if all(abs(u - kink) > 0.03 for kink in KINKS[form]):
            found.append(size)
    v = torch.tensor(found, dtype=torch.float64).view(BLOCKS, BLOCK)
    at = torch.randint(BLOCK, (BLOCKS, 1), generator=generator)
    v.scatter_(1, at, 6.0)
    signs = torch.randint(2, v.shape, generator=generator) * 2 - 1
    sizes = torch.randn(BLOCKS, 1, generator=generator, dtype=torch.float64).exp()
    return v * signs * sizes, torch.randn(v.shape, generator=generator, dtype=torch.float64)


def scale_of_maximum(x: Tensor) -> Tensor:
    return x.abs().amax(1, keepdim=True) / 6


def slopes(form: str, x: Tensor, g: Tensor, scale: Callable[[Tensor], Tensor]) -> Tensor:
    """Central differences of the sum of g times the smoothed quantizer, by each element of x."""
    found = torch.empty_like(x)
    for column in range(BLOCK):
        sums = []
        for sign in (1, -1):
            moved = x.clone()
            h = 1e-6 * x.abs().amax(1)
            moved[:, column] += sign * h
            s = scale(moved)
            sums.append((g * s * smoothed(form, moved / s)).sum(1))
        found[:, column] = (sums[0] - sums[1]) / (2 * h)
    return found


def gradient(estimator: Estimator, form: str, x: Tensor, g: Tensor) -> Tensor:
    """The estimator's, with f in place of the rounded elements."""
    v = x / scale_of_maximum(x)
    return estimator.gradient(g, v, smoothed(form, v), (1, BLOCK))


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def estimator(form: Any, maximum: Any, **more: Any) -> Estimator:
    return Estimator(form=form, maximum=maximum, **FORMS[form], **more)


@pytest.mark.parametrize("form", FORMS)
def test_vjp_is_the_derivative_of_the_smoothed_quantizer(form: str) -> None:
    x, g = problem(form)
    wanted = slopes(form, x, g, scale_of_maximum)
    assert error(gradient(estimator(form, "vjp"), form, x, g), wanted) < 1e-6


@pytest.mark.parametrize("form", ["dge", "spline", "sigmoid"])
@pytest.mark.parametrize("mistake", ["elementwise", "sum to all", "unscaled", "nothing", "no sign"])
def test_a_known_mistake_is_not_the_derivative(form: str, mistake: str) -> None:
    x, g = problem(form)
    wanted = slopes(form, x, g, scale_of_maximum)
    right, v = estimator(form, "vjp"), x / scale_of_maximum(x)
    slope = right.factor(v)
    total = (g * (smoothed(form, v) - slope * v)).sum(1, keepdim=True) / 6
    if mistake == "elementwise":
        found = gradient(estimator(form, "absmax"), form, x, g)
    elif mistake == "sum to all":
        found = g * slope + total * v.sign()
    elif mistake == "unscaled":
        found = g * right.factor(x) + torch.where(v.abs() == 6, total * v.sign(), 0)
    elif mistake == "no sign":
        found = g * slope + torch.where(v.abs() == 6, total, 0)
    else:
        found = g * slope
    assert error(found, wanted) > 1e-2
    right_one = g * slope + torch.where(v.abs() == 6, total * v.sign(), 0)
    assert error(right_one, wanted) < 1e-6  # the mistakes alone make the difference


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("temperature", [0.3, 2.0])
def test_softmax_is_the_derivative_with_a_smoothed_maximum(form: str, temperature: float) -> None:
    """The scale moves with the logarithm of the sum of exponentials of |x|, of a temperature that
    is not moved, from where it is m/6."""
    x, g = problem(form)
    start = scale_of_maximum(x)
    t = temperature * start

    def smooth_maximum(moved: Tensor) -> Tensor:
        return t * torch.logsumexp(moved.abs() / t, 1, keepdim=True)

    def scale(moved: Tensor) -> Tensor:
        return start + (smooth_maximum(moved) - smooth_maximum(x)) / 6

    found = gradient(estimator(form, "softmax", temperature=temperature), form, x, g)
    wanted = slopes(form, x, g, scale)
    assert error(found, wanted) < 1e-6
    other = estimator(form, "softmax", temperature=temperature * 1.5)
    assert form == "straight-through" or error(gradient(other, form, x, g), wanted) > 1e-3


def test_a_cold_softmax_is_the_vjp() -> None:
    x, g = problem("sigmoid")
    cold = gradient(estimator("sigmoid", "softmax", temperature=1e-3), "sigmoid", x, g)
    assert error(cold, gradient(estimator("sigmoid", "vjp"), "sigmoid", x, g)) < 1e-12


def test_absmax_gives_the_maximum_its_own_decoded_value() -> None:
    """f'(v) + (Q(v) - f'(v) v) / v is Q(v) / v there, whatever f' is, and elsewhere f'(v) stays."""
    v = torch.tensor([[-5.0, 1.3, 0.2, 4.4]], dtype=torch.float64)
    rounded = torch.tensor([[-4.0, 1.5, 0.0, 4.0]], dtype=torch.float64)
    g = torch.tensor([[2.0, 3.0, 5.0, 7.0]], dtype=torch.float64)
    chosen = Estimator(maximum="absmax")
    found = chosen.gradient(g, v, rounded, (1, 4))
    assert found[0, 0] == pytest.approx(2 * 4 / 5)
    assert torch.equal(found[:, 1:], (g * chosen.factor(v))[:, 1:])


def test_ties_share_the_sum_of_their_block() -> None:
    v = torch.tensor([[4.0, -4.0, 1.2, 0.0], [0.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    rounded = torch.tensor([[4.0, -4.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    g = torch.tensor([[1.0, 2.0, 5.0, 9.0], [1.0, 1.0, 1.0, 1.0]], dtype=torch.float64)
    found = Estimator(form="straight-through", maximum="vjp").gradient(g, v, rounded, (1, 4))
    share = 5 * (1.0 - 1.2) / 4 / 2
    torch.testing.assert_close(
        found,
        torch.tensor([[1 + share, 2 - share, 5, 9], [1.0, 1, 1, 1]], dtype=torch.float64),
    )


@pytest.mark.parametrize("maximum", ["absmax", "vjp", "softmax"])
def test_a_nan_stays_in_its_block(maximum: Any) -> None:
    v, g = torch.randn(2, 32), torch.ones(2, 32)
    v[0, 3] = math.nan
    found = Estimator(maximum=maximum).gradient(g, v, v.round(), (1, 16))
    assert found[0, 3].isnan() and found[1].isfinite().all() and found[0, 16:].isfinite().all()


# --- the factor -----------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["spline", "sigmoid"])
def test_the_mean_of_the_factor_between_grid_points_is_one(form: Any) -> None:
    n = 1 << 16
    x = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    for low, high in zip(GRID, GRID[1:], strict=False):
        factor = estimator(form, "straight-through").factor(low + (high - low) * x)
        assert float(factor.mean()) == pytest.approx(1, abs=1e-3)
    # The control: DGE's clip lowers it.
    assert float(Estimator().factor(x / 2).mean()) == pytest.approx(0.593, abs=5e-4)


def test_a_spline_has_its_width_around_each_threshold() -> None:
    spline = Estimator(form="spline", width=0.25)
    thresholds, steps = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], [0.5] * 4 + [1.0, 1.0, 2.0]
    for threshold, d in zip(thresholds, steps, strict=True):
        edge = 0.25 * d / 2
        inside = torch.tensor([threshold - 0.99 * edge, threshold, -threshold - 0.99 * edge])
        assert spline.factor(inside).tolist() == [4.0] * 3
        beside = torch.tensor([threshold - 1.01 * edge, threshold + 1.01 * edge])
        assert spline.factor(beside).tolist() == [0.0] * 2


def test_a_spline_of_width_one_is_straight_up_to_six() -> None:
    """The scaled maximum of a block may be rounded to a number just above 6."""
    v = torch.tensor([0.0, 0.5, 3.7, 6.0, 6.0 * (1 + 2**-23), 6.1])
    assert Estimator(form="spline", width=1.0).factor(v).tolist() == [1.0] * 5 + [0.0]


def test_the_factor_beyond_six() -> None:
    v = torch.tensor([6.0, 6.0 * (1 + 2**-23), -7.0, 7.9, math.nan], dtype=torch.float32)
    for form in FORMS:
        name: Any = form
        if form != "straight-through":
            continued = Estimator(form=name).factor(v)
            u = v[2:4].abs() - 5
            wanted = {
                "dge": u**-0.8 / 5,
                "spline": torch.zeros(2),
                "sigmoid": 2.5 * (1 - (2.5 * u).tanh() ** 2) / math.tanh(2.5),
            }[form]
            torch.testing.assert_close(continued[2:4], wanted)
            assert Estimator(form=name, beyond="one").factor(v)[2:4].tolist() == [1.0, 1.0]
        zero = Estimator(form=name, beyond="zero").factor(v)
        assert zero[2:4].tolist() == [0.0, 0.0] and zero[4].isnan()
        within = Estimator(form=name, beyond="zero").factor(v[:2])
        torch.testing.assert_close(within, within[:1].expand(2), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"k": 0.5}, "k of dge is 1 or more"),
        ({"form": "sigmoid", "k": 0.0}, "k of sigmoid is above 0"),
        ({"form": "spline", "width": 1.5}, "at most 1"),
        ({"form": "spline", "clip": 2.0}, "clip belongs to form dge, not to spline"),
        ({"width": 0.3}, "width belongs to form spline, not to dge"),
        ({"temperature": 1.0}, "temperature belongs to maximum softmax, not to straight-through"),
        ({"maximum": "softmax", "temperature": 0.0}, "above 0"),
        ({"form": "straight-through"}, "leave it out"),
        ({"form": "tanh"}, "form is dge or spline"),
    ],
)
def test_wrong_fields(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        Estimator(**fields)


def test_k_of_sigmoid_may_be_below_one() -> None:
    assert (
        Estimator(form="sigmoid", k=0.5).factor(torch.tensor(0.1)) > 0
    )  # the control of the above
