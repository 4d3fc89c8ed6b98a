"""Which compiled kernel a launch takes, without a GPU, by kernels that only say what was asked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from megatron_fp4.arithmetic.quantizer import get_quantizer
from megatron_fp4.kernels.carrier import carry_kernel, tally_for
from megatron_fp4.kernels.launch import Launch
from megatron_fp4.kernels.quantize import _quantize_launch, quantize_kernel, transform_kernel
from megatron_fp4.kernels.rows import cast_kernel, largest_kernel, transpose_kernel

KERNELS = [
    quantize_kernel,
    transform_kernel,
    carry_kernel,
    cast_kernel,
    largest_kernel,
    transpose_kernel,
]


class Kernel:
    """Stands for a Triton kernel: "compiles" one for each call that Triton would look at."""

    def __init__(self, like: Any) -> None:
        self.params, self.arg_names = like.params, like.arg_names
        self.fp_fusion = like.fp_fusion
        self.compiled = 0
        self.started: list[tuple[Any, ...]] = []
        self.seen: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def compile_and_start(*arguments: Any, **constants: Any) -> Any:
            self.compiled += 1
            self.seen.append(arguments)
            return Compiled(self, self.compiled)

        return compile_and_start


class Compiled:
    def __init__(self, kernel: Kernel, number: int) -> None:
        self.kernel, self.number = kernel, number

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        assert len(grid) == 3

        def start(*arguments: Any, stream: int) -> None:
            assert stream == 7
            self.kernel.started.append((self.number, *arguments))

        return start


@pytest.fixture(autouse=True)
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The current one is the number that it holds."""
    current = [0]
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[0], raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    return current


def arguments(kernel: Kernel, size: int, noise: int, tensor: Tensor) -> list[Any]:
    """Of a call: tensors, sizes, and numbers that a kernel is not compiled anew for."""
    plain = [p for p in kernel.params if not p.is_constexpr]
    numbers = {p.name: noise if p.do_not_specialize else size for p in plain}
    return [tensor if p.name.endswith("_ptr") else numbers[p.name] for p in plain]


@pytest.mark.parametrize("like", KERNELS, ids=lambda kernel: kernel.fn.__name__)
def test_one_is_compiled_for_all_calls_of_a_launch(like: Any, one_gpu: list[int]) -> None:
    kernel, tensor = Kernel(like), torch.zeros(64, dtype=torch.uint8)
    names = [p.name for p in kernel.params if p.is_constexpr]
    constants = {name: 1 for name in reversed(names)}
    start = Launch(kernel, (2, 3), constants, num_warps=1)
    for noise in (3, 16, -1):
        start(arguments(kernel, 64, noise, tensor))
        assert kernel.compiled == 1
    # It gets what this call was given, constants as its parameters have them.
    number, *given = kernel.started[-1]
    plain = [
        argument.data_ptr() if isinstance(argument, Tensor) else argument
        for argument in arguments(kernel, 64, -1, tensor)
    ]
    assert number == 1 and given == [*plain, *[1] * len(names)]
    for count in (2, 3):  # not aligned: Triton is asked each time
        start(arguments(kernel, 64, 3, tensor[1:]))
        assert kernel.compiled == count
    one_gpu[0] = 1  # another GPU has its own
    for _ in range(2):
        start(arguments(kernel, 64, 3, tensor))
    assert kernel.compiled == 4 and kernel.started[-1][0] == 4
    one_gpu[0] = 0
    start(arguments(kernel, 64, 3, tensor))
    assert kernel.compiled == 4 and kernel.started[-1][0] == 1


@pytest.mark.parametrize("like", KERNELS, ids=lambda kernel: kernel.fn.__name__)
def test_constants_come_last(like: Any) -> None:
    assert Launch(like, (1,), {p.name: 1 for p in like.params if p.is_constexpr})
    other = Kernel(like)
    other.arg_names = list(reversed(like.arg_names))
    with pytest.raises(AssertionError):
        Launch(other, (1,), {p.name: 1 for p in like.params if p.is_constexpr})


def test_a_pointer_is_seen_as_words() -> None:
    """By Triton, which compiles for dtypes; what is compiled takes addresses."""
    kernel, tensor = Kernel(transpose_kernel), torch.zeros(64, dtype=torch.uint8)
    constants = dict(TILE_ROWS=64, TILE_BYTES=64)
    start = Launch(kernel, (1,), constants, {"out_ptr": torch.int32}, num_warps=1)
    for _ in range(2):
        start([tensor, tensor, 64, 64])
    [seen] = kernel.seen
    assert [t.dtype for t in seen[:2]] == [torch.uint8, torch.int32]
    assert kernel.started == [(1, tensor.data_ptr(), tensor.data_ptr(), 64, 64, 64, 64)]


def test_what_is_specialized_makes_another_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes, directions, rounding and carriers have a launch each, and graphs their own; noise and
    places have none."""
    made = [
        _quantize_launch(rows, 64, get_quantizer(name), packed, along, across, in_memory, False)
        for rows in (64, 96)
        for name in ("mxfp4", "mxfp4-sr", "mxfp4-ceil")
        for packed in (False, True)
        for in_memory in (False, True)
        for along, across in (
            (True, False), (False, True), (torch.float8_e5m2, True), (torch.float8_e4m3fn, True),
        )
    ]  # fmt: skip
    assert len(set(map(id, made))) == len(made) == 96
    assert made[0] is _quantize_launch(
        64, 64, get_quantizer("mxfp4"), False, True, False, False, False
    )


def test_tallies_are_aligned() -> None:
    beside = torch.zeros(1)
    tallies = [tally_for(beside) for _ in range(1030)]
    assert {tally.data_ptr() % 16 for tally in tallies} == {0}
    assert len({tally.data_ptr() for tally in tallies}) == 1030
    assert not any(tally.any() for tally in tallies)


def test_kernels_are_interpreted_where_that_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    kernel, tensor = Kernel(transpose_kernel), torch.zeros(64, dtype=torch.uint8)
    start = Launch(kernel, (1,), dict(TILE_ROWS=64, TILE_BYTES=64), num_warps=1)
    for _ in range(2):
        start(arguments(kernel, 64, 3, tensor))
    assert kernel.compiled == 2 and not kernel.started
