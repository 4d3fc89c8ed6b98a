"""When pieces of gradients are encoded, sent, summed and decoded, and what waits for what.

On a CPU all work has ended when its call returns, so that a wait that is missing changes no sum.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed as dist

from megatron_fp4.arithmetic.messages import FORMS, RankRounding
from megatron_fp4.arithmetic.philox import Key
from megatron_fp4.arithmetic.segments import Place, Segment
from megatron_fp4.mcore.exchange import kernel_coding, slots
from megatron_fp4.mcore.exchange.pieces import Piece


class Log:
    """Stands in for streams, collectives and coding: writes down what is called on which stream."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.now = SimpleNamespace(name="main")
        self.now.wait_stream = lambda other: self.lines.append(f"main waits for {other.name}")

    def stream(self, device: object = None) -> Any:
        own = SimpleNamespace(name="own")
        own.wait_stream = lambda other: self.lines.append(f"own waits for {other.name}")
        return own

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        before, self.now = self.now, stream
        yield
        self.now = before

    def add(self, what: str) -> None:
        self.lines.append(f"{what} on {self.now.name}")

    def encode(self, piece: Any, sent: torch.Tensor, rounding: object) -> None:
        self.add(f"encode {piece.name}")
        self.sending = piece.name

    def sum(self, piece: Any, received: torch.Tensor) -> None:
        self.add(f"sum {piece.name}")

    def encode_sums(self, piece: Any, received: torch.Tensor, rounding: object) -> None:
        self.add(f"encode sums {piece.name}")
        self.sending = f"sums {piece.name}"

    def decode(self, piece: Any, sums: torch.Tensor) -> None:
        self.add(f"decode {piece.name}")

    def collective(self, *given: object, **named: object) -> Any:
        name = self.sending
        self.add(f"send {name}")
        return SimpleNamespace(wait=lambda: self.add(f"wait {name}"))


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    log = Log()
    monkeypatch.setattr(torch.cuda, "Stream", log.stream)
    monkeypatch.setattr(torch.cuda, "stream", log.on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: log.now)
    monkeypatch.setattr(dist, "all_to_all_single", log.collective)
    monkeypatch.setattr(dist, "all_gather_into_tensor", log.collective)
    monkeypatch.setattr(slots, "coding_on", lambda device: log)
    return log


def exchanged(log: Log, count: int, to_all: bool) -> list[str]:
    """What happens as `count` pieces are sent and waited for."""
    pieces: list[Any] = [
        SimpleNamespace(name=i, lengths=[4, 4], own=0, group=None, to_all=to_all, room=8)
        for i in range(count)
    ]
    pending = slots.Slots(8, torch.device("cpu")).send(pieces, Key(1))
    log.lines.append("all are sent")
    pending.wait()
    return log.lines


def test_a_piece_is_summed_after_the_next_was_sent_and_before_its_slot_is_taken(log: Log) -> None:
    assert exchanged(log, 3, to_all=False) == [
        "own waits for main",
        "encode 0 on own",
        "send 0 on own",
        "own waits for main",
        "encode 1 on own",
        "send 1 on own",
        "wait 0 on own",
        "sum 0 on own",
        "own waits for main",
        "encode 2 on own",
        "send 2 on own",
        "wait 1 on own",
        "sum 1 on own",
        "all are sent",
        "wait 2 on own",
        "sum 2 on own",
        "main waits for own",
    ]


def test_sums_for_all_are_sent_and_decoded_before_a_slot_is_taken(log: Log) -> None:
    lines = exchanged(log, 3, to_all=True)
    assert lines[-1] == "main waits for own"
    for i in range(3):
        stages = [f"encode {i}", f"send {i}", f"wait {i}", f"encode sums {i}"]
        stages += [f"send sums {i}", f"wait sums {i}", f"decode {i}"]
        assert [line for line in lines if str(i) in line] == [f"{stage} on own" for stage in stages]
    assert lines.index("decode 0 on own") < lines.index("encode 2 on own")
    assert lines.index("send 1 on own") < lines.index("encode sums 0 on own")


def test_no_piece_outlives_its_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece has the gradients of the model, whose memory a second model may need."""
    monkeypatch.setattr(kernel_coding.kernels, "encode", lambda *_: None)
    group: Any = SimpleNamespace(rank=lambda: 0)
    shard = [Segment(0, 8, 0, Place(0, 8, 8))]
    piece = Piece(torch.zeros(8), [shard], group, False, FORMS["e4m3"])
    coding = kernel_coding.KernelCoding()
    coding.encode(piece, torch.empty(16, dtype=torch.uint8), RankRounding(Key(1), slots.SENT, 0))
    alive = weakref.ref(piece)
    del piece, coding
    gc.collect()
    assert alive() is None
