"""The gradient through the rounding of a block's scale, against finite differences in float64.

What is differentiated is y = S f(x / S), with S = q(m / 6). The smoothed rounding q to a format of
scales is written out here from the definitions of the formats. It uses no table of their numbers,
and shares no code with the estimators.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_fp4 import ConfigError, Quantizer, get_recipe
from megatron_fp4.arithmetic.estimators import Estimator, Scales, with_outer_scale
from megatron_fp4.arithmetic.formats import scale_grid
from tests.arithmetic.test_estimator_maximum import (
    BLOCK,
    BLOCKS,
    FORMS,
    GRID,
    KINKS,
    error,
    slopes,
    smoothed,
    step,
)

SCALE_FORMS = ("dge", "spline", "sigmoid")
# Mantissa bits of each format, its smallest normal exponent, and exponents of the scales here.
FORMATS = {"e8m0": (0, -127, (-9, 9)), "e4m3": (3, -6, (-8, 8)), "ue5m3": (3, -14, (-16, 15))}
# With straight-through elements decoded values do not depend on the scale. Dge and sigmoid share k,
# and have another one each here.
PAIRS = [
    (form, scale_form)
    for form in SCALE_FORMS
    for scale_form in SCALE_FORMS
    if {form, scale_form} != {"dge", "sigmoid"}
]


def neighbours(w: Tensor, scale: str) -> tuple[Tensor, Tensor]:
    """(the scale at or below each w, the distance to the next one)."""
    bits, lowest, _ = FORMATS[scale]
    exponent = (w.log2().floor()).clamp(min=lowest)
    d = (exponent - bits).exp2()
    return (w / d).floor() * d, d


def place(w: Tensor, scale: str) -> Tensor:
    """u of w between its neighbours, from -1 to 1."""
    low, d = neighbours(w, scale)
    return 2 * (w - low) / d - 1


def smooth_scale(w: Tensor, scale: str, form: str) -> Tensor:
    """q of wanted scales."""
    low, d = neighbours(w, scale)
    return low + d * step(form, place(w, scale))


def beside_bends(u: float, form: str) -> bool:
    return all(abs(abs(u) - kink) > 0.03 for kink in KINKS[form])


def problem(form: str, scale_form: str, scale: str) -> tuple[Tensor, Tensor]:
    """(x, g) [BLOCKS, BLOCK]: blocks of which neither the wanted scale nor a scaled value is near a
    bend of its f. Each has one maximum."""
    generator = torch.Generator().manual_seed(11)
    least, most = FORMATS[scale][2]

    def uniform(low: float, high: float) -> float:
        return low + (high - low) * float(torch.rand(1, generator=generator, dtype=torch.float64))

    def is_smooth(v: float) -> bool:
        at = max(i for i in range(7) if GRID[i] <= v)
        return beside_bends(2 * (v - GRID[at]) / (GRID[at + 1] - GRID[at]) - 1, form)

    found: list[list[float]] = []
    while len(found) < BLOCKS:
        w = torch.tensor(2 ** uniform(least, most), dtype=torch.float64)
        s = float(smooth_scale(w, scale, scale_form))
        top = 6 * float(w) / s  # the scaled maximum
        if not (beside_bends(float(place(w, scale)), scale_form) and is_smooth(top)):
            continue
        values = [top]
        while len(values) < BLOCK:
            if is_smooth(v := uniform(0, 0.97 * top)):
                values.append(v)
        found.append([v * s for v in values])
    x = torch.tensor(found, dtype=torch.float64)
    order = torch.rand(x.shape, generator=generator).argsort(1)
    x = x.gather(1, order) * (torch.randint(2, x.shape, generator=generator) * 2 - 1)
    return x, torch.randn(x.shape, generator=generator, dtype=torch.float64)


def of_maximum(scale: str, scale_form: str) -> Callable[[Tensor], Tensor]:
    return lambda x: smooth_scale(x.abs().amax(1, keepdim=True) / 6, scale, scale_form)


def estimator(form: Any, scale_form: Any, maximum: Any = "vjp", **more: Any) -> Estimator:
    return Estimator(
        form, maximum=maximum, scale_form=scale_form, **FORMS[form] | FORMS[scale_form], **more
    )


def gradient(chosen: Estimator, x: Tensor, g: Tensor, scale: str, scale_form: str) -> Tensor:
    """The estimator's, with f in place of the rounded elements, and q in place of the scales."""
    s = of_maximum(scale, scale_form)(x)
    scales = Scales(s, scale_grid(scale), 1 / 6)
    return chosen.gradient(g, x / s, smoothed(chosen.form, x / s), (1, BLOCK), scales=scales)


