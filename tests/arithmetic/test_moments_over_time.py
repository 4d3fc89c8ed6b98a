"""What the formats of Adam's moments do over many steps, and to moments of very different sizes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_fp4.arithmetic.fp8_blocks import FloatBlocks, Fp8Blocks
from megatron_fp4.arithmetic.moments import FIRST, SECOND, InBlocks, MomentForm
from testing.low_bit import through
from testing.oracles import normal

N, BLOCK = 16384, 128
SIZE = (1.5 * normal((N,), 1)).exp()  # of the gradients of each element


def drawn(n: int, generator: np.random.Generator) -> Tensor:
    return torch.from_numpy(generator.integers(0, 65536, n).astype(np.int32))


def averaged(
    form: MomentForm, gradients: list[Tensor], beta: float, nearest: bool
) -> tuple[Tensor, Tensor]:
    """(the mean that is stored in `form`, the mean in float64) of gradients or their squares."""
    generator = np.random.default_rng(5)
    low, exact = torch.zeros(N), torch.zeros(N, dtype=torch.float64)
    for gradient in gradients:
        bits = None if nearest else drawn(N, generator)
        low = through(form, low * beta + (1 - beta) * gradient, bits)
        exact = exact * beta + (1 - beta) * gradient.double()
    return low, exact


def halving(steps: int, mean: float, fall: float) -> list[Tensor]:
    """Gradients of many sizes that fall midway. mean: as a multiple of their noise."""
    noise = torch.Generator().manual_seed(3)
    return [
        SIZE * (mean + torch.randn(N, generator=noise)) * (1.0 if 2 * t < steps else fall)
        for t in range(steps)
    ]


@pytest.mark.parametrize(
    ("v", "beta", "steps", "bias", "wrong"),
    [
        ("fp16", 0.95, 200, 0.01, None),
        pytest.param("fp16", 0.999, 2400, 0.01, 0.01, marks=pytest.mark.outside),
        ("bf16", 0.95, 200, 0.01, None),
        ("bf16", 0.999, 2400, 0.02, 0.5),
        ("fp8", 0.95, 200, 0.05, 1.0),
        pytest.param("fp8", 0.999, 2400, 0.05, 0.2, marks=pytest.mark.outside),
    ],
)
def test_v_follows_gradients_that_halve(
    v: str, beta: float, steps: int, bias: float, wrong: float | None
) -> None:
    """The sum of v, as multiples of the gradients' sizes, is that in float64.

    wrong: the least error of rounding to nearest, which stands still; None where it does not.
    """
    squares = [g.square() for g in halving(steps, 0.0, 0.5)]

    def error(nearest: bool) -> float:
        found, exact = (x / SIZE.square() for x in averaged(SECOND[v], squares, beta, nearest))
        return abs(float(found.double().sum() / exact.sum()) - 1)

    assert error(nearest=False) < bias
    assert wrong is None or error(nearest=True) > wrong


@pytest.mark.parametrize("mean", [0.05, 0.5, 3.0])
def test_m_follows_gradients_that_fall(mean: float) -> None:
    gradients = halving(120, mean, 0.25)

    def gain(nearest: bool) -> float:
        found, exact = (x / SIZE for x in averaged(FIRST["fp8"], gradients, 0.95, nearest))
        return float((found * exact).sum() / exact.square().sum())

    assert abs(gain(nearest=False) - 1) < 0.01
    assert mean < 3 or gain(nearest=True) > 1.5  # the control


def test_v_of_very_different_sizes_does_not_underflow() -> None:
    """Over 2^30 in a block, with a median near 1e-8: m / root(v) changes by less than 2e-3."""
    exponents = 30 * torch.rand(N, generator=torch.Generator().manual_seed(2)) - 41.5
    v, m = torch.exp2(exponents), 1e-4 * normal((N,), 4)
    assert 1e-9 < float(v.median()) < 1e-7
    wanted = m / v.sqrt()

    def changed(found: Tensor) -> float:
        return float(((m / (found.sqrt() + 1e-30) - wanted).abs() / wanted.abs()).max())

    for bits in (None, drawn(N, np.random.default_rng(1))):
        found = through(SECOND["fp16"], v, bits)
        assert (found > 0).all() and changed(found) < 2e-3
    # The controls: FP16 without scales, one scale for all, and E4M3 of v itself.
    assert (v.half() == 0).float().mean() > 0.3
    wide = torch.cat([torch.exp2(exponents - 20)[: N // 2], v[N // 2 :]])
    one = through(InBlocks(FloatBlocks("fp16", N)), wide, None)
    assert (one == 0).any() and (through(SECOND["fp16"], wide, None) > 0).all()
    plain = through(InBlocks(Fp8Blocks("e4m3", 256)), v, None)
    assert (plain == 0).float().mean() > 0.2 and changed(plain) > 1


def test_a_scale_that_is_no_power_of_two_changes_what_was_decoded() -> None:
    """The control of test_decoded_moments_are_encoded_without_a_change: 448 / amax in float32."""

    def once(x: Tensor) -> Tensor:
        scale = 448 / x.abs().max()
        return (x * scale).to(torch.float8_e4m3fn).float() / scale

    def own(x: Tensor) -> Tensor:
        return through(FIRST["fp8"], x, None)

    tensors = [normal((BLOCK,), n) * 10.0 ** (n % 20 - 10) for n in range(500)]
    for rule, changes in ((once, True), (own, False)):
        stored = [rule(x) for x in tensors]
        assert any(not torch.equal(rule(x), x) for x in stored) is changes


def test_scales_of_another_range_are_noticed() -> None:
    form, x = FIRST["fp8"], normal((1000,), 3) * torch.exp2(torch.arange(1000) / 40)
    codes, scales = form.encode(x, 0)
    _, others = form.encode(x.flip(0), 0)
    right = form.decode(codes, scales, 0)
    assert ((right - x).abs() <= 2**-4 * x.abs() + 2**-10 * x.abs().max()).all()
    assert not torch.equal(form.decode(codes, others, 0), right)
    assert math.isfinite(float(right.abs().max()))
