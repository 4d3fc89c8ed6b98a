"""Philox against Random123's published vectors and a scalar implementation; the layout of the
bits; sharded draws; the bits as random numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_fp4.arithmetic.philox import (
    Key,
    Noise,
    Placement,
    Signs,
    philox4x32,
    random_bits16,
    random_signs,
    stream_id,
)
from testing.oracles import MASK, element_bits, fnv1a, matrix_bits, philox_scalar

ONES = (MASK,) * 4
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
PI_KEY = (0xA4093822, 0x299F31D0)
# The philox4x32 lines of tests/kat_vectors in the Random123 distribution, version 1.14.
VECTORS = [
    (7, (0,) * 4, (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    (7, ONES, (MASK, MASK), (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    (7, PI, PI_KEY, (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A)),
    (10, (0,) * 4, (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (10, ONES, (MASK, MASK), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (10, PI, PI_KEY, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]
IDS = [f"{rounds}-rounds-{name}" for rounds in (7, 10) for name in ("zeros", "ones", "pi")]


def words(counter: tuple[int, ...], key: tuple[int, int], rounds: int) -> tuple[int, ...]:
    c0, c1, c2, c3 = (torch.tensor(c) for c in counter)
    return tuple(int(w) for w in philox4x32((c0, c1, c2, c3), key, rounds))


@pytest.mark.parametrize(("rounds", "counter", "key", "expected"), VECTORS, ids=IDS)
def test_published_vectors(rounds: int, counter: Any, key: Any, expected: Any) -> None:
    assert words(counter, key, rounds) == expected
    assert philox_scalar(counter, key, rounds) == expected  # the tests' own oracle too


def test_another_number_of_rounds_is_told_apart() -> None:
    assert words(PI, PI_KEY, 6) != VECTORS[2][3]


def test_against_the_scalar_implementation() -> None:
    generator = torch.Generator().manual_seed(1)
    counters = torch.randint(0, 1 << 32, (4, 500), generator=generator)
    key = (0xDEADBEEF, 0x00C0FFEE)
    ours = torch.stack(philox4x32((counters[0], counters[1], counters[2], counters[3]), key))
    expected = [philox_scalar((a, b, c, d), key, 7) for a, b, c, d in counters.t().tolist()]
    assert ours.t().tolist() == [list(e) for e in expected]


def test_counters_broadcast() -> None:
    low = torch.arange(5)
    whole = philox4x32(
        (low, torch.zeros(5).long(), torch.full((5,), 3), torch.full((5,), 9)), (1, 2)
    )
    scalar = philox4x32((low, torch.tensor(0), torch.tensor(3), torch.tensor(9)), (1, 2))
    assert all(torch.equal(a, b) for a, b in zip(whole, scalar, strict=True))


# FNV-1a's published test values (Fowler, Noll, Vo: the empty string, "a", "foobar").
@pytest.mark.parametrize(
    ("text", "value"), [("", 0x811C9DC5), ("a", 0xE40C292C), ("foobar", 0xBF9CF968)]
)
def test_stream_is_fnv1a(text: str, value: int) -> None:
    assert stream_id(text) == value == fnv1a(text)


def test_stream_of_a_name_beyond_ascii() -> None:
    assert stream_id("décodeur.0:fprop:x") == fnv1a("décodeur.0:fprop:x")


@pytest.mark.parametrize("columns", [8, 32, 13, 1], ids=lambda n: f"{n}-columns")
@pytest.mark.parametrize(
    ("seed", "step", "stream"),
    [(0, 0, 0), (0x123456789ABCDEF0, 70000, 0xFFFFFFFF), ((1 << 64) - 1, MASK, 1)],
    ids=["zeros", "mixed", "ones"],
)
def test_which_bits_an_element_takes(columns: int, seed: int, step: int, stream: int) -> None:
    bits = random_bits16(5, columns, Key(seed, step), stream)
    assert bits.dtype == torch.int32
    assert torch.equal(bits.long(), matrix_bits(5, columns, seed, step, stream))


def test_high_half_first_is_told_apart() -> None:
    """Negative control of the layout: the halves of each word exchanged."""
    bits = random_bits16(4, 8, Key(7), 3).long()
    assert not torch.equal(bits.view(4, 4, 2).flip(-1).view(4, 8), matrix_bits(4, 8, 7, 0, 3))


def test_index_beyond_32_bits() -> None:
    """The group's index crosses 2^32 inside the matrix: row 3 of 2^31 groups a row, and on."""
    per_row = (1 << 31) - 1
    rows = torch.tensor([1, 2, 3, 1 << 33])
    placement = Placement(rows=rows, groups=torch.tensor([0, 2, 3]), groups_per_row=per_row)
    bits = random_bits16(4, 24, Key(5, 6), 7, placement)
    for i, row in enumerate(rows.tolist()):
        for k, group in enumerate((0, 2, 3)):
            expected = [element_bits(5, 6, 7, row * per_row + group, j) for j in range(8)]
            assert bits[i, 8 * k : 8 * k + 8].tolist() == expected
    assert 2 * per_row + 2 == 1 << 32  # that the crossing is there: row 2, group 2


