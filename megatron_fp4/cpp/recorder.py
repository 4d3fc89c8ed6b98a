"""Records what one pass of a linear runs, so that cpp/lowering.py can make a Program of it.

The pass runs as always, in Python. Its steps are the operators of PyTorch, which a dispatch mode
sees, and the launches, products and waits of which recording.py tells. Memory is known by its
address: all that is allocated during the recording is kept until its end, so that no address has
two meanings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_fp4.recording import recorded_by

aten = torch.ops.aten
_ALLOCATIONS = {
    aten.empty.memory_format,
    aten.new_empty.default,
    aten.empty_like.default,
    aten.new_empty_strided.default,
    aten.empty_strided.default,
}
_ZEROS = {aten.zeros.default, aten.new_zeros.default, aten.zeros_like.default}
_UNREPEATABLE = {
    torch.Tag.data_dependent_output: "depends on the values of a tensor",
    torch.Tag.dynamic_output_shape: "makes a tensor whose size depends on values",
    torch.Tag.nondeterministic_seeded: "draws torch's random numbers",
}


class MemoryOffset(NamedTuple):
    """Bytes of a piece of memory, by the number of this piece and the offset of the first byte."""

    memory: int
    offset: int


@dataclass(frozen=True)
class Memory:
    """A piece of memory: `size` bytes from the address `start`.

    tensor: what keeps it alive; None for the Work of a collective, which has no bytes. origin:
    where it comes from: an "input" of the pass, what was "read" beside them, an "allocation" during
    the pass, or the "result" of an operator.
    """

    start: int
    size: int
    tensor: Tensor | None
    origin: str


@dataclass(frozen=True)
class Launched:
    """A launch of a kernel. arguments: in the order of its types; an address is a MemoryOffset or
    None."""

    launch: Any
    arguments: tuple[Any, ...]
    is_aligned: bool


@dataclass(frozen=True)
class Multiplied:
    """A product by cuBLASLt. places: of a, b, their scales, the result and the workspace."""

    product: Any
    places: dict[str, MemoryOffset]


@dataclass(frozen=True)
class Called:
    """An operator of PyTorch. places: of the tensors among its arguments. results: the memory of
    each result, or None for memory that was known before."""

    function: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    places: tuple[MemoryOffset, ...]
    results: tuple[int | None, ...]


@dataclass(frozen=True)
class Waited:
    """A wait for a collective. memory: its Work."""

    memory: int


@dataclass(frozen=True)
class Allocated:
    """An allocation."""

    memory: int


@dataclass(frozen=True)
class Zeroed:
    """All bytes of memory that was just allocated become 0."""

    memory: int


Step = Launched | Multiplied | Called | Waited | Allocated | Zeroed


@dataclass
class Recording:
    """What a pass ran.

    inputs: how many of the memories, the first ones, are inputs; None among them is no tensor.
    problem: why it cannot be repeated by a Program, in a few words; None if it can.
    """

    memories: list[Memory | None] = field(default_factory=list)
    inputs: int = 0
    steps: list[Step] = field(default_factory=list)
    problem: str | None = None

    def place(self, address: int) -> MemoryOffset:
        """The place of an address. Raises LookupError if its memory is not known."""
        for number, memory in enumerate(self.memories):
            if memory is not None and memory.start <= address < memory.start + memory.size:
                return MemoryOffset(number, address - memory.start)
        raise LookupError("it reads memory that is neither its input nor its own")

    def add(self, tensor: Tensor, origin: str) -> int:
        """Notes the memory of a tensor; returns its number."""
        size = _bytes_spanned(tensor)
        self.memories.append(Memory(tensor.data_ptr(), size, tensor, origin))
        return len(self.memories) - 1


class PassRecorder(TorchDispatchMode):
    """A mode of torch that writes down what one pass of a linear does, for `record_pass`.

    As a dispatch mode it sees the operators of PyTorch. As a `recording.Recorder` it is told of
    what this package launches itself: kernels, cuBLASLt's products and collectives.
    """

    def __init__(self, inputs: Sequence[Tensor | None]) -> None:
        super().__init__()
        self.recording = Recording(inputs=len(inputs))
        for each in inputs:
            if each is None:
                self.recording.memories.append(None)
            else:
                self.recording.add(each, "input")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._noting(lambda: self._called(func, args, kwargs or {}, result))
        return result

    def _called(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        for tag, reason in _UNREPEATABLE.items():
            if tag in func.tags and not _indexes_by_numbers(func, args):
                self.refuse(f"{func} {reason}")
        results = result if isinstance(result, tuple | list) else (result,)
        collects = any(isinstance(each, torch.ScriptObject) for each in results)
        if not func._schema.is_mutable and not collects and not _tensors(results):
            return  # a question about a tensor, such as its device
        if func in _ALLOCATIONS or func in _ZEROS:
            memory = self.recording.add(result, "allocation")
            self.recording.steps.append(Allocated(memory))
            if func in _ZEROS:
                self.recording.steps.append(Zeroed(memory))
            return
        places = tuple(self._place(each) for each in _tensors((args, kwargs)))
        numbers = tuple(self._number(each) for each in results)
        makes_views = not func._schema.is_mutable and bool(_tensors(results))
        if makes_views and all(number is None for number in numbers):
            return  # what reads the views finds their memory by its address
        self.recording.steps.append(Called(func, args, kwargs, places, numbers))

    def _number(self, result: Any) -> int | None:
        """The number of the memory that an operator made as a result; None if it made none."""
        if isinstance(result, torch.ScriptObject):  # the Work of a collective
            self.recording.memories.append(Memory(0, 0, None, "result"))
            return len(self.recording.memories) - 1
        if not isinstance(result, Tensor):
            return None  # a collective returns lists of the tensors that it was given
        try:
            self._place(result)
        except LookupError:
            return self.recording.add(result, "result")
        return None

    def _place(self, tensor: Tensor) -> MemoryOffset:
        return self.recording.place(tensor.data_ptr())

    def _noting(self, note: Callable[[], None]) -> None:
        try:
            if self.recording.problem is None:
                note()
        except LookupError as error:
            self.refuse(str(error))

    # --- recording.Recorder ---

    def launched(self, launch: Any, arguments: Sequence[Any]) -> None:
        def note() -> None:
            aligned, given = True, list[Any]()
            for argument, kind in zip(arguments, launch.flat_types, strict=True):
                address = argument.data_ptr() if isinstance(argument, Tensor) else argument
                if isinstance(kind, torch.dtype) and address is not None:
                    aligned &= address % 16 == 0
                    given.append(self.recording.place(address))
                else:
                    given.append(address)
            self.recording.steps.append(Launched(launch, tuple(given), aligned))

        self._noting(note)

    def multiplied(self, product: Any) -> None:
        def note() -> None:
            places = {
                name: self.recording.place(address) for name, address in product.addresses.items()
            }
            self.recording.steps.append(Multiplied(product, places))

        self._noting(note)

    def started(self) -> int:
        return len(self.recording.memories) - 1  # the Work was its last result

    def waited(self, collective: int) -> None:
        self._noting(lambda: self.recording.steps.append(Waited(collective)))

    def read(self, tensor: Tensor) -> None:
        self.recording.add(tensor, "read")

    def refuse(self, reason: str) -> None:
        if self.recording.problem is None:
            self.recording.problem = reason


@contextmanager
def record_pass(
    inputs: Sequence[Tensor | None], reads: Sequence[Tensor] = ()
) -> Iterator[Recording]:
    """Records the pass that runs in this context.

    inputs: the tensors that a call of the Program will be given, contiguous. reads: tensors beside
    them that stay what they are, such as an average of W.
    """
    recorder = PassRecorder([None if each is None else each.detach() for each in inputs])
    for each in reads:
        recorder.read(each)
    with recorded_by(recorder), recorder:
        yield recorder.recording


def is_shared(inputs: Sequence[Tensor | None]) -> bool:
    """Whether the first of these tensors has memory in common with another one.

    The first is X or dY. A Program tells its inputs apart by their addresses in the recording, so
    it would take one of two that overlap for the other. In later calls X and dY lie elsewhere,
    where they need not overlap. The other inputs share memory in each call or in none.
    """
    first, *others = (
        (each.data_ptr(), each.data_ptr() + _bytes_spanned(each))
        for each in inputs
        if each is not None
    )
    return any(begin < first[1] and first[0] < end for begin, end in others)


def _tensors(values: Any) -> list[Tensor]:
    """All tensors in nested tuples, lists and dicts."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, Mapping):
        values = values.values()
    elif not isinstance(values, tuple | list):
        return []
    return [tensor for each in values for tensor in _tensors(each)]


def _indexes_by_numbers(func: Any, args: Sequence[Any]) -> bool:
    """Whether this is x[i] with integer tensors, whose result has a known size."""
    if func is not aten.index.Tensor:
        return False
    return all(each is None or each.dtype in (torch.int32, torch.int64) for each in args[1])


def _bytes_spanned(tensor: Tensor) -> int:
    """The bytes from the first to the last element of a tensor."""
    if not tensor.numel():
        return 0
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()
