"""The formats of Adam's moments: rounding, the ends of the range, parts of a block."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_fp4.arithmetic.moments import FIRST, SECOND, MomentForm, Moments
from megatron_fp4.errors import ConfigError
from testing.low_bit import bits_of, spread, through


def every_form() -> list[Any]:
    """The parameters (form, is_square) of a test, without those that round nothing."""
    return [
        pytest.param(form, is_square, id=f"{moment}-{name}")
        for moment, is_square, forms in (("m", False, FIRST), ("v", True, SECOND))
        for name, form in forms.items()
        if form.draws
    ]


# --- rounding -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("form", "is_square"), every_form())
def test_the_mean_of_draws_is_the_moment(form: MomentForm, is_square: bool) -> None:
    """Within the central-limit bound. Negative control: rounding to nearest is far off."""
    draws, x = 4096, spread(128, 3, 1.0)
    x = x.square() if is_square else x
    every = through(form, x.repeat(draws), bits_of(128 * draws, 5)).view(draws, 128).double()
    low, high = every.amin(0), every.amax(0)  # the two neighbours, of those that are drawn often
    share = (x.double() - low) / (high - low)
    tried = (share > 0.01) & (share < 0.99)
    assert int(tried.sum()) > 110
    assert ((every == low) | (every == high)).all()
    # The bits' 16 make a probability wrong by half an integer at most.
    bound = (high - low) * (5 * (share * (1 - share) / draws).sqrt() + 2**-17)
    assert ((every.mean(0) - x.double()).abs() <= bound)[tried].all()
    nearest = through(form, x, None).double()
    assert ((nearest - x.double()).abs() > bound)[tried].float().mean() > 0.8


def test_roots_are_unbiased_in_their_squares() -> None:
    """The control: probabilities that are linear in the root make v too large."""
    draws, form = 8192, SECOND["fp8"]
    x = spread(128, 3, 0.5).square()

    def bias(values: Tensor) -> float:
        return float(((values.view(draws, 128).double().mean(0) - x) / x).mean())

    bits = bits_of(128 * draws, 5)
    # Two neighbours are at most 2^-3 + 2^-7 of v on either side of their middle.
    bound = 5 * (2**-3 + 2**-7) / math.sqrt(128 * draws)
    assert abs(bias(through(form, x.repeat(draws), bits))) < bound
    linear = through(FIRST["fp8"], x.sqrt().repeat(draws), bits).square()
    assert bias(linear) > 1.5 * bound


@pytest.mark.parametrize(("form", "is_square"), every_form())
def test_decoded_moments_are_encoded_without_a_change(form: MomentForm, is_square: bool) -> None:
    for seed in range(20):
        x = spread(1000, seed, 8.0)
        once = through(form, x.square() if is_square else x, bits_of(1000, seed), 11)
        for bits in (None, bits_of(1000, seed + 1)):
            assert torch.equal(through(form, once, bits, 11), once)
        if form.draws and hasattr(form, "blocks"):  # the control: in float32, by amax / 448
            factors = once.view(-1, 8).abs().amax(1, keepdim=True) / 448
            scaled = (once.view(-1, 8) / factors).to(torch.float8_e4m3fn).float() * factors
            assert not torch.equal(scaled.view(-1), once)


# --- the ends of the range ------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name, form in SECOND.items() if form.draws])
def test_a_positive_v_does_not_become_zero(name: str) -> None:
    """Over the whole range of float32. The controls: float16 without a scale; FP8 of v itself."""
    form, n = SECOND[name], 128 * 100
    lowest = torch.tensor([2.0**-149, 3 * 2.0**-149, 2.0**-133, 2.0**-126])
    mixed = 2.0 ** torch.from_numpy(np.random.default_rng(2).uniform(-149, 127, n)).float()
    even = spread(n, 4, 1.0).square() * 1e-10
    tiny = torch.cat([lowest * 2.0**k for k in range(0, 120) for _ in range(8)])
    for x in (mixed, even, tiny, tiny.sort().values):
        assert (x > 0).all()
        for bits in (None, torch.zeros(len(x), dtype=torch.int32), 65535 + 0 * x.int()):
            found = through(form, x, bits)
            assert (found > 0).all() and found.isfinite().all()
            assert torch.equal(through(form, found, bits_of(len(x), 1)), found)
    assert (even.half() == 0).float().mean() > 0.9
    assert (through(FIRST["fp8"], even, None) == 0).any()
    assert not through(form, torch.zeros(300), bits_of(300, 1)).any()


@pytest.mark.parametrize("bits", [None, 0, 65535])
def test_bf16_rounds_no_finite_number_to_inf(bits: int | None) -> None:
    x = torch.tensor([3.4028234e38, -3.4028234e38, math.inf, -math.inf, math.nan, -0.0, 2.0**-149])
    low_nan = torch.tensor([0x7F800001], dtype=torch.int32).view(torch.float32)
    x = torch.cat([x, low_nan])
    drawn = None if bits is None else torch.full((8,), bits, dtype=torch.int32)
    found = through(FIRST["bf16"], x, drawn)
    assert found[:2].isfinite().all() and found[2:4].tolist() == [math.inf, -math.inf]
    assert found[[4, 7]].isnan().all()
    assert found[5] == 0 and found[5].signbit() and found[6] == (2.0**-133 if bits else 0)
    assert x[:1].bfloat16().isinf().all()  # the control: torch's rounding
    ties = 1 + torch.arange(1, 64) * 2.0**-8  # every other one is between two neighbours
    for x in (spread(999, 1), ties, -ties):
        assert torch.equal(through(FIRST["bf16"], x, None), x.bfloat16().float())


def test_a_scale_fits_the_largest_float16() -> None:
    form = SECOND["fp16"]
    largest = torch.tensor(65504.0)
    for x, byte in ((largest, 127), (torch.nextafter(largest, torch.tensor(math.inf)), 128)):
        for bits in (None, torch.tensor([0], dtype=torch.int32)):
            codes, scales = form.encode(x[None], 0, bits)
            assert scales is not None and scales.tolist() == [byte] and codes.isfinite().all()
    # The control: by its exponent alone 65520 would have the scale 1, and become Inf.
    assert torch.tensor(65520.0).half().isinf()


def test_float16_codes_are_torch_s() -> None:
    """Of a block whose scale is 1: rounded to nearest as torch does, drawn as either neighbour."""
    x = torch.cat([torch.tensor([40000.0]), spread(127, 5).abs().clamp(max=60000)])
    codes, scales = SECOND["fp16"].encode(x, 0)
    assert scales is not None and scales.tolist() == [127]
    kept = (x.half() > 0) | (x == 0)
    assert torch.equal(codes[kept], x.half()[kept])
    drawn = through(SECOND["fp16"], x, bits_of(128, 3))
    apart = (drawn.half().view(torch.int16).int() - codes.view(torch.int16).int()).abs()
    assert apart.max() == 1


# --- parts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("moments", [Moments(), Moments("fp8", "fp8")], ids=str)
def test_a_border_in_a_block_changes_what_is_tiny_in_it(moments: Moments) -> None:
    """After one step: blocks that are not cut are equal, and of the cut one the normal numbers. A
    part's scale is no larger than the whole's, so only the whole's subnormals may be finer."""
    x, bits = spread(1000, 3), bits_of(1000, 4)
    for key, form in moments.forms.items():
        y = x.square() if key == "exp_avg_sq" else x
        for cut in (1, 11, 300, 450, 999):
            codes, scales = form.encode(y, 0, bits)
            whole = form.decode(codes, scales, 0)
            parts = [
                through(form, y[at], bits[at], at.start) for at in (slice(0, cut), slice(cut, 1000))
            ]
            assert scales is not None
            changed = torch.cat(parts) != whole
            block = cut // 128
            inside = slice(128 * block, 128 * (block + 1))
            assert int(changed.sum()) == int(changed[inside].sum())
            factor = 2.0 ** (int(scales[block]) - 127)
            normal_from = {"exp_avg": factor * 2**-6, "exp_avg_sq": factor * 2**-14}[key]
            if (key, moments.v) == ("exp_avg_sq", "fp8"):
                normal_from = (factor * 2**-6) ** 2
            assert (y[inside].abs()[changed[inside]] < normal_from).all()
    # The control: blocks counted from the range's beginning change others.
    form = moments.forms["exp_avg"]
    whole = through(form, x, bits)
    assert (through(form, x[300:], bits[300:])[84 + 128 :] != whole[512:]).any()


def test_moments_are_read_from_text() -> None:
    for text, moments in {
        "m=fp8,v=fp16": Moments(),
        "v=fp8": Moments(v="fp8"),
        "m=bf16,round=nearest,v=bf16": Moments("bf16", "bf16", "nearest"),
        "m=fp32,v=fp32": Moments("fp32", "fp32"),
    }.items():
        assert Moments.read(text) == moments == Moments.read(str(moments))
    for text in ("", "fp8", "m=fp8,m=fp8", "w=fp8", "m=fp8,"):
        with pytest.raises(ConfigError, match=r"^Adam's moments are given as m=FORMAT,v=FORMAT, "):
            Moments.read(text)
    with pytest.raises(ConfigError, match="m is stored in one of fp32, bf16, fp8, not 'fp16'"):
        Moments.read("m=fp16,v=fp16")
    with pytest.raises(ConfigError, match="round is stochastic or nearest, not 'up'"):
        Moments.read("round=up")
