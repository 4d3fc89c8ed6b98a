"""Which compiled kernel a launch takes, without a GPU, by kernels that only say what was asked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from megatron_fp4.kernels import launch
from megatron_fp4.kernels.carrier import _Tallies, carry_kernel
from megatron_fp4.kernels.quantize import quantize_kernel, transform_kernel
from megatron_fp4.kernels.rows import cast_kernel, largest_kernel, turn_kernel

KERNELS = [
    quantize_kernel,
    transform_kernel,
    carry_kernel,
    cast_kernel,
    largest_kernel,
    turn_kernel,
]


class Kernel:
    """Stands for a Triton kernel: "compiles" one for each call that Triton would look at."""

    def __init__(self, like: Any) -> None:
        self.params = like.params
        self.compiled = 0
        self.started: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def compile_and_start(*arguments: Any, **constants: Any) -> Any:
            self.compiled += 1
            return Compiled(self, self.compiled)

        return compile_and_start


class Compiled:
    def __init__(self, kernel: Kernel, number: int) -> None:
        self.kernel, self.number = kernel, number

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        assert len(grid) == 3
        return lambda *arguments: self.kernel.started.append((self.number, *arguments))


@pytest.fixture(autouse=True)
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    yield
    launch._found.clear()
    launch._specialized.cache_clear()


def arguments(kernel: Kernel, size: int, noise: int, tensor: Tensor) -> list[Tensor | int]:
    """Of a call: tensors, sizes, and numbers that a kernel is not compiled anew for."""
    plain = [p for p in kernel.params if not p.is_constexpr]
    numbers = {p.name: noise if p.do_not_specialize else size for p in plain}
    return [tensor if p.name.endswith("_ptr") else numbers[p.name] for p in plain]


@pytest.mark.parametrize("like", KERNELS, ids=lambda kernel: kernel.fn.__name__)
def test_one_is_compiled_for_all_calls_that_it_fits(like: Any) -> None:
    kernel, tensor = Kernel(like), torch.zeros(64, dtype=torch.uint8)
    names = [p.name for p in kernel.params if p.is_constexpr]

    def start(size: int = 64, noise: int = 3, tensor: Tensor = tensor, constant: int = 1) -> int:
        constants = {name: constant for name in reversed(names)}
        given = arguments(kernel, size, noise, tensor)
        launch.launch(kernel, (2, 3), given, constants, num_warps=1)
        return kernel.compiled

    assert start() == 1 and start(noise=16) == 1 and start(noise=-1) == 1
    # It gets what this call was given, constants as its parameters have them.
    number, *given = kernel.started[-1]
    assert number == 1 and given[: -len(names)] == arguments(kernel, 64, -1, tensor)
    assert given[-len(names) :] == [1] * len(names)
    assert start(size=96) == 1 and kernel.started[-1][:-1] != (number, *given)[:-1]  # its sizes
    # What Triton compiles anew for: other divisors, a size of 1, constants.
    assert start(size=72) == 2 and start(size=40) == 2 and start(size=1) == 3
    assert start(constant=0) == 4
    assert start() == 4 and kernel.started[-1][0] == 1
    assert start(tensor=tensor[1:]) == 5  # not aligned: Triton is asked each time
    assert start(tensor=tensor[1:]) == 6


def test_tallies_are_aligned() -> None:
    tallies = _Tallies(torch.device("cpu"), 0)
    assert {tallies.next().data_ptr() % 16 for _ in range(1030)} == {0}


def test_kernels_are_interpreted_where_that_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    kernel, tensor = Kernel(turn_kernel), torch.zeros(64, dtype=torch.uint8)
    for _ in range(2):
        launch.launch(kernel, (1,), arguments(kernel, 64, 3, tensor), {}, num_warps=1)
    assert kernel.compiled == 2 and not kernel.started
