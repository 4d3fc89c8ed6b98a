"""Microbatches served again: whatever a loop draws, it then goes on as if it had not."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import rerun_state_machine
from megatron.core.rerun_state_machine import RerunDataIterator, RerunMode
from torch.utils.data import DataLoader

from megatron_fp4.mcore.loop.rewinding import RewindingIterator, rewinding_iterators


def batches(number: int = 40) -> Iterator[dict[str, Any]]:
    for n in range(number):
        yield {"tokens": torch.arange(4) + 4 * n, "number": n}


def numbers(iterator: Iterator[Any], count: int) -> list[int]:
    return [next(iterator)["number"] for _ in range(count)]


def test_it_serves_again_what_was_drawn() -> None:
    rewinding = RewindingIterator(batches())
    assert numbers(rewinding, 3) == [0, 1, 2]
    rewinding.start()
    assert numbers(rewinding, 5) == [3, 4, 5, 6, 7]
    rewinding.rewind()
    assert [batch["number"] for batch in rewinding] == list(range(3, 40))


def test_it_records_again_before_everything_was_served() -> None:
    rewinding = RewindingIterator(batches())
    for first in (0, 2, 4):
        rewinding.start()
        assert numbers(rewinding, 6) == list(range(first, first + 6))
        rewinding.rewind()
        assert numbers(rewinding, 2) == [first, first + 1]
    rewinding.start()
    rewinding.rewind()  # nothing was drawn
    rewinding.rewind()  # and nothing was recorded
    assert [batch["number"] for batch in rewinding] == list(range(6, 40))


def test_a_source_that_ends_can_be_rewound() -> None:
    rewinding = RewindingIterator(batches(3))
    rewinding.start()
    with pytest.raises(StopIteration):
        numbers(rewinding, 4)
    rewinding.rewind()
    assert [batch["number"] for batch in rewinding] == [0, 1, 2]


def consumed(iterator: Iterator[Any], count: int) -> list[torch.Tensor]:
    """What a script finds that takes entries out of the microbatches."""
    return [next(iterator).pop("tokens", torch.zeros(0)) for _ in range(count)]


def test_a_script_may_take_entries_out_of_a_microbatch() -> None:
    rewinding = RewindingIterator(batches())
    rewinding.start()
    first = consumed(rewinding, 4)
    rewinding.rewind()
    assert all(map(torch.equal, first, consumed(rewinding, 4)))
    one, other = itertools.tee(batches())  # the control: the same objects, served twice
    assert [len(tokens) for tokens in consumed(one, 2)] == [4, 4]
    assert [len(tokens) for tokens in consumed(other, 2)] == [0, 0]


@pytest.mark.parametrize("workers", [0, 2])
def test_it_replays_a_loader_that_prefetches(workers: int) -> None:
    def loader() -> Iterator[torch.Tensor]:
        data = torch.arange(240).view(60, 4)
        return iter(DataLoader(data, batch_size=2, num_workers=workers))  # type: ignore[arg-type]

    rewinding, undisturbed = RewindingIterator(loader()), list(loader())
    found = [next(rewinding) for _ in range(3)]
    rewinding.start()
    for _ in range(11):
        next(rewinding)
    rewinding.rewind()
    found += list(rewinding)
    assert len(found) == len(undisturbed) == 30
    assert all(map(torch.equal, found, undisturbed))


# --- below Megatron's iterators -------------------------------------------------------------------


@pytest.fixture(params=[RerunMode.DISABLED, RerunMode.VALIDATE_RESULTS], ids=str)
def mode(request: Any, monkeypatch: pytest.MonkeyPatch) -> RerunMode:
    machine = SimpleNamespace(get_mode=lambda: request.param)
    monkeypatch.setattr(rerun_state_machine, "get_rerun_state_machine", lambda: machine)
    return request.param  # type: ignore[no-any-return]


def step(iterator: RerunDataIterator, microbatches: int, reruns: int) -> list[int]:
    """The microbatches of a step, as Megatron's rerun state machine has it drawn."""
    iterator.advance()
    drawn = [next(iterator)["number"] for _ in range(microbatches)]
    for _ in range(reruns):
        iterator.rewind()
        assert [next(iterator)["number"] for _ in range(microbatches)] == drawn
    return drawn


def test_megatron_s_own_replay_works_as_before(mode: RerunMode) -> None:
    reruns = 0 if mode is RerunMode.DISABLED else 2
    iterator, undisturbed = RerunDataIterator(batches()), RerunDataIterator(batches())
    trained, wanted = [], []
    for n in range(8):
        microbatches = 2 if n < 5 else 3  # a growing batch
        if n in (2, 4):
            for rewinding in rewinding_iterators(iterator):
                rewinding.start()
            drawn = [step(iterator, microbatches, reruns * (k == 1)) for k in range(3)]
            assert sum(drawn, []) == list(range(2 * n, 2 * n + 6))
            for rewinding in rewinding_iterators(iterator):
                rewinding.rewind()
        trained.append(step(iterator, microbatches, reruns * (n == 4)))
        wanted.append(step(undisturbed, microbatches, 0))
        # What a checkpoint has of the iterator: the microbatches of this step.
        kept = [batch["number"] for batch in iterator.state_dict()["saved_microbatches"]]
        assert kept == ([] if mode is RerunMode.DISABLED else trained[-1])
    assert trained == wanted


def test_each_model_chunk_has_a_recording_and_a_rank_without_data_none() -> None:
    assert rewinding_iterators(None) == [] == rewinding_iterators([None, None])
    chunks = [RerunDataIterator(batches()), None, RerunDataIterator(batches())]
    found = rewinding_iterators(chunks)
    assert len(found) == 2 and found[0] is not found[1]
    again = rewinding_iterators(chunks)
    assert all(one is other for one, other in zip(found, again, strict=True))
    assert isinstance(rewinding_iterators(RerunDataIterator(batches()))[0], RewindingIterator)