@pytest.mark.parametrize("scale", FORMATS)
@pytest.mark.parametrize(("form", "scale_form"), PAIRS)
def test_it_is_the_derivative_of_the_smoothed_scale(form: str, scale_form: str, scale: str) -> None:
    x, g = problem(form, scale_form, scale)
    wanted = slopes(form, x, g, of_maximum(scale, scale_form))
    chosen = estimator(form, scale_form)
    found = gradient(chosen, x, g, scale, scale_form)
    assert error(found, wanted) < 1e-6
    # Known mistakes: S in proportion to m, f' without w/S, w/S without f', the format of another
    # exponent, and a maximum that is not divided by the largest element.
    s = of_maximum(scale, scale_form)(x)
    w = x.abs().amax(1, keepdim=True) / 6
    slope = g * chosen.factor(x / s)
    proportional = Estimator(form, maximum="vjp", **FORMS[form])  # type: ignore[arg-type]
    through = gradient(proportional, x, g, scale, scale_form) - slope
    is_largest = x.abs() == x.abs().amax(1, keepdim=True)
    right = torch.where(is_largest, (found - slope) / through, 1)
    assert error(slope + through * right, wanted) < 1e-6  # the mistakes alone make the difference
    mistakes = {
        "proportional": through,
        "no quotient": through * right * s / w,
        "no slope": through * w / s,
        "of the scale": through * chosen._slope(scale_form, s, scale_grid(scale)) * w / s,
        "of the maximum": through * chosen._slope(scale_form, 6 * w, scale_grid(scale)) * w / s,
    }
    for name, mistaken in mistakes.items():
        assert error(slope + mistaken, wanted) > 1e-3, name


@pytest.mark.parametrize("temperature", [0.3, 2.0])
def test_a_smoothed_maximum_moves_the_scale_by_as_much(temperature: float) -> None:
    form, scale_form, scale = "sigmoid", "spline", "e4m3"
    x, g = problem(form, scale_form, scale)
    held = of_maximum(scale, scale_form)(x)
    t = temperature * held

    def smooth_maximum(moved: Tensor) -> Tensor:
        return t * torch.logsumexp(moved.abs() / t, 1, keepdim=True)

    def scale_of(moved: Tensor) -> Tensor:
        largest = x.abs().amax(1, keepdim=True) + smooth_maximum(moved) - smooth_maximum(x)
        return smooth_scale(largest / 6, scale, scale_form)

    chosen = estimator(form, scale_form, "softmax", temperature=temperature)
    wanted = slopes(form, x, g, scale_of)
    assert error(gradient(chosen, x, g, scale, scale_form), wanted) < 1e-6
    vjp = gradient(estimator(form, scale_form), x, g, scale, scale_form)
    assert error(vjp, wanted) > 1e-3  # the control


