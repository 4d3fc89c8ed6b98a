"""Objects of classes that are not known survive reading and writing."""

from __future__ import annotations

import argparse
import collections
import datetime
import enum
import io
import pathlib
import signal
from typing import Any

import pytest
import torch

from megatron_fp4.convert import pickles


class Numbers(list[int]):
    extra = 0


class Names(dict[str, int]):
    pass


class Colour(enum.Enum):
    RED = "red"


class Point(collections.namedtuple("Point", "x y")):
    pass


class Plain:
    def __init__(self) -> None:
        self.values = [Colour.RED, {"a": (1, None)}]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plain) and vars(self) == vars(other)


def numbers() -> Numbers:
    made = Numbers([1, 2])
    made.extra = 7
    return made


OBJECTS = {
    "list": numbers(),
    "dict": Names(a=1, b=2),
    "enum": Colour.RED,
    "named tuple": Point(1, 2.5),
    "plain": Plain(),
    "nested": argparse.Namespace(signal=signal.SIGTERM, of=[Plain(), {1: Colour.RED}]),
    "date": datetime.datetime(2026, 1, 2, 3),
    "path": pathlib.PurePosixPath("/a/b"),
    "default": collections.defaultdict(list, a=[1]),
    "counter": collections.Counter("aab"),
    "known": [{1, 2}, slice(1, 2), torch.bfloat16, torch.Size([2])],
}


@pytest.mark.parametrize("name", OBJECTS)
def test_what_is_written_again_is_the_same(name: str) -> None:
    value = OBJECTS[name]
    stream = io.BytesIO()
    torch.save(value, stream)
    read = pickles.load_saved(io.BytesIO(stream.getvalue()))
    if name not in ("known", "nested"):
        assert isinstance(read, pickles.Unknown)
    again = load(pickles.save(read))
    assert type(again) is type(value) and again == value
    assert getattr(again, "extra", None) == getattr(value, "extra", None)


def load(data: bytes) -> Any:
    """As torch and Python read it, with the classes of this file."""
    return torch.load(io.BytesIO(data), weights_only=False)


def test_tensors_share_what_they_shared() -> None:
    x = torch.arange(6.0)
    stream = io.BytesIO()
    torch.save({"x": x, "view": x[2:4], "colour": Colour.RED}, stream)
    again = load(pickles.save(pickles.load_saved(io.BytesIO(stream.getvalue()))))
    assert torch.equal(again["x"], x) and again["colour"] is Colour.RED
    again["x"][2] = 9
    assert again["view"][0] == 9


def test_pythons_own_pickler_cannot_write_them() -> None:
    """The control: it imports the class that an object says it is of."""
    stream = io.BytesIO()
    torch.save(Colour.RED, stream)
    read = pickles.load_saved(io.BytesIO(stream.getvalue()))
    with pytest.raises((AttributeError, TypeError, torch.serialization.pickle.PicklingError)):  # type: ignore[attr-defined]
        torch.save(read, io.BytesIO())
