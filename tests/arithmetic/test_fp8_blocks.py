"""FP8 blocks against ml_dtypes and exact fractions."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_fp4.arithmetic.fp8_blocks import Fp8Blocks, bits_at
from megatron_fp4.arithmetic.philox import Key, random_bits16
from megatron_fp4.errors import ConfigError

FORMS = [Fp8Blocks(element, block) for element in ("e4m3", "e5m2") for block in (32, 128)]
DTYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}


def numbers(n: int, spread: float = 3.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    scale = (spread * torch.randn(n, generator=generator)).exp()
    return torch.randn(n, generator=generator) * scale


def grid(form: Fp8Blocks) -> np.ndarray:
    """The finite magnitudes of the format, sorted, as float64."""
    values = np.arange(128, dtype=np.uint8).view(DTYPES[form.element]).astype(np.float64)
    return np.sort(values[np.isfinite(values)])


def scale_of(block: Tensor, element: str) -> Fraction:
    """The smallest power of two, from 2^-127 on, by which a block fits the format."""
    largest, scale = Fraction(float(block.abs().max())), Fraction(1, 2**127)
    while largest > Fraction(LARGEST[element]) * scale:
        scale *= 2
    return scale


# --- scales ------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("size", [1.0, 1e-40, 1e-20, 1e30])
def test_a_scale_is_the_smallest_without_clipping(form: Fp8Blocks, size: float) -> None:
    x = numbers(5 * form.block + 3, 1.0) * size
    _, scales = form.encode(x)
    assert len(scales) == form.blocks(len(x)) == 6
    for i, byte in enumerate(scales.tolist()):
        wanted = scale_of(x[i * form.block : (i + 1) * form.block], form.element)
        assert Fraction(2) ** (byte - 127) == wanted


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_block_at_the_largest_number_is_not_clipped(form: Fp8Blocks) -> None:
    largest = torch.tensor(LARGEST[form.element])
    above = torch.nextafter(largest, torch.tensor(torch.inf))
    for x, byte in ((largest, 127), (above, 128)):
        codes, scales = form.encode(x[None])
        assert scales.tolist() == [byte]
        assert abs(form.decode(codes, scales) / x - 1) < 0.07
    # Negative control: the scale of the other binade would clip.
    assert form.decode(form.encode(largest[None])[0], torch.tensor([126], dtype=torch.uint8)) < x


# --- elements ----------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_nearest_codes_are_ml_dtypes(form: Fp8Blocks) -> None:
    x = numbers(7 * form.block + 5)
    codes, scales = form.encode(x)
    factors = 2.0 ** (scales.double() - 127).repeat_interleave(form.block)[: len(x)]
    wanted = (x.double() / factors).numpy().astype(np.float32).astype(DTYPES[form.element])
    assert np.array_equal(codes.numpy(), wanted.view(np.uint8))
    decoded = form.decode(codes, scales).double()
    assert torch.equal(decoded, torch.from_numpy(wanted.astype(np.float64)) * factors)


@pytest.mark.parametrize("form", FORMS[::2], ids=str)
def test_each_number_becomes_one_of_its_neighbours_as_often_as_it_should(form: Fp8Blocks) -> None:
    """Over all 65,536 random integers, exactly: the share of the upper one is the fraction between
    them, to within half an integer."""
    points = grid(form)
    for number in (0.3, 1.0, 1e-3, -1.7e-3, 5e-6, 300.1, 446.9, float(points[1]) / 3):
        every = torch.arange(65536, dtype=torch.int32)
        x = torch.full((65536,), number)
        top = torch.full((form.block,), LARGEST[form.element])  # so that the scale is 1
        x = torch.cat([torch.cat([part, top]) for part in x.split(65536)])
        bits = torch.cat([every, torch.zeros(form.block, dtype=torch.int32)])
        one = Fp8Blocks(form.element, len(x))
        codes, scales = one.encode(x, bits)
        assert scales.tolist() == [127]
        found = one.decode(codes, scales)[:65536].double().abs()
        exact = Fraction(float(x[0].abs()))
        at = int(np.searchsorted(points, float(exact), side="right")) - 1
        low, high = Fraction(points[at]), Fraction(points[min(at + 1, len(points) - 1)])
        assert set(found.tolist()) <= {float(low), float(high)}
        share = (exact - low) / (high - low) if high > low else Fraction(0)
        up = int((found == float(high)).sum()) if share else 0
        assert abs(up - share * 65536) <= Fraction(1, 2), number


def test_the_mean_of_draws_is_the_number() -> None:
    """Within the central-limit bound. Negative control: rounding to nearest is far off."""
    form, x, draws = Fp8Blocks(), numbers(512, 1.0), 4000
    _, scales = form.encode(x)
    factors = 2.0 ** (scales.double() - 127).repeat_interleave(form.block)
    points = grid(form)
    at = np.searchsorted(points, (x.double().abs() / factors).numpy(), side="right") - 1
    low, high = (torch.from_numpy(points[i]) * factors for i in (at, np.minimum(at + 1, 126)))
    share = ((x.double().abs() - low) / (high - low)).nan_to_num()
    bits = bits_at(torch.arange(512 * draws), Key(7, 3), 5)  # each place draws bits of its own
    total = form.decode(*form.encode(x.repeat(draws), bits)).double().view(draws, 512).sum(0)
    tried = (share > 0.01) & (share < 0.99)  # so that each of both is drawn often
    assert int(tried.sum()) > 480
    deviation = (high - low) * (share * (1 - share) / draws).sqrt()
    assert ((total / draws - x.double()).abs() <= 5 * deviation)[tried].all()
    nearest = (form.decode(*form.encode(x)).double() - x.double()).abs()
    assert float((nearest > 5 * deviation)[tried].float().mean()) > 0.8


# --- what is decoded and encoded again ---------------------------------------------------------


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("stochastic", [False, True])
def test_decoded_values_are_encoded_without_a_change(form: Fp8Blocks, stochastic: bool) -> None:
    for seed in range(20):
        x = numbers(9 * form.block + 1, 6.0, seed)
        bits = random_bits16(1, len(x), Key(seed), 1)[0] if stochastic else None
        once = form.decode(*form.encode(x, bits))
        again = form.decode(*form.encode(once, None if bits is None else 65535 - bits))
        assert torch.equal(once, again)
        assert not torch.equal(once, x)


def test_other_blocks_would_change_them() -> None:
    """The negative control: blocks that begin elsewhere."""
    form = Fp8Blocks("e4m3", 32)
    once = form.decode(*form.encode(numbers(4096, 6.0)))
    assert not torch.equal(form.decode(*form.encode(once[5:])), once[5:])


# --- edges -------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("stochastic", [False, True])
def test_a_block_that_is_not_finite(form: Fp8Blocks, value: float, stochastic: bool) -> None:
    x = numbers(3 * form.block)
    x[form.block + 3] = value
    bits = torch.zeros(len(x), dtype=torch.int32) if stochastic else None
    codes, scales = form.encode(x, bits)
    middle = slice(form.block, 2 * form.block)
    assert (scales == 255).tolist() == [False, True, False] and not codes[middle].any()
    decoded = form.decode(codes, scales)
    assert decoded[middle].isnan().all() and int(decoded.isnan().sum()) == form.block


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_zeros_keep_their_sign(form: Fp8Blocks) -> None:
    x = torch.tensor([0.0, -0.0] * 8)
    for bits in (None, torch.zeros(16, dtype=torch.int32)):
        codes, scales = form.encode(x, bits)
        assert scales.tolist() == [0] and codes.tolist() == [0, 128] * 8
        assert torch.equal(form.decode(codes, scales).signbit(), x.signbit())


def test_no_elements() -> None:
    codes, scales = Fp8Blocks().encode(torch.zeros(0))
    assert len(codes) == len(scales) == len(Fp8Blocks().decode(codes, scales)) == 0


def test_bits_of_an_element() -> None:
    assert Fp8Blocks().bits == 8.0625


@pytest.mark.parametrize(("element", "block"), [("e2m1", 32), ("e4m3", 0), ("e4m3", 12)])
def test_other_formats_are_refused(element: str, block: int) -> None:
    with pytest.raises(ConfigError, match="not"):
        Fp8Blocks(element, block)


# --- random bits -------------------------------------------------------------------------------


def test_bits_at_an_index_are_those_of_a_row() -> None:
    key = Key(2**40 + 3, 9)
    row = random_bits16(1, 4096, key, 77)[0]
    assert torch.equal(bits_at(torch.arange(4096), key, 77), row)
    some = torch.tensor([5, 6, 7, 8, 31, 30, 4095, 0])
    assert torch.equal(bits_at(some, key, 77), row[some])
    far = bits_at(torch.arange(8) + 2**40, key, 77)
    assert not torch.equal(far, row[:8])  # the high word of the index counts