def test_another_outer_scale_moves_what_a_vjp_decodes() -> None:
    """The scale of a tensor is the largest magnitude divided by that of the problem. Finite
    differences of the whole, by some elements of which one is the largest."""
    form, scale_form, scale = "sigmoid", "spline", "e4m3"
    x, g = problem(form, scale_form, scale)
    largest = x.abs().max()

    def decoded(moved: Tensor) -> Tensor:
        z = moved / (moved.abs().max() / largest)
        s = of_maximum(scale, scale_form)(z)
        return moved / z * s * smoothed(form, z / s)

    some = [int(x.abs().argmax()), *range(2 * BLOCK)]
    wanted = []
    for i in some:
        h = 1e-6 * x[i // BLOCK].abs().max()
        moves = torch.zeros_like(x)
        moves.view(-1)[i] = h
        wanted.append((g * (decoded(x + moves) - decoded(x - moves))).sum() / (2 * h))
    fixed = gradient(estimator(form, scale_form), x, g, scale, scale_form)
    found = with_outer_scale(fixed, g, x, decoded(x), of_rows=False)
    assert error(found.flatten()[some], torch.stack(wanted)) < 1e-6
    assert error(fixed.flatten()[some], torch.stack(wanted)) > 1e-3  # the control


def test_absmax_takes_the_own_term_alone() -> None:
    x, g = problem("sigmoid", "sigmoid", "e8m0")
    s = of_maximum("e8m0", "sigmoid")(x)
    own = estimator("sigmoid", "sigmoid", "absmax")
    found = gradient(own, x, g, "e8m0", "sigmoid")
    v = x / s
    slope = own.factor(v)
    u = place(v.abs().amax(1, keepdim=True) * s / 6, "e8m0")
    rise = 3.5 * (1 - (3.5 * u).tanh() ** 2) / math.tanh(3.5)  # q' of k = 7
    top = v.abs().amax(1, keepdim=True)
    term = g * (smoothed("sigmoid", v) - slope * v) * rise / 6 * v.sign()
    wanted = g * slope + torch.where(v.abs() == top, term, 0)
    assert error(found, wanted) < 1e-12


def test_a_straight_line_of_width_one_is_the_rule_of_the_chain_alone() -> None:
    """dS/dm is then w/m."""
    x, g = problem("straight-through", "spline", "ue5m3")
    s = of_maximum("ue5m3", "spline")(x)
    scales = Scales(s, scale_grid("ue5m3"), 1 / 6)
    line = Estimator("straight-through", maximum="vjp", scale_form="spline", width=1.0)
    plain = Estimator("straight-through", maximum="vjp")
    v = x / s
    rounded = v.round()
    found, held = (e.gradient(g, v, rounded, (1, BLOCK), scales=scales) for e in (line, plain))
    quotient = v.abs().amax(1, keepdim=True) / 6
    torch.testing.assert_close(found - g, (held - g) * quotient, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("scale", FORMATS)
def test_the_ends_of_a_format(scale: str) -> None:
    """A scale that is limited to its format does not move; the largest one, up to what rounding
    puts beyond it, is within; blocks of zeros get nothing."""
    grid = scale_grid(scale)
    most = grid[-1]
    maxima = 6 * torch.tensor(
        [most * (1 - 2**-9), most * (1 + 2**-23), most * 1.01, 0.0], dtype=torch.float64
    )
    s = torch.tensor([most] * 3 + [grid[0]], dtype=torch.float64)[:, None]
    x = torch.zeros(4, BLOCK, dtype=torch.float64)
    x[:, 2], x[:3, 5] = -maxima, 0.3 * most
    v = x / torch.where(s == 0, 1, s)
    chosen = Estimator("straight-through", maximum="vjp", scale_form="sigmoid", k=2.0)
    found = chosen.gradient(
        torch.ones_like(x), v, v.round(), (1, BLOCK), scales=Scales(s, grid, 1 / 6)
    )
    through = (found - 1)[:, 2]
    assert bool((through[:2] != 0).all()) and through[2:].tolist() == [0.0, 0.0]
    least = torch.full((1, BLOCK), grid[0] / 3, dtype=torch.float64)
    if scale == "e8m0":  # below the smallest scale, which the others do not have above 0
        low = Scales(torch.full((1, 1), grid[0], dtype=torch.float64), grid, 1 / 6)
        v = least / grid[0]
        assert torch.equal(chosen.gradient(least, v, v.round(), (1, BLOCK), scales=low), least)


def test_the_grids_are_those_of_the_formats() -> None:
    assert scale_grid("e8m0")[0] == 2.0**-127 and scale_grid("e8m0")[-1] == 2.0**127
    assert (len(scale_grid("e8m0")), len(scale_grid("e4m3")), len(scale_grid("ue5m3"))) == (
        255,
        127,
        248,
    )
    assert (scale_grid("e4m3")[:2], scale_grid("e4m3")[-1]) == ((0.0, 2.0**-9), 448.0)
    assert (scale_grid("ue5m3")[:2], scale_grid("ue5m3")[-1]) == ((0.0, 2.0**-17), 61440.0)
    for scale in FORMATS:
        assert list(scale_grid(scale)) == sorted(set(scale_grid(scale)))


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"scale_form": "dge"}, "scale_form dge is of the gradient through the maximum: give a"),
        ({"scale_form": "tanh"}, "scale_form is straight-through or dge"),
        ({"form": "spline", "maximum": "vjp", "scale_form": "dge", "k": 0.5}, "k of dge is 1 or"),
        ({"maximum": "vjp", "scale_form": "dge", "width": 0.3}, "width belongs to form spline"),
        ({"maximum": "vjp", "outer_scale": "vjp"}, "leave outer_scale out"),
    ],
)
def test_wrong_fields(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        Estimator(**fields)


def test_what_a_scale_form_takes() -> None:
    """Its own parameters, and an outer scale beside a vjp: blocks are then decoded otherwise under
    another one."""
    Estimator("spline", maximum="vjp", scale_form="sigmoid", k=2.0, width=0.3)
    Estimator(maximum="vjp", scale_form="spline", outer_scale="vjp")


@pytest.mark.parametrize(
    ("quantizer", "problem"),
    [
        (
            Quantizer(rule="ceil"),
            "of W is for scales .* to nearest: give its rule nearest, not ceil",
        ),
        (Quantizer(scale="fp32", rule="absmax", block=(1, 0)), "to nearest: leave it out"),
    ],
)
def test_a_quantizer_whose_scales_are_not_rounded_to_nearest(
    quantizer: Quantizer, problem: str
) -> None:
    plain = get_recipe("mxfp4", rule="nearest")
    chosen = Estimator(maximum="vjp", scale_form="spline")
    assert replace(plain, estimator=chosen, x_estimator=chosen).estimator is chosen
    with pytest.raises(ConfigError, match=problem):
        replace(plain, estimator=chosen, fprop=replace(plain.fprop, b=quantizer))
