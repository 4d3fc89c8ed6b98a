"""What a recorded pass becomes: its steps, its memory, and why some passes cannot be repeated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_fp4.cpp.lowering import CannotLower, Outcome, lower, scratch_pointers
from megatron_fp4.cpp.recorder import Called, Recording, record_pass
from testing.kernels.compiling import VARIANTS, carry_launch, compiled_launch

WORDS = 3, 5, 7, 0
OUTSIDE = torch.randn(256)
SIZE = 256  # float32 in a part: 1,024 bytes


class Noted:
    """Stands for the extension and for a Program: notes what it is told."""

    def __init__(self) -> None:
        self.arenas: dict[int, int] = {}
        self.parts: dict[int, tuple[int, int]] = {}
        self.calls: list[str] = []
        self.zeroed: dict[int, int] = {}

    def Program(self, *given: Any) -> Noted:
        return self

    def arena(self, memory: int, size: int) -> None:
        self.arenas[memory] = size

    def part(self, memory: int, arena: int, offset: int) -> None:
        self.parts[memory] = arena, offset

    def zero(self, memory: int, size: int) -> None:
        self.zeroed[memory] = size

    def call(self, name: str, *given: Any) -> None:
        self.calls.append(name)

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *given: None


def recorded(function: Callable[[Tensor], Any]) -> tuple[Recording, Any]:
    x = torch.randn(SIZE)
    with record_pass([x]) as recording:
        found = function(x)
    return recording, found


def test_views_are_no_steps() -> None:
    recording, _ = recorded(lambda x: x.view(16, 16).t()[3].unsqueeze(0) + 1)
    assert [str(step.function) for step in recording.steps if isinstance(step, Called)] == [
        "aten.add.Tensor"
    ]


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: x.sum().item(), "depends on the values of a tensor"),
        (lambda x: x[x > 0], "size depends on values"),
        (lambda x: torch.rand_like(x), "draws torch's random numbers"),
        (lambda x: x + torch.ones(SIZE).add_(OUTSIDE), "reads memory that is neither"),
    ],
    ids=["item", "mask", "random", "unknown"],
)
def test_what_cannot_be_repeated_is_refused(function: Any, reason: str) -> None:
    recording, _ = recorded(function)
    assert recording.problem is not None and reason in recording.problem
    with pytest.raises(CannotLower, match=reason):
        lower(Noted(), recording, Outcome([], [], []), WORDS)


def test_integers_index_and_tables_are_read() -> None:
    recording, _ = recorded(lambda x: x[torch.arange(4)])
    assert recording.problem is None


def test_zeros_take_no_operator() -> None:
    """Memory is set to zero in each run, though it lies in an arena that other memory may share."""

    def function(x: Tensor) -> Tensor:
        total, y = x.new_zeros(SIZE), x.new_empty(SIZE)
        torch.add(x, total, out=y)
        return y

    recording, y = recorded(function)
    noted = Noted()
    lower(noted, recording, Outcome([y], [], []), WORDS)
    assert noted.calls == ["aten::add"]
    [(memory, size)] = noted.zeroed.items()
    assert size == 4 * SIZE and memory in noted.parts
    # Negative control: what is allocated without zeros is not set.
    recording, y = recorded(lambda x: torch.add(x, 1, out=x.new_empty(SIZE)))
    lower(plain := Noted(), recording, Outcome([y], [], []), WORDS)
    assert not plain.zeroed


def chain(x: Tensor) -> tuple[Tensor, Tensor]:
    """Y and a tally; the first and the third temporary are never in use together."""
    a, b, c = (x.new_empty(SIZE) for _ in range(3))
    tally, y = x.new_empty(SIZE), x.new_empty(SIZE)
    torch.add(x, 1, out=a)
    torch.mul(a, 2, out=b)
    torch.add(b, 3, out=c)
    torch.add(c, b, out=y)
    torch.add(c, 1, out=tally)
    return y, tally


def laid_out() -> tuple[Noted, list[int]]:
    """What the Program of `chain` is told, and the numbers of a, b, c, the tally and Y."""
    recording, (y, tally) = recorded(chain)
    noted = Noted()
    lower(noted, recording, Outcome([y], [], [], [tally[:2]]), WORDS)
    return noted, [1, 2, 3, 4, 5]


def test_temporaries_share_bytes_where_their_uses_do_not_overlap() -> None:
    noted, (a, b, c, tally, y) = laid_out()
    temporary, tallies = noted.parts[a][0], noted.parts[tally][0]
    assert noted.parts.keys() == {a, b, c, tally} and y not in noted.parts
    assert temporary != tallies and noted.arenas == {temporary: 2048, tallies: 1024}
    assert noted.parts[a] == noted.parts[c] != noted.parts[b]


def test_a_use_that_is_overlooked_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: of each memory the first use alone."""
    from megatron_fp4.cpp import lowering

    uses = lowering._Lowering._uses
    monkeypatch.setattr(
        lowering._Lowering,
        "_uses",
        lambda self: {i: (begin, begin) for i, (begin, _) in uses(self).items()},
    )
    noted, (a, b, *_) = laid_out()
    assert noted.parts[a] == noted.parts[b]


@pytest.mark.parametrize("name", ["stochastic", "nearest"])
def test_the_layout_of_arguments_is_read_from_the_kernel(name: str) -> None:
    start = VARIANTS[name]
    ptx = compiled_launch(start, 90)["ptx"]
    assert scratch_pointers(start.flat_types, ptx) in (0, 1, 2)
    # Controls: an argument more, one of another size, three pointers after them.
    types = list(start.flat_types)
    assert scratch_pointers([*types, torch.int32, torch.int32, torch.int32], ptx) is None
    assert scratch_pointers([types[-1], *types[1:]], ptx) is None
    assert scratch_pointers(types[:-3], ptx) is None


def test_an_argument_that_is_1_is_no_parameter() -> None:
    start = carry_launch((1, 1, 32, torch.float8_e4m3fn, False))
    assert 1 in start.flat_types
    assert scratch_pointers(start.flat_types, compiled_launch(start, 90)["ptx"]) in (0, 1, 2)
