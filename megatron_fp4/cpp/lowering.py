"""Makes a Program of a recorded pass, for the extension in C++ to run.

Memory that the pass allocates becomes a part of an arena, one allocation for each use: what is only
needed during the pass, what is saved for backward, what is held of W, and tallies. Parts of the
first whose uses do not overlap in time share their bytes. Y and the gradients have storage of their
own, because Megatron frees and resizes it.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from megatron_fp4.cpp.recorder import (
    Allocated,
    Called,
    Launched,
    MemoryOffset,
    Multiplied,
    Recording,
    Step,
    Waited,
    Zeroed,
)
from megatron_fp4.kernels import launch as launching
from megatron_fp4.kernels.launch import NUMBERS
from megatron_fp4.kernels.probe import probe
from megatron_fp4.recording import WORDS
from megatron_fp4.target import Target, kernels_problem

ALIGNMENT = 512  # of allocations, as torch's own: cuBLASLt chooses algorithms by it
_PARAMETER = re.compile(r"\.param \.(?:align \d+ )?\.?[bu](\d+)[^,\n]*_param_\d+")


class CannotLower(Exception):
    """A recorded pass cannot become a Program. str() is the reason, in a few words."""


@dataclass(frozen=True)
class Outcome:
    """The tensors that a pass returned, by their use; None is no tensor.

    own: Y, or the gradients, whose storage is their own. saved: for backward. held: of W. tallies:
    of quantized operands.
    """

    own: Sequence[Tensor | None]
    saved: Sequence[Tensor | None]
    held: Sequence[Tensor | None]
    tallies: Sequence[Tensor] = ()

    @property
    def all(self) -> list[Tensor | None]:
        return [*self.own, *self.saved, *self.held, *self.tallies]


@dataclass(frozen=True)
class Lowered:
    """A Program, and what keeps memory alive to which it has addresses."""

    program: Any
    owners: list[Any]


def lower(extension: Any, recording: Recording, outcome: Outcome, words: Sequence[int]) -> Lowered:
    """The Program of `recording`, whose results are those of `outcome` in the order of `all`.

    extension: the module in C++. words: those of the call that was recorded, in the order of
    `recording.WORDS`. Raises CannotLower.
    """
    if recording.problem is not None:
        raise CannotLower(recording.problem)
    try:
        lowering = _Lowering(extension, recording, outcome, words)
        return Lowered(lowering.program(), lowering.owners)
    except LookupError as error:
        raise CannotLower(str(error)) from None


class _Lowering:
    """Makes one Program; `lower` has the arguments. owners: see `Lowered`."""

    def __init__(
        self, extension: Any, recording: Recording, outcome: Outcome, words: Sequence[int]
    ) -> None:
        self._extension, self._recording, self._words = extension, recording, words
        self.owners: list[Any] = []
        first = recording.memories[0]
        assert first is not None and first.tensor is not None  # X or dY
        self._device = first.tensor.device
        self._results = [
            None if each is None else (recording.place(each.data_ptr()), each)
            for each in outcome.all
        ]
        self._arena_of = self._arenas(outcome)

    def program(self) -> Any:
        """The extension's Program: its memory, its steps, its results, then its inputs."""
        recording = self._recording
        launches = any(isinstance(step, Launched) for step in recording.steps)
        zeroes = any(isinstance(step, Zeroed) for step in recording.steps)
        program = self._extension.Program(
            self._device,
            driver_launch() if launches else 0,
            driver_fill() if zeroes and self._device.type == "cuda" else 0,
            recording.inputs,
            len(recording.memories) + len(_ARENAS),
        )
        for i, memory in enumerate(recording.memories):
            if memory is not None and memory.origin == "read":
                program.constant(i, memory.tensor)
        self._lay_out(program)
        self._add_steps(program)
        for result in self._results:
            if result is None:
                program.result(-1, 0, [], [], torch.uint8)
            else:
                place, tensor = result
                program.result(*place, tensor.shape, tensor.stride(), tensor.dtype)
        for i, given in enumerate(recording.memories[: recording.inputs]):
            alignment = self._alignment(i)
            if given is None or given.tensor is None:
                program.input(alignment, -1, [], [], torch.uint8)
            else:
                form = given.tensor.shape, given.tensor.stride(), given.tensor.dtype
                program.input(alignment, given.start % alignment, *form)
        return program

    def _alignment(self, memory: int) -> int:
        """The alignment of an input that matters, in bytes: a Program takes an input only if its
        address modulo this number is that of the recorded one.

        Triton compiles other kernels for addresses that are no multiples of 16, and cuBLASLt's
        algorithms are chosen for alignments of up to 256.
        """
        multiplied = any(
            isinstance(step, Multiplied)
            and memory in [step.places[name].memory for name in ("a", "b", "out")]
            for step in self._recording.steps
        )
        return 256 if multiplied else 16

    # --- memory ---

    def _arenas(self, outcome: Outcome) -> dict[int, str]:
        """The arena of each allocation; those of `outcome.own` have none."""
        uses = [
            *["own"] * len(outcome.own),
            *["saved"] * len(outcome.saved),
            *["held"] * len(outcome.held),
            *["tallies"] * len(outcome.tallies),
        ]
        found = {
            i: "temporary"
            for i, memory in enumerate(self._recording.memories)
            if memory is not None and memory.origin == "allocation"
        }
        for use, result in zip(uses, self._results, strict=True):
            if result is None:
                continue
            # Tallies outlive the pass by many: they must not keep what is saved beside them.
            now, is_tally = found.get(result[0].memory), use == "tallies"
            if now == "temporary" or (is_tally and now in ("saved", "held")):
                found[result[0].memory] = use
        return {i: use for i, use in found.items() if use != "own"}

    def _lay_out(self, program: Any) -> None:
        """Tells the Program which arenas there are, and which memories are parts of them.

        The arenas are numbered after the memories of the recording.
        """
        for number, name in enumerate(_ARENAS, len(self._recording.memories)):
            parts = [i for i, arena in self._arena_of.items() if arena == name]
            if not parts:
                continue
            places, size = self._placed(parts, shares=name == "temporary")
            program.arena(number, size)
            for i in parts:
                program.part(i, number, places[i])

    def _placed(self, parts: list[int], shares: bool) -> tuple[dict[int, int], int]:
        """(offset of each part, bytes of the arena). shares: whether parts that are not used at the
        same time may have the same bytes."""
        uses, offsets, size = self._uses(), dict[int, int](), 0
        uses |= {i: (0, 0) for i in parts if i not in uses}  # never used
        sizes = {i: _rounded(self._recording.memories[i].size) for i in parts}  # type: ignore[union-attr]
        for i in sorted(parts, key=lambda part: -sizes[part]):
            begin, end = uses[i]
            taken = sorted(
                (offsets[j], offsets[j] + sizes[j])
                for j in offsets
                if not shares or (uses[j][0] <= end and begin <= uses[j][1])
            )
            at = 0
            for start, stop in taken:
                if at + sizes[i] <= start:
                    break
                at = max(at, stop)
            offsets[i], size = at, max(size, at + sizes[i])
        return offsets, size

    def _uses(self) -> dict[int, tuple[int, int]]:
        """The first and the last step that uses each memory, as indices of steps. A collective uses
        its memory until the step that waits for it."""
        uses: dict[int, tuple[int, int]] = {}
        works: dict[int, list[int]] = {}
        for at, step in enumerate(self._recording.steps):
            used = _used(step)
            if isinstance(step, Called):
                works |= {i: used for i in step.results if i is not None and self._is_work(i)}
            if isinstance(step, Waited):
                used = [*used, *works[step.memory]]
            for i in used:
                uses[i] = uses.get(i, (at, at))[0], at
        return uses

    def _last_uses(self) -> dict[int, int]:
        """The last step that uses each memory that can be released before the pass ends."""
        kept = {result[0].memory for result in self._results if result is not None}
        return {
            i: end
            for i, (_, end) in self._uses().items()
            if i >= self._recording.inputs and i not in kept and i not in self._arena_of
        }

    def _is_work(self, memory: int) -> bool:
        found = self._recording.memories[memory]
        return found is not None and found.tensor is None

    # --- steps ---

    def _add_steps(self, program: Any) -> None:
        last = self._last_uses()
        for at, step in enumerate(self._recording.steps):
            if isinstance(step, Allocated) and step.memory in self._arena_of:
                continue
            self._add(program, step)
            program.releases([i for i, end in last.items() if end == at])

    def _add(self, program: Any, step: Step) -> None:
        match step:
            case Allocated(memory):
                found = self._recording.memories[memory]
                assert found is not None and found.tensor is not None
                program.allocate(memory, found.tensor.shape, found.tensor.dtype)
            case Launched():
                self._launch(program, step)
            case Multiplied(product, places):
                owner, numbers = product.descriptors()
                self.owners.append(owner)
                program.product(numbers | places)
            case Called(function, args, kwargs, _, results):
                name, overload = function._schema.name, function._schema.overload_name
                program.call(
                    name, overload, args, kwargs, self._place_of,
                    [-1 if each is None else each for each in results],
                )  # fmt: skip
            case Waited(memory):
                program.wait(memory)
            case Zeroed(memory):
                found = self._recording.memories[memory]
                assert found is not None
                program.zero(memory, found.size)

    def _launch(self, program: Any, step: Launched) -> None:
        launch = step.launch
        kernel = compiled(launch, self._device, step.is_aligned)
        cells, addresses, words = list[int](), list[tuple[int, int, int]](), list[tuple[int, int]]()
        for kind, argument in zip(launch.flat_types, step.arguments, strict=True):
            if isinstance(kind, int) and kind == 1:
                continue  # Triton makes a constant of it
            if isinstance(argument, MemoryOffset):
                addresses.append((len(cells), *argument))
            elif kind in WORDS and self._is_word(WORDS.index(kind), argument):
                words.append((len(cells), WORDS.index(kind)))
            cells.append(argument if isinstance(argument, int) else 0)
        cells += [0] * kernel.scratch
        program.launch(
            kernel.function, launch.grid, kernel.threads, kernel.shared, cells, addresses, words
        )

    def _is_word(self, word: int, argument: int) -> bool:
        """Whether an argument is that word of the call. A kernel that draws nothing gets 0."""
        if argument not in (0, self._words[word]):
            raise CannotLower(f"a kernel's {WORDS[word]} is not that of the call")
        return argument == self._words[word]

    def _place_of(self, tensor: Tensor) -> MemoryOffset:
        return self._recording.place(tensor.data_ptr())


