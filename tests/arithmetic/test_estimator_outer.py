"""The gradient through the scale of a tensor or a row, against finite differences in float64.

What is differentiated is y = t F(x / t), with t proportional to the largest magnitude of the tensor
or row and F the smoothed quantizer of blocks, which is written out in test_estimator_maximum.py.
Of straight-through it is what is rounded, with a slope of 1.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_fp4 import ConfigError
from megatron_fp4.arithmetic.estimators import Estimator, with_outer_scale
from tests.arithmetic.test_estimator_maximum import BLOCK, FORMS, GRID, error, problem, smoothed

TEMPERATURE = 0.7
MAXIMA = ("straight-through", "absmax", "softmax")
ROWS = 4  # where each row has an outer scale
ELEMENTS = 16 * BLOCK


def by_blocks(x: Tensor) -> Tensor:
    return x.view(-1, BLOCK)


def model(form: str, v: Tensor, start: Tensor) -> Tensor:
    """f of scaled values v near those of `start`."""
    if form != "straight-through":
        return smoothed(form, v)
    grid = torch.tensor(GRID, dtype=v.dtype)
    nearest = grid[(start.abs()[..., None] - grid).abs().argmin(-1)]
    return start.sign() * nearest + v - start


def outer_of(x: Tensor) -> Tensor:
    """A scale of each row; x has one row where the tensor has one scale."""
    return x.abs().amax(1, keepdim=True) / 2688


def block_scales(z: Tensor, start: Tensor, maximum: str) -> Tensor:
    """The scales of blocks of z = x / t, as `maximum` has them move from `start`, that z's place.

    One for each element: with absmax the scale of the largest element moves for that alone.
    """
    maxima = by_blocks(start).abs().amax(1, keepdim=True)
    held = maxima / 6
    if maximum == "straight-through":
        return held.expand(-1, BLOCK)
    if maximum == "absmax":
        return torch.where(by_blocks(start).abs() == maxima, by_blocks(z).abs() / 6, held)
    if maximum == "vjp":
        return (by_blocks(z).abs().amax(1, keepdim=True) / 6).expand(-1, BLOCK)
    t = TEMPERATURE * held
    now, was = (t * torch.logsumexp(by_blocks(each).abs() / t, 1, True) for each in (z, start))
    return (held + (now - was) / 6).expand(-1, BLOCK)


def quantized(form: str, maximum: str, x: Tensor, start: Tensor) -> Tensor:
    """y of x, near `start`."""
    t, before = outer_of(x), start / outer_of(start)
    s, held = (block_scales(z, before, maximum) for z in (x / t, before))
    return t * (s * model(form, by_blocks(x / t) / s, by_blocks(before) / held)).view(x.shape)


def slopes(form: str, maximum: str, x: Tensor, g: Tensor) -> Tensor:
    """Central differences of the sum of g y, by each element of x."""
    n = x.numel()
    h = (by_blocks(x).abs().amax(1, keepdim=True) * 1e-6).expand(-1, BLOCK).flatten()
    start = x.repeat(n, 1)  # once for each element, which is moved
    up, down = (start + (sign * h.diag()).view(start.shape) for sign in (1, -1))
    moves = quantized(form, maximum, up, start) - quantized(form, maximum, down, start)
    return ((g.repeat(n, 1) * moves).view(n, n).sum(1) / (2 * h)).view(x.shape)


def held_fixed(form: Any, maximum: Any, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """(the estimator's gradient where t is held fixed, y)."""
    more: dict[str, Any] = {"temperature": TEMPERATURE} if maximum == "softmax" else {}
    if form == maximum == "straight-through":
        more["outer_scale"] = "vjp"  # else there is no estimator
    chosen = Estimator(form=form, maximum=maximum, **FORMS[form], **more)
    scales = by_blocks(x).abs().amax(1, keepdim=True) / 6
    v = by_blocks(x) / scales
    rounded = model(form, v, v)
    found = chosen.gradient(by_blocks(g), v, rounded, (1, BLOCK)).view(x.shape)
    return found, (rounded * scales).view(x.shape)


def shaped(form: str, rows: int) -> tuple[Tensor, Tensor]:
    """The problem with some rows, of which each has a negative number of the largest magnitude."""
    x, g = (each.flatten()[:ELEMENTS].view(rows, -1) for each in problem(form))
    return -x * x.gather(1, x.abs().argmax(1, keepdim=True)).sign(), g


@pytest.mark.parametrize("rows", [1, ROWS])
@pytest.mark.parametrize("maximum", MAXIMA)
@pytest.mark.parametrize("form", FORMS)
def test_it_is_the_derivative_of_the_smoothed_quantizer(form: str, maximum: str, rows: int) -> None:
    x, g = shaped(form, rows)
    fixed, y = held_fixed(form, maximum, x, g)
    wanted = slopes(form, maximum, x, g)
    found = with_outer_scale(fixed, g, x, y, of_rows=rows > 1)
    assert error(found, wanted) < 1e-6
    if rows == 1:  # one row's scale is one tensor's
        assert torch.equal(found, with_outer_scale(fixed, g, x, y, of_rows=True))
    is_largest = x.abs() == x.abs().amax(1, keepdim=True)
    assert torch.equal(found[~is_largest], fixed[~is_largest])
    # Known mistakes.
    scales = by_blocks(x).abs().amax(1, keepdim=True) / 6
    terms, unit = g * y - fixed * x, torch.where(is_largest, 1 / x, 0)
    in_block = by_blocks(terms).sum(1, keepdim=True).expand(-1, BLOCK).reshape(x.shape)
    unscaled = (by_blocks(terms) / scales).view(x.shape).sum(1, keepdim=True)
    right = terms.sum(1, keepdim=True)
    assert error(fixed + right * unit, wanted) < 1e-6  # the mistakes alone make the difference
    mistakes = {
        "left out": fixed,
        "the other sign": fixed - right * unit,
        "no sign of the element": fixed + right * unit.abs(),
        "the sum of the block": fixed + in_block * unit,
        "of scaled values": fixed + unscaled * torch.where(is_largest, x.sign() / 6, 0),
        "to all": fixed + right * x.sign() / x.abs().amax(1, keepdim=True),
    }
    for name, mistaken in mistakes.items():
        assert error(mistaken, wanted) > 1e-3, name


@pytest.mark.parametrize("form", FORMS)
def test_nothing_goes_through_it_beside_vjp(form: str) -> None:
    """F is then homogeneous of degree one, and by Euler's theorem the sum of dx x is that of g y in
    each block. Negative control: the other maxima."""
    x, g = shaped(form, 1)
    fixed, y = held_fixed(form, "vjp", x, g)
    assert error(fixed, slopes(form, "vjp", x, g)) < 1e-6
    assert float(by_blocks(g * y - fixed * x).sum(1).abs().max()) < 1e-11
    for maximum in MAXIMA:
        fixed, y = held_fixed(form, maximum, x, g)
        assert float(by_blocks(g * y - fixed * x).sum(1).abs().max()) > 1e-2


@pytest.mark.parametrize("rows", [1, ROWS])
@pytest.mark.parametrize("maximum", MAXIMA)
def test_a_multiple_is_decoded_to_that_multiple(maximum: str, rows: int) -> None:
    """So the sum of x times its gradient over what shares the scale is that of y times g."""
    x, g = shaped("spline", rows)
    fixed, y = held_fixed("spline", maximum, x, g)
    found = with_outer_scale(fixed, g, x, y, of_rows=rows > 1)
    torch.testing.assert_close((x * found).sum(1), (g * y).sum(1))
    assert error((x * fixed).sum(1), (g * y).sum(1)) > 1e-2  # the control


def test_ties_share_the_sum() -> None:
    x = torch.tensor([[4.0, -4.0, 1.0, 0.0], [2.0, 4.0, 0.0, -1.0]], dtype=torch.float64)
    y = torch.tensor([[3.0, -4.0, 1.5, 0.0], [2.0, 4.0, 0.0, -0.5]], dtype=torch.float64)
    g = torch.tensor([[1.0, 2.0, 5.0, 9.0], [3.0, 1.0, 7.0, 4.0]], dtype=torch.float64)
    sums = [-1.0 + 2.5, 4 * 0.5]
    share = sum(sums) / 4 / 3
    added = torch.tensor([[share, -share, 0, 0], [0, share, 0, 0]], dtype=torch.float64)
    found = with_outer_scale(g, g, x, y, of_rows=False)
    torch.testing.assert_close(found, g + added)
    a, b = sums[0] / 4 / 2, sums[1] / 4
    added = torch.tensor([[a, -a, 0, 0], [0, b, 0, 0]], dtype=torch.float64)
    torch.testing.assert_close(with_outer_scale(g, g, x, y, of_rows=True), g + added)


def test_zeros_and_no_elements() -> None:
    zeros, g = torch.zeros(2, 16), torch.randn(2, 16)
    for of_rows in (False, True):
        assert torch.equal(with_outer_scale(g, g, zeros, zeros, of_rows=of_rows), g)
        none = torch.zeros(0, 16)
        assert with_outer_scale(none, none, none, none, of_rows=of_rows).shape == (0, 16)


@pytest.mark.parametrize("of_rows", [False, True])
@pytest.mark.parametrize("what", [math.nan, math.inf])
def test_a_block_with_an_overflow_stands_outside(of_rows: bool, what: float) -> None:
    """Its elements decode to NaN, and the others' scale does not know it."""
    x, g = torch.randn(2, 64), torch.randn(2, 64)
    y = (2 * x).round() / 2
    bad, bad_y, bad_g = x.clone(), y.clone(), g.clone()
    bad[0, 3], bad_y[0, :16], bad_g[0, :16] = what, math.nan, math.nan
    found = with_outer_scale(bad_g, bad_g, bad, bad_y, of_rows=of_rows)
    x[0, :16], y[0, :16] = 0, 0
    wanted = with_outer_scale(g, g, x, y, of_rows=of_rows)
    assert found[0, :16].isnan().all()
    torch.testing.assert_close(found[:, 16:], wanted[:, 16:])
    assert torch.equal(found[1, :16], wanted[1, :16])
    assert not torch.equal(wanted, g)


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="maximum: vjp.*leave outer_scale out"):
        Estimator(maximum="vjp", outer_scale="vjp")
    with pytest.raises(ConfigError, match="outer_scale is straight-through or vjp"):
        Estimator(outer_scale="absmax")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="leave it out"):
        Estimator(form="straight-through")
    for maximum in MAXIMA:
        Estimator(form="straight-through", maximum=maximum, outer_scale="vjp")  # type: ignore[arg-type]
