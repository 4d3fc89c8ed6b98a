"""Hot channels: which are taken, by an oracle in numpy, and what is split off."""

from __future__ import annotations

from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_fp4 import ConfigError
from megatron_fp4.arithmetic.hot_channels import HotChannels
from testing.oracles import normal


def matrix(tokens: int = 96, features: int = 192) -> Tensor:
    """Features of somewhat different sizes, in BF16."""
    return (normal((tokens, features), 1) * (0.1 * normal((features,), 2)).exp()).bfloat16()


def hottest(x: Tensor, group: int, count: int) -> list[int]:
    """By exact sums of squares."""
    squares = [sum(Fraction(v) ** 2 for v in column) for column in x.double().t().tolist()]
    found: list[int] = []
    for start in range(0, len(squares), group):
        order = sorted(range(start, start + group), key=lambda i: -squares[i])  # stable
        found += sorted(order[:count])
    return found


@pytest.mark.parametrize(("group", "count"), [(32, 1), (32, 3), (64, 1), (2, 1)])
def test_the_largest_norms_of_each_group_are_taken(group: int, count: int) -> None:
    x = matrix(24)
    rest, columns = HotChannels(group, count).split(x)
    wanted = hottest(x, group, count)
    assert columns.channels.tolist() == wanted
    cold, hot = x.float().numpy().copy(), x.float().numpy()[:, wanted]
    cold[:, wanted] = 0
    assert np.array_equal(rest.float().numpy(), cold)
    assert np.array_equal(columns.values.float().numpy(), hot)
    assert rest.dtype == columns.values.dtype == x.dtype


def test_the_mean_and_the_largest_magnitude_choose_others() -> None:
    """Negative control: other scores would have shown."""
    x = matrix()
    taken = HotChannels().split(x)[1].channels.tolist()
    for scores in (x.double().mean(0), x.double().abs().amax(0)):
        others = scores.view(-1, 32).argmax(1) + torch.arange(0, 192, 32)
        assert taken != others.tolist()


def test_the_first_of_equal_channels_is_taken() -> None:
    x = torch.zeros(8, 64)
    assert HotChannels(32, 2).split(x)[1].channels.tolist() == [0, 1, 32, 33]
    x[:, [7, 9, 40]] = torch.tensor([1.0, -1.0, 2.0])
    assert HotChannels(32, 1).split(x)[1].channels.tolist() == [7, 40]


def test_the_order_of_the_tokens_does_not_matter() -> None:
    x = (normal((4096, 64), 1) * 2**9).round()  # sums of squares need more than 24 bits
    x[:, 1::2] = x[:, ::2].flip(0)  # pairs of channels whose exact norms are equal
    order = torch.randperm(4096, generator=torch.Generator().manual_seed(3))
    taken = [HotChannels(2).split(each)[1].channels for each in (x, x[order])]
    assert torch.equal(*taken)
    # Negative control: sums in float32.
    one, other = (
        np.cumsum(each.numpy() ** 2, 0, dtype=np.float32)[-1].reshape(-1, 2).argmax(1)
        for each in (x, x[order])
    )
    assert not np.array_equal(one, other)


def test_ranks_choose_by_all_tokens() -> None:
    x = matrix()
    halves, scores = x.chunk(2), [half.double().square().sum(0) for half in x.chunk(2)]
    whole = HotChannels().split(x)[1]
    for half, other in zip(halves, reversed(scores), strict=True):
        columns = HotChannels().split(half, partial(torch.add, other))[1]
        assert torch.equal(columns.channels, whole.channels)
    alone = [HotChannels().split(half)[1].channels for half in halves]
    assert not torch.equal(*alone)  # negative control


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_channel_that_is_not_finite_is_hot(bad: float) -> None:
    """Its values are then in the product in high precision, and Y is not finite."""
    x = matrix()
    x[5, 70] = bad
    rest, columns = HotChannels().split(x)
    assert 70 in columns.channels.tolist() and rest.isfinite().all()
    assert not columns.values.isfinite().all()


def test_no_tokens() -> None:
    rest, columns = HotChannels().split(torch.empty(0, 64))
    assert rest.shape == (0, 64) and columns.values.shape == (0, 2)


@pytest.mark.parametrize("count", [1, 4])
def test_the_bytes(count: int) -> None:
    x, channels = matrix(), HotChannels(32, count)
    columns = channels.split(x)[1]
    assert channels.nbytes(96, 192, 2) == columns.values.nbytes + columns.channels.nbytes
    assert channels.multiplied(192) == columns.channels.numel()


@pytest.mark.parametrize(("group", "count"), [(32, 0), (32, 32), (0, 1), (1, 1), (32, -1)])
def test_a_count_that_makes_no_sense_is_refused(group: int, count: int) -> None:
    with pytest.raises(ConfigError, match=f"count {count} must lie between 0 and the group"):
        HotChannels(group, count)