def _swiglu_rows(rank: int, ranks: int, half: int) -> Tensor:
    """fc1's rows on a rank: its slice of the gate, then its slice of the up projection."""
    size = half // ranks
    gate = torch.arange(rank * size, (rank + 1) * size)
    return torch.cat((gate, half + gate))


SHARDS = {
    "row-range": (torch.arange(8, 16), torch.arange(0, 8)),
    "column-range": (torch.arange(16), torch.arange(4, 8)),
    "swiglu-rank-1-of-2": (_swiglu_rows(1, 2, 8), torch.arange(0, 8)),
    "interleaved-tokens": (torch.arange(1, 16, 2), torch.arange(2, 6)),
}


@pytest.mark.parametrize("shard", SHARDS)
def test_a_shard_draws_what_the_whole_draws(shard: str) -> None:
    rows, groups = SHARDS[shard]
    key, stream = Key(11, 4), stream_id("decoder.layers.3.mlp.fc1:dgrad:w")
    whole = random_bits16(16, 64, key, stream).view(16, 8, 8)
    local = random_bits16(
        len(rows), 8 * len(groups), key, stream, Placement(rows, groups, groups_per_row=8)
    )
    assert torch.equal(local.view(len(rows), -1, 8), whole[rows][:, groups])
    unplaced = random_bits16(len(rows), 8 * len(groups), key, stream)
    assert not torch.equal(local, unplaced)  # without its placement a shard draws other bits


def test_random_bits_are_keyed_by_all_it_names() -> None:
    like = torch.empty(4, 16)
    base = Noise(Key(1, 2), 3)
    others = [Noise(Key(2, 2), 3), Noise(Key(1 + (1 << 32), 2), 3), Noise(Key(1, 3), 3),
              Noise(Key(1, 2), 4)]  # fmt: skip
    assert torch.equal(base.bits16(like), Noise(Key(1, 2), 3).bits16(like))
    assert all(not torch.equal(base.bits16(like), other.bits16(like)) for other in others)


def test_kernels_take_the_words_as_integers_of_32_bits() -> None:
    """The step, the seed's low word and its high one, with the same bits."""
    numbers = (0x89ABCDEF, 0x01234567, 0xFEDCBA98)
    step, low, high = (torch.tensor(n).to(torch.int32).item() for n in numbers)
    seed = numbers[2] << 32 | numbers[1]
    assert Key(seed, numbers[0]).signed_words == (step, low, high)
    assert Key(seed, torch.tensor(5)).signed_words == (0, low, high)  # read when bits are drawn