_ARENAS = "temporary", "saved", "held", "tallies"


def _rounded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _used(step: Step) -> list[int]:
    """The memory that a step reads or writes."""
    match step:
        case Launched():
            return [each.memory for each in step.arguments if isinstance(each, MemoryOffset)]
        case Multiplied():
            return [each.memory for each in step.places.values()]
        case Called():
            made = [each for each in step.results if each is not None]
            return [*(each.memory for each in step.places), *made]
        case Waited() | Zeroed():
            return [step.memory]
        case Allocated():
            return []  # its use begins with what is written there


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel: the driver's handle, threads of a block, bytes of shared memory, and how
    many pointers to scratch memory follow its parameters."""

    function: int
    threads: int
    shared: int
    scratch: int


def compiled(launch: Any, device: torch.device, aligned: bool) -> Kernel:
    """The kernel of a `Launch`, compiled for `device`, as C++ can launch it.

    launch: a `kernels.launch.Launch`. aligned: whether all addresses among its arguments are
    multiples of 16. Triton compiles another kernel for these. Raises CannotLower if Triton laid out
    the kernel's parameters in a way that is not known here.
    """
    made = launch.compiled(device.index, aligned)
    scratch = scratch_pointers(launch.flat_types, made.asm["ptx"])
    if scratch is None:
        raise CannotLower(
            f"Triton {launching.triton.__version__} lays out the arguments of kernels in a way "
            "that is not known here: install a version that README.md lists"
        )
    metadata = made.metadata
    return Kernel(made.function, 32 * metadata.num_warps, metadata.shared, scratch)


@cache
def layout_problem(target: Target) -> str | None:
    """Why kernels that Triton compiles for `target` cannot be launched from C++, as far as a small
    one shows; None if they can, or if no kernel runs there.

    Each kernel is looked at by itself too, when it is recorded.
    """
    if target.device is None or kernels_problem(target) is not None:
        return None
    try:
        compiled(probe(), target.device, aligned=True)
    except (CannotLower, LookupError) as error:
        return str(error)
    return None


def scratch_pointers(types: Sequence[Any], ptx: str) -> int | None:
    """How many pointers follow a kernel's own parameters in its PTX; None if these are others than
    its argument types ask for, or more than two follow.

    types: of the arguments (`Launch.flat_types`).
    """
    expected = [
        64 if isinstance(kind, torch.dtype) else 32 if kind in NUMBERS or kind < 2**31 else 64
        for kind in types
        if kind != 1
    ]
    found = [int(bits) for bits in _PARAMETER.findall(ptx)]
    rest = found[len(expected) :]
    if found[: len(expected)] != expected or len(rest) > 2 or set(rest) - {64}:
        return None
    return len(rest)


def driver_launch() -> int:
    """The address of the CUDA driver's cuLaunchKernel."""
    return _driver("cuLaunchKernel")


def driver_fill() -> int:
    """The address of the CUDA driver's cuMemsetD8Async."""
    return _driver("cuMemsetD8Async")


def _driver(name: str) -> int:
    return ctypes.cast(getattr(ctypes.CDLL("libcuda.so.1"), name), ctypes.c_void_p).value or 0
