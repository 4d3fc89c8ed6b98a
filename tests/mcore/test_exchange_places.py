"""The places of gradients in the vector by which they draw random bits: docs/numerics.md."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import pytest
import torch

from megatron_fp4.arithmetic.philox import stream_id
from megatron_fp4.arithmetic.segments import Place
from megatron_fp4.mcore.exchange import places, slots


class Chunk(torch.nn.Module):
    """Parameters of several sizes, in another order than that of their names."""

    def __init__(self) -> None:
        super().__init__()
        self.config = types.SimpleNamespace(num_moe_experts=None, qk_layernorm=False)
        self.norm = torch.nn.LayerNorm(5)
        self.head = torch.nn.Linear(3, 7)
        self.frozen = torch.nn.Parameter(torch.zeros(100), requires_grad=False)


@pytest.fixture
def second_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is rank 1 of two tensor-parallel ranks, and asks none for its names."""
    group = types.SimpleNamespace(size=lambda: 2, rank=lambda: 1)
    monkeypatch.setattr(places.mpu, "get_tensor_model_parallel_group", lambda: group)
    monkeypatch.setattr(places, "of_all", lambda value: [value])


def found(chunk: Chunk) -> dict[str, Place]:
    every: dict[torch.nn.Parameter, Place] = places.places([chunk])
    return {name: every[p] for name, p in chunk.named_parameters() if p in every}


def test_parameters_lie_in_the_order_of_their_names_from_multiples_of_eight(
    second_of_two: None,
) -> None:
    """head.bias 7, head.weight 21, norm.bias 5, norm.weight 5; a frozen one has no place."""
    assert found(Chunk()) == {
        "head.bias": Place(0, 7, 7),
        "head.weight": Place(8, 21, 21),
        "norm.bias": Place(32, 5, 5),
        "norm.weight": Place(40, 5, 5),
    }


@pytest.mark.parametrize("name", ["sequence_parallel", "average_gradients_across_tp_domain"])
def test_gradients_that_tensor_parallel_ranks_sum_have_a_part_for_each_rank(
    second_of_two: None, name: str
) -> None:
    """Rank 1's part of norm.bias is behind rank 0's, and what follows begins behind both."""
    chunk = Chunk()
    setattr(chunk.norm.bias, name, True)
    every = found(chunk)
    assert every["norm.bias"] == Place(32 + 5, 5, 5) and every["norm.weight"] == Place(48, 5, 5)
    # The optimizer's state, whose copies have to stay alike, draws the same bits on both.
    assert places.place_in(chunk.norm.bias) == Place(0, 5, 5)


@pytest.mark.parametrize("name", ["q_layernorm", "k_layernorm"])
def test_norms_of_query_and_key_have_a_part_for_each_rank(second_of_two: None, name: str) -> None:
    """Each rank norms the heads that it has, and Megatron sums the gradients by these names if the
    model has such norms."""
    chunk = Chunk()
    chunk.add_module(name, torch.nn.LayerNorm(3))
    alike = found(chunk)[f"{name}.weight"]
    chunk.config.qk_layernorm = True
    every = found(chunk)
    assert every[f"{name}.weight"] == dataclasses.replace(alike, first=alike.first + 3)
    assert every["head.weight"] == Place(8, 21, 21)


def test_a_copy_of_the_embedding_has_a_part_of_its_own(
    second_of_two: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Multi-token prediction has one on the last pipeline stage, by the name of the first stage's.
    Megatron sums their gradients after the exchange."""
    chunk = Chunk()
    copy: Any = chunk.head.weight
    copy.shared = True
    monkeypatch.setattr(places, "of_all", lambda value: [{"head.weight": 21}, value])
    every = found(chunk)
    assert every["head.weight"] == Place(32, 21, 21) and every["norm.bias"] == Place(56, 5, 5)


def test_a_sharded_weight_lies_where_the_whole_one_does(second_of_two: None) -> None:
    """Rank 1 has the second half of the rows, or of the columns."""
    chunk = Chunk()
    weight: Any = chunk.head.weight
    weight.tensor_model_parallel, weight.partition_dim = True, 0
    assert found(chunk)["head.weight"] == Place(8 + 21, 21, 42)
    weight.partition_dim = 1
    assert found(chunk)["head.weight"] == Place(8 + 3, 3, 6)
    assert found(chunk)["norm.bias"] == Place(56, 5, 5)  # behind 42 elements


def test_the_streams_are_those_of_the_numerics() -> None:
    assert slots.SENT == stream_id("gradients:sent") and slots.SUMMED == stream_id("gradients:sum")
