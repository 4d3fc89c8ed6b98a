"""Sums of gradients that ranks send in few bits, against exact sums of what each of them has."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_fp4.arithmetic.bf16 import Bf16Elements
from megatron_fp4.arithmetic.fp8_blocks import Fp8Blocks
from megatron_fp4.arithmetic.messages import (
    ELEMENTS,
    FORMS,
    GradientForm,
    RankRounding,
    decoded,
    encoded,
    form_name,
    length,
    of_shard,
    store,
    summed,
)
from megatron_fp4.arithmetic.philox import Key
from megatron_fp4.arithmetic.segments import Place, Segment, segments
from testing.oracles import element_bits

FORM = Fp8Blocks("e4m3", 32)
# The forms of the flags, and one with blocks that end within the parameters here.
EACH_FORM = pytest.mark.parametrize("form", [FORM, *FORMS.values()], ids=["small", *FORMS])
SIZE, STREAM = 900, 11
# Three parameters with gaps between them, in two shards; the border cuts the second.
PARAMETERS = [(0, 130, Place(0, 130, 130)), (192, 700, Place(136, 508, 508)),
              (704, 897, Place(648, 193, 193))]  # fmt: skip
SHARDS = segments(PARAMETERS, [0, 450, SIZE])


def gradients(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(SIZE, generator=generator) * 0.01


def rounding(step: int, rank: int) -> RankRounding:
    return RankRounding(Key(3, step), STREAM, rank)


def sent(
    step: int, rank: int, values: Tensor, shard: list[Segment], form: GradientForm = FORM
) -> Tensor:
    return encoded(of_shard(values, shard), shard, form, rounding(step, rank))


# --- one message -------------------------------------------------------------------------------


@pytest.mark.parametrize("shard", SHARDS, ids=["first", "second"])
def test_a_message_has_a_code_for_each_element_and_a_scale_for_each_block(
    shard: list[Segment],
) -> None:
    message = encoded(of_shard(gradients(0), shard), shard, FORM)
    assert message.dtype == torch.uint8 and len(message) == length(shard, FORM)
    wanted = sum(len(part) + -(-len(part) // 32) for part in shard)
    assert len(message) == wanted
    in_bf16 = encoded(of_shard(gradients(0), shard), shard, Bf16Elements())
    assert in_bf16.dtype == torch.uint8 and len(in_bf16) == length(shard, Bf16Elements())
    assert len(in_bf16) == 2 * sum(map(len, shard))


def test_a_block_is_of_one_parameter() -> None:
    """A parameter beside it, of any size, changes nothing. Negative control: one within."""
    [shard] = segments(PARAMETERS, [0, SIZE])
    plain, other, own = gradients(0), gradients(0), gradients(0)
    other[:130] *= 1e6
    own[200] *= 1e6
    last = [part for part in shard if part.start == 192]
    assert torch.equal(
        encoded(of_shard(other, shard), shard, FORM)[130:638],
        encoded(of_shard(plain, shard), shard, FORM)[130:638],
    )
    assert not torch.equal(
        encoded(of_shard(own, last), last, FORM), encoded(of_shard(plain, last), last, FORM)
    )


def test_shards_draw_the_bits_of_the_whole() -> None:
    """Two shards, cut between two blocks, are sent as one would be."""
    one, two = [(0, 640, Place(80, 640, 640))], gradients(1)
    [whole] = segments(one, [0, 640])
    left, right = segments(one, [0, 320, 640])
    values = decoded(sent(4, 1, two, whole), whole, FORM)
    parts = [decoded(sent(4, 1, two, part), part, FORM) for part in (left, right)]
    assert torch.equal(values, torch.cat(parts))
    shifted = [replace(part, within=0) for part in right]  # negative control
    assert not torch.equal(decoded(sent(4, 1, two, shifted), right, FORM), parts[1])


def test_the_bits_are_those_that_the_numerics_define() -> None:
    """By the scalar Philox: i is rank * 2^48 plus the place; element i % 8 of group i // 8."""
    seed, step, rank, segment = 2**40 + 7, 5, 3, SHARDS[1][0]
    found = RankRounding(Key(seed, step), STREAM, rank).bits(segment, torch.device("cpu"))
    for element in (0, 1, 7, 8, len(segment) - 1):
        index = rank * 2**48 + segment.place.first + segment.within + element
        bits = element_bits(seed, step, STREAM, index // 8, index % 8)
        assert int(found[element]) & 0xFFFF == bits


def test_an_empty_shard() -> None:
    assert (
        len(encoded(torch.zeros(0), [], FORM)) == len(decoded(torch.zeros(0).byte(), [], FORM)) == 0
    )


def test_what_is_stored_leaves_the_padding() -> None:
    buffer = torch.full((SIZE,), 7.0, dtype=torch.bfloat16)
    for shard in SHARDS:
        store(of_shard(gradients(2), shard), shard, buffer)
    inside = torch.zeros(SIZE, dtype=torch.bool)
    for start, stop, _ in PARAMETERS:
        inside[start:stop] = True
    assert torch.equal(buffer[inside], gradients(2)[inside].bfloat16())
    assert (buffer[~inside] == 7).all()


# --- sums --------------------------------------------------------------------------------------


VALUES, DRAWS = 512, 1500  # of each test below: whole blocks of every form; draws of each value
SIZE_REPEATED = VALUES * DRAWS
[REPEATED] = segments(
    [(0, SIZE_REPEATED, Place(8, SIZE_REPEATED, SIZE_REPEATED))], [0, SIZE_REPEATED]
)


def drawn(values: list[Tensor], share: bool, form: GradientForm) -> Tensor:
    """The sum of what ranks send of VALUES values, by so many draws of the random bits:
    float32 [DRAWS, VALUES].

    A parameter has the values DRAWS times: each place draws bits of its own. share: whether all
    ranks have rank 0's bits.
    """
    messages = [
        sent(4, 0 if share else rank, each.repeat(DRAWS), REPEATED, form)
        for rank, each in enumerate(values)
    ]
    return summed(messages, REPEATED, form).view(DRAWS, VALUES)


def is_unbiased(draws: Tensor, exact: Tensor) -> tuple[Tensor, Tensor]:
    """(whether the mean of each value is the exact one, the central limit theorem's bound)."""
    mean, variance = draws.double().mean(0), draws.double().var(0)
    bound = 5 * (variance / DRAWS).sqrt() + 1e-8
    return (mean - exact).abs() <= bound, bound


@EACH_FORM
def test_the_expected_sum_is_the_sum(form: GradientForm) -> None:
    values = [gradients(rank)[:VALUES] for rank in range(4)]
    exact = torch.stack(values).double().sum(0)
    right, bound = is_unbiased(drawn(values, False, form), exact)
    assert right.float().mean() > 0.999
    nearest = summed(
        [encoded(each.repeat(DRAWS), REPEATED, form) for each in values], REPEATED, form
    )
    error = (nearest[:VALUES] - exact).abs()
    assert (error > bound).float().mean() > 0.8  # negative control


@EACH_FORM
def test_the_error_of_a_mean_falls_with_the_number_of_ranks(form: GradientForm) -> None:
    """Four ranks with equal gradients: the variance of their mean is a quarter of one rank's."""
    values = gradients(5)[:VALUES]
    one, four, alike = (
        float(drawn([values / ranks] * ranks, share, form).double().var(0).mean())
        for ranks, share in ((1, False), (4, False), (4, True))  # the last one: negative control
    )
    assert abs(four / one - 0.25) < 0.02
    assert abs(alike / one - 1) < 0.06


def test_a_second_rounding_keeps_the_mean_and_adds_a_variance_of_its_own() -> None:
    """Without the distributed optimizer the owner rounds the sum once more, by its own stream. The
    error that this adds does not fall with the number of ranks."""
    values = gradients(5)[:VALUES]
    sums = drawn([values / 8] * 8, False, FORM)
    owner = RankRounding(Key(3, 4), STREAM + 1, 0)
    again = decoded(encoded(sums.flatten(), REPEATED, FORM, owner), REPEATED, FORM)
    right, _ = is_unbiased(again.view(DRAWS, VALUES), values.double())
    assert right.float().mean() > 0.999
    assert again.view(DRAWS, VALUES).double().var(0).mean() > 4 * sums.double().var(0).mean()


def test_ranks_are_added_in_their_order() -> None:
    values = [gradients(rank) * 1000.0**rank for rank in range(4)]
    messages = [encoded(of_shard(each, SHARDS[1]), SHARDS[1], FORM) for each in values]
    parts = [decoded(message, SHARDS[1], FORM) for message in messages]
    assert torch.equal(
        summed(messages, SHARDS[1], FORM), ((parts[0] + parts[1]) + parts[2]) + parts[3]
    )
    backwards = ((parts[3] + parts[2]) + parts[1]) + parts[0]
    assert not torch.equal(summed(messages, SHARDS[1], FORM), backwards)  # the order shows


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_on_one_rank_is_not_finite_in_the_sum(value: float) -> None:
    values = [gradients(rank) for rank in range(3)]
    values[1][20] = value
    found = summed(
        [encoded(of_shard(each, SHARDS[0]), SHARDS[0], FORM) for each in values], SHARDS[0], FORM
    )
    assert not found[20].isfinite() and int(found.isnan().sum()) == 32


def test_the_forms_by_element() -> None:
    assert {e for elements in ELEMENTS.values() for e in elements} == FORMS.keys()
    assert FORMS["e5m2"] == Fp8Blocks("e5m2") and FORMS["bf16"] == Bf16Elements()
    assert [form_name(element) for element in FORMS] == ["FP8 (E4M3)", "FP8 (E5M2)", "BF16"]
