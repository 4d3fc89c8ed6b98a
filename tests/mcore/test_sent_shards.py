"""Which rank quantizes which blocks of a bucket, and what the ranks' messages make together."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributed as dist
from torch.testing import assert_close

from megatron_fp4 import Quantizer, Recipe
from megatron_fp4.arithmetic.owned_blocks import owned_blocks
from megatron_fp4.arithmetic.quantize import quantize_matrix
from megatron_fp4.arithmetic.weight_states import WeightAverage
from megatron_fp4.errors import ConfigError
from megatron_fp4.mcore.gather import sent_shards as module
from megatron_fp4.mcore.gather.buckets import CodesBucket, install
from megatron_fp4.mcore.gather.sent_shards import head_length, sent_shards
from megatron_fp4.mcore.model.sent_weights import SentWeights
from megatron_fp4.mcore.model.weight_states import WeightStates
from megatron_fp4.recipe import GemmRecipe
from testing.oracles import normal

NEAREST = Quantizer(rule="ceil")
EMA = Quantizer(rule="ceil", rounding="ema")
RECIPES = {
    "nearest": Recipe("nearest", fprop=GemmRecipe(NEAREST, NEAREST), backward="forward"),
    "average": Recipe(
        "average",
        fprop=GemmRecipe(NEAREST, EMA),
        backward="forward",
        weight_average=WeightAverage(beta=0.5),
    ),
}
RANKS = (1, 2, 3, 4, 6, 8, 16, 64, 128)


@pytest.mark.parametrize("ranks", RANKS)
def test_each_block_has_one_owner_who_has_its_first_element(ranks: int) -> None:
    draw = random.Random(ranks)
    for _ in range(50):
        block = draw.choice((16, 32, 64))
        start, size = 64 * draw.randrange(8), block * draw.randrange(1, 40)
        shard = -(-(start + size + draw.randrange(300)) // ranks)
        borders = [rank * shard for rank in range(ranks + 1)]
        owned = owned_blocks(start, start + size, block, borders)
        blocks = [
            (rank, first)
            for rank, (low, high) in enumerate(owned)
            for first in range(low, high, block)
        ]
        assert [first for _, first in blocks] == list(range(0, size, block))
        assert all(borders[rank] <= start + first < borders[rank + 1] for rank, first in blocks)


class Bucket:
    """A bucket of Megatron's distributed optimizer: parameters begin at multiples of 64."""

    def __init__(self, recipe: Recipe, ranks: int, sizes: list[tuple[int, ...]]) -> None:
        self.weights, at = SentWeights(), 0
        self.param_to_index: dict[Any, tuple[int, int]] = {}
        for i, size in enumerate(sizes):
            values = normal(size, i) * 2.0 ** (i % 5)
            parameter = torch.nn.Parameter(values.bfloat16())
            at = -(-at // 64) * 64
            self.param_to_index[parameter] = at, at + parameter.numel()
            at += parameter.numel()
            if len(size) == 2:
                self.weights.add(parameter, recipe)
        padded = -(-at // (128 * ranks)) * 128 * ranks if 128 % ranks else -(-at // 128) * 128
        self.param_data = torch.full((padded,), torch.nan, dtype=torch.bfloat16)
        for parameter, (start, stop) in self.param_to_index.items():
            self.param_data[start:stop] = parameter.detach().flatten()

    @property
    def params(self) -> set[Any]:
        return set(self.param_to_index)


def average_of(parameter: Tensor) -> Tensor:
    return parameter.detach().float() * 1.07 + 0.1


class States:
    """The averages of the part of each weight in one rank's shard."""

    def __init__(self, bucket: Bucket, low: int, high: int) -> None:
        self._bucket, self._low, self._high = bucket, low, high

    def part(self, weight: Any, name: str) -> tuple[int, Tensor]:
        start, stop = self._bucket.param_to_index[weight]
        first, last = max(start, self._low) - start, min(stop, self._high) - start
        return first, average_of(weight).flatten()[first:last]


def messages(bucket: Bucket, ranks: int, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The message of each rank, which knows its own shard alone, and the heads of others."""
    shard = len(bucket.param_data) // ranks
    senders = []
    monkeypatch.setattr(dist, "get_global_rank", lambda group, rank: rank)
    for rank in range(ranks):
        own = SimpleNamespace(
            param_data=torch.full_like(bucket.param_data, torch.nan),
            param_to_index=bucket.param_to_index,
        )
        low, high = rank * shard, (rank + 1) * shard
        own.param_data[low:high] = bucket.param_data[low:high]
        group: Any = SimpleNamespace(size=lambda: ranks, rank=lambda rank=rank: rank)
        states: Any = States(bucket, low, high)
        senders.append(CodesBucket(own, group, bucket.weights, states))
    heads = [sender._heads() for sender in senders]

    def gather(every: Tensor, own: Tensor, group: Any) -> None:
        which = int(own.dtype == torch.float32)
        assert_close(own, heads[group.rank()][which], rtol=0, atol=0, equal_nan=True)
        every.copy_(torch.cat([head[which] for head in heads]))

    monkeypatch.setattr(dist, "all_gather_into_tensor", gather)
    return [sender._message() for sender in senders]


def received(
    bucket: Bucket, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """((codes, scales) of the sent weights, the elements of the bucket), as a rank gets them."""
    sent = messages(bucket, ranks, monkeypatch)
    target = torch.zeros_like(bucket.param_data)
    like = SimpleNamespace(**vars(bucket) | {"param_data": target})
    every = sent_shards(like, ranks, bucket.weights.by_parameter)
    for shard, message in zip(every, sent, strict=True):
        at = 0
        for place in shard.places(target):
            place.copy_(message[at : at + len(place)])
            at += len(place)
    found = [(each.codes.codes, each.codes.scales) for each in bucket.weights.by_parameter.values()]
    return found, target


SIZES: list[tuple[int, ...]] = [(24, 32), (64,), (5, 96), (33,), (3, 32), (1, 64)]


@pytest.mark.parametrize("kind", RECIPES)
@pytest.mark.parametrize("ranks", RANKS)
def test_messages_make_the_codes_of_the_whole_weights(
    kind: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = Bucket(RECIPES[kind], ranks, SIZES)
    found, buffer = received(bucket, ranks, monkeypatch)
    weights = bucket.weights.by_parameter
    for (codes, scales), weight in zip(found, weights, strict=True):
        quantizer = weights[weight].codes.quantizer
        right = quantize_matrix(weight.detach(), quantizer, axis=1, average=average_of(weight))
        assert torch.equal(codes, right.codes) and torch.equal(scales, right.scales)
    for parameter, (start, stop) in bucket.param_to_index.items():
        if parameter not in weights:
            assert torch.equal(buffer[start:stop], parameter.detach().flatten())
    # From eight ranks on borders cut blocks of 32.
    head = head_length(sent_shards(bucket, ranks, weights))
    assert (head > 0) == (ranks >= 8), head


def test_blocks_completed_with_zeros_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        CodesBucket, "_after_shard", lambda self: tuple(map(torch.zeros_like, after_shard(self)))
    )
    with pytest.raises(AssertionError):
        test_messages_make_the_codes_of_the_whole_weights("nearest", 8, monkeypatch)


after_shard = CodesBucket._after_shard


def test_bytes_of_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """4.25 bits a weight, and 16 for other parameters; the messages are as long as the longest."""
    for ranks in (2, 4):
        bucket = Bucket(RECIPES["nearest"], ranks, [(64, 32 * ranks)])
        [length] = {len(message) for message in messages(bucket, ranks, monkeypatch)}
        assert length == 64 * 32 * 4.25 / 8
    bucket, codes = Bucket(RECIPES["nearest"], 2, [(64, 64), (64 * 64,)]), 64 * 64 * 17 // 32
    first, second = messages(bucket, 2, monkeypatch)
    assert len(first) == len(second) == 64 * 64 * 2 and not first[codes:].any()
    # A long run of another parameter is broadcast, and pads nobody's message.
    monkeypatch.setattr(module, "LONG", 64 * 64 * 2)
    assert {len(message) for message in messages(bucket, 2, monkeypatch)} == {codes}
    found = sent_shards(bucket, 2, bucket.weights.by_parameter)
    assert [shard.long for shard in found] == [[], [(64 * 64, 2 * 64 * 64)]]


class Group:
    """Counts its gathers, and notes its turns."""

    def __init__(self) -> None:
        self.gathers = 0
        self.turns: list[bool] = []

    def gather_codes(self) -> None:
        self.gathers += 1

    def turn_to(self, codes: bool) -> None:
        self.turns.append(codes)


def test_codes_are_gathered_again_where_weights_were_written() -> None:
    weight, group, weights = torch.nn.Parameter(normal((8, 32), 0)), Group(), SentWeights()
    weights.add(weight, RECIPES["nearest"])
    weights.follow([group])
    found = []
    for act in (lambda: None, lambda: None, lambda: weight.data.add_(1.0),
                lambda: weight.detach().add_(1.0), weights.expire):  # fmt: skip
        act()
        weights.refresh(codes=True)
        found.append(group.gathers)
    # The optimizer writes as the third does, and gathers the codes itself.
    assert found == [1, 1, 1, 2, 3]


def test_what_is_gathered_changes_where_linears_read_the_other() -> None:
    """Codes that were written before are gathered with the change, and weights need no more."""
    weight, group, weights = torch.nn.Parameter(normal((8, 32), 0)), Group(), SentWeights()
    weights.add(weight, RECIPES["nearest"])
    weights.follow([group])
    for codes in (True, True, False, False, True):
        weights.refresh(codes)
    assert group.turns == [False, True] and group.gathers == 1
    weights.refresh(codes=False)
    weights.expire()
    weights.refresh(codes=False)
    assert group.turns == [False, True, False] and group.gathers == 1


def test_a_weight_that_was_frozen_late_is_refused() -> None:
    bucket = Bucket(RECIPES["nearest"], 1, SIZES)
    group = SimpleNamespace(buckets=[bucket])
    chunk = SimpleNamespace(bucket_groups=[group], expert_parallel_bucket_groups=[])
    bucket.weights.add(torch.nn.Parameter(normal((8, 32), 0)), RECIPES["nearest"])
    with pytest.raises(ConfigError, match="was frozen after its model was built"):
        install([chunk], bucket.weights, WeightStates())