def test_signs_are_single_bits_of_the_draw() -> None:
    signs = random_signs(300, Key(9, 5), 77, draw=6)
    for i in range(300):
        word = philox_scalar((i // 128, 6, 5, 77), (9, 0), 7)[i % 128 // 32]
        assert signs[i] == (-1.0 if word >> i % 32 & 1 else 1.0)


@pytest.mark.parametrize("number", [0, 3, 2**31 + 1, 2**40 + 5])
def test_a_step_or_a_draw_may_lie_in_memory(number: int) -> None:
    like, lies = torch.empty(4, 16), torch.tensor(number)
    assert torch.equal(
        Noise(Key(2**63 + 9, number), 3).bits16(like), Noise(Key(2**63 + 9, lies), 3).bits16(like)
    )
    signs = Signs(Key(1, number), 0xFFFFFFF0, number).vector(256)
    noise, same = Noise(Key(1, lies), 3), Signs(Key(1, lies), 0xFFFFFFF0, lies)
    before = noise.bits16(like)
    assert torch.equal(same.vector(256), signs)
    lies += 1  # they are read when they are drawn
    assert not torch.equal(same.vector(256), signs)
    assert not torch.equal(noise.bits16(like), before)


def test_signs_are_fresh_for_each_draw_and_step() -> None:
    base = random_signs(64, Key(1, 2), 3)
    for other in (random_signs(64, Key(1, 2), 3, draw=1), random_signs(64, Key(1, 3), 3)):
        assert not torch.equal(base, other)


# --- as random numbers ----------------------------------------------------------------------------

COUNT = 1 << 20


@pytest.fixture(scope="module")
def sample() -> Tensor:
    return random_bits16(COUNT // 1024, 1024, Key(2024, 1), stream_id("uniformity")).double()


def _chi_square_z(counts: Tensor) -> float:
    """(chi-square - degrees) / sqrt(2 degrees) of equally likely cells: nearly standard normal
    with hundreds of cells."""
    degrees = counts.numel() - 1
    expected = counts.sum() / counts.numel()
    statistic = (counts - expected).square().sum() / expected
    return float((statistic - degrees) / math.sqrt(2 * degrees))


# |z| < 5: a fair generator fails one such check in 1.7 million.
@pytest.mark.parametrize("position", range(8), ids=lambda j: f"element-{j}")
def test_uniform_in_each_position(sample: Tensor, position: int) -> None:
    halves = sample.view(-1, 8)[:, position]
    assert abs(_chi_square_z(torch.bincount((halves / 256).long(), minlength=256).double())) < 5
    assert abs(_chi_square_z(torch.bincount(halves.long() % 256, minlength=256).double())) < 5
    mean, deviation = 32767.5, math.sqrt((65536**2 - 1) / 12)
    assert abs(float(halves.mean()) - mean) < 5 * deviation / math.sqrt(halves.numel())


def test_uniformity_check_sees_a_lost_bit(sample: Tensor) -> None:
    """Negative control: halves whose lowest bit is stuck."""
    stuck = sample.long() | 1
    assert abs(_chi_square_z(torch.bincount(stuck.flatten() % 256, minlength=256).double())) > 5


def _correlation_z(a: Tensor, b: Tensor) -> float:
    """r sqrt(n) of two samples: standard normal where they are independent."""
    r = torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1]
    return float(r) * math.sqrt(a.numel())


def test_elements_of_a_draw_are_uncorrelated(sample: Tensor) -> None:
    columns = sample.view(-1, 8)
    for i in range(8):
        for j in range(i):
            assert abs(_correlation_z(columns[:, i], columns[:, j])) < 5, (i, j)


def test_draws_side_by_side_are_uncorrelated(sample: Tensor) -> None:
    groups = sample.view(-1, 8)
    assert abs(_correlation_z(groups[1:], groups[:-1])) < 5


@pytest.mark.parametrize(
    "other",
    [
        Noise(Key(2024, 1), stream_id("linear:wgrad:x")),
        Noise(Key(2024, 2), stream_id("linear:dgrad:dy")),
        Noise(Key(2025, 1), stream_id("linear:dgrad:dy")),
    ],
    ids=["q5-with-q6", "next-step", "next-seed"],
)
def test_random_bits_of_two_operands_are_uncorrelated(other: Noise) -> None:
    """Of one product, of two steps, of two seeds."""
    like = torch.empty(256, 1024)
    first = Noise(Key(2024, 1), stream_id("linear:dgrad:dy")).bits16(like).double().flatten()
    second = other.bits16(like).double().flatten()
    assert abs(_correlation_z(first, second)) < 5
    assert _correlation_z(first, first) > 5  # negative control: one stream for both


def test_signs_are_balanced_and_independent() -> None:
    n = 4096
    signs = torch.stack([random_signs(64, Key(3, step), 5) for step in range(n)])
    assert float(signs.mean(0).abs().max() * math.sqrt(n)) < 5.5
    r = signs.t() @ signs / n - torch.eye(64)
    assert float(r.abs().max() * math.sqrt(n)) < 5.5  # 2016 pairs: false alarm below 1e-4
