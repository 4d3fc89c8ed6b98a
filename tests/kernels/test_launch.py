"""Which compiled kernel a launch takes, without a GPU: stand-ins for kernels record what they are
asked to compile and what they are launched with."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import triton
from torch import Tensor
from triton._C.libtriton import native_specialize_impl
from triton.backends.nvidia.compiler import CUDABackend
from triton.backends.nvidia.driver import CudaLauncher

from megatron_fp4.arithmetic.quantizer import Quantizer, get_quantizer
from megatron_fp4.kernels import launch
from megatron_fp4.kernels.launch import NUMBER, NUMBERS, Launch
from megatron_fp4.kernels.quantize import Copy, _quantize_launch, quantize
from testing.kernels.compiling import E4M3, E5M2, VARIANTS, carry_launch


class Kernel:
    """Stands for a Triton kernel."""

    fp_fusion = True

    def __init__(self, arg_names: list[str]) -> None:
        self.arg_names = arg_names
        self.compiled: list[tuple[Any, ...]] = []  # the arguments, of each time
        self.launched: list[tuple[Any, ...]] = []  # the number of the compiled kernel, and the rest
        self.hooked = 0

    def warmup(self, *arguments: Any, grid: Any, **constants: Any) -> Any:
        assert len(grid) == 3
        self.compiled.append(arguments)
        return Compiled(self, len(self.compiled))

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, **constants: self.launched.append(arguments)


class Compiled:
    function, packed_metadata = "function", (4, 1, 0)

    def __init__(self, kernel: Kernel, number: int) -> None:
        self.kernel, self.number = kernel, number
        self.run = Launcher(self)

    def launched(self, grid: Any, stream: int, function: str, rest: Any, given: Any) -> None:
        assert grid == (2, 3, 1) and stream == 7 and function == "function"
        assert rest == ((4, 1, 0), None, None, None)  # no hooks
        self.kernel.launched.append((self.number, *given))

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def start(*arguments: Any, stream: int) -> None:
            assert stream == 7
            self.kernel.hooked += 1

        return start


class Launcher:
    """Stands for Triton's CudaLauncher. launch: the C function that it calls in Triton 3.6."""

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid, launch_pdl = "cooperative", "pdl"

    def __init__(self, compiled: Compiled) -> None:
        self.compiled = compiled

    def __call__(self, *arguments: Any) -> None:
        stream, function, *rest = arguments[3:9]
        self.compiled.launched(arguments[:3], stream, function, tuple(rest), arguments[9:])

    def launch(self, *arguments: Any) -> None:
        assert arguments[5:9] == ("cooperative", "pdl", None, None)  # no scratch memory
        stream, function = arguments[3:5]
        self.compiled.launched(arguments[:3], stream, function, arguments[9:13], arguments[13:])


@pytest.fixture(autouse=True)
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of the current GPU."""
    current = [0]
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[0], raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    return current


class Pair(NamedTuple):
    codes: Any
    stream: Any


TYPES = torch.int32, Pair(torch.uint8, NUMBER), NUMBER, 64
NAMES = ["x_ptr", "out", "step", "n_rows", "FORM", "TILE"]


@pytest.mark.parametrize("version", [(3, 6), (3, 9)])
def test_one_is_compiled_for_all_calls_of_a_launch(
    one_gpu: list[int], version: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "VERSION", version)
    kernel, x, y = Kernel(NAMES), torch.zeros(64), torch.zeros(64, dtype=torch.uint8)
    start = Launch(kernel, (2, 3), TYPES, {"TILE": 8, "FORM": "ceil"}, num_warps=1)
    for number in (3, 16, 1, -1):
        start(x.device, x, y, number, number, 64)
        assert len(kernel.compiled) == 1
        # Tuples are put together again, and constants stand in the order of the parameters.
        given = x.data_ptr(), (y.data_ptr(), number), number, 64
        assert kernel.launched[-1] == (1, *given, "ceil", 8)
    start(x.device, x, None, 3, 3, 64)
    assert kernel.launched[-1][2] == (0, 3) and len(kernel.compiled) == 1
    start(x.device, x, launch.address(y), 3, 3, 64)  # in place of the tensor
    assert kernel.launched[-1][2] == (y.data_ptr(), 3) and len(kernel.compiled) == 1
    for _ in range(2):  # not aligned: one more
        start(x.device, x, y[1:], 3, 3, 64)
        assert len(kernel.compiled) == 2 and kernel.launched[-1][0] == 2
    one_gpu[0] = 1  # another GPU has its own
    for _ in range(2):
        start(x.device, x, y, 3, 3, 64)
    assert len(kernel.compiled) == 3 and kernel.launched[-1][0] == 3
    one_gpu[0] = 0
    start(x.device, x, y, 3, 3, 64)
    assert len(kernel.compiled) == 3 and kernel.launched[-1][0] == 1


def test_a_kernel_is_compiled_without_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    kernel, x = Kernel(NAMES), torch.zeros(64, dtype=torch.uint8)
    start = Launch(kernel, (2, 3), TYPES, {"TILE": 8, "FORM": "ceil"})
    made = start.compiled(0, aligned=True)
    assert made.number == 1 and not kernel.launched
    start(x.device, x, x, 3, 3, 64)
    assert len(kernel.compiled) == len(kernel.launched) == 1 and start.compiled(0, True) is made
    assert start.compiled(0, aligned=False).number == 2
    monkeypatch.setattr(launch, "INTERPRETED", True)
    with pytest.raises(LookupError, match="Triton interprets the kernels"):
        start.compiled(0, aligned=True)


def test_a_kernel_is_compiled_for_types_and_not_for_numbers() -> None:
    """What Triton itself finds of the arguments that stand for a launch's types."""
    kernel, x = Kernel(NAMES), torch.zeros(64, dtype=torch.uint8)
    start = Launch(kernel, (2, 3), TYPES, {"TILE": 8, "FORM": "ceil"})
    start(x.device, x, x, 1, 16, 64)
    start(x.device, x, x[1:], 1, 16, 64)
    found = [[_seen(argument) for argument in given] for given in kernel.compiled]
    pointers = ("*i32", "D"), ("*i32", "")
    assert [given[0] for given in found] == list(pointers)
    assert [given[1] for given in found] == [
        (("*u8", "i32"), ("D", "")), (("*u8", "i32"), ("", "")),
    ]  # fmt: skip
    assert all(given[2:] == [("i32", ""), ("i32", "D")] for given in found)
    # Negative control: a number of a call, within a tuple, would be a constant or a multiple of 16.
    assert _seen(Pair(3, 1))[0] == ("i32", "constexpr") and _seen(Pair(3, 16))[1] == ("", "D")


def _seen(argument: Any) -> Any:
    return native_specialize_impl(CUDABackend, argument, False, True, True)


def test_a_profiler_s_hooks_are_called() -> None:
    kernel, x = Kernel(NAMES), torch.zeros(64, dtype=torch.uint8)
    start = Launch(kernel, (2, 3), TYPES, {"TILE": 8, "FORM": "ceil"})
    hook = triton.knobs.runtime.launch_enter_hook
    start(x.device, x, x, 1, 16, 64)
    hook.add(print)
    try:
        start(x.device, x, x, 1, 16, 64)
    finally:
        hook.remove(print)
    assert kernel.hooked == 1 and len(kernel.launched) == 1


def test_constants_come_last() -> None:
    kernel = Kernel(NAMES)
    for types, constants in ((TYPES[:3], {"TILE": 8, "FORM": 1}), (TYPES, {"TILE": 8})):
        with pytest.raises(ValueError, match="its constants are"):
            Launch(kernel, (1,), types, constants)


LAUNCHES = {**VARIANTS, "carriers": carry_launch((64, 2, 32, E4M3, True))}


@pytest.mark.parametrize("name", LAUNCHES)
def test_types_have_a_parameter_each(name: str) -> None:
    """Launch itself compares the constants; a type too few or too many would shift them."""
    start = LAUNCHES[name]
    plain = [p.name for p in start.kernel.params if not p.is_constexpr]
    assert len(plain) == len(start.types)
    for parameter, kind in zip(plain, start.types, strict=True):
        assert isinstance(kind, torch.dtype) == parameter.endswith("_ptr")


def test_what_is_given_fits_the_types(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pointer for each dtype, an integer for each other type."""
    seen: list[tuple[Launch, tuple[Any, ...]]] = []
    monkeypatch.setattr(Launch, "__call__", lambda self, *given: seen.append((self, given)))
    x = torch.zeros(64, 64).bfloat16()
    noisy = Quantizer(rounding="stochastic")
    copies = [Copy(1, carrier=E4M3), Copy(0)]
    quantize(x, Quantizer(), copies)
    quantize(x, noisy, [Copy(0, carrier=E5M2)])
    quantize(x, noisy, copies, group=64)
    for start, (_, *given) in seen:
        assert len(given) == len(start.flat_types)
        for kind, argument in zip(start.flat_types, given, strict=True):
            if isinstance(kind, torch.dtype):
                assert argument is None or isinstance(argument, Tensor | int)
            else:
                assert type(argument) is int and (kind in NUMBERS or kind == argument)
    assert len(seen) == 4


def test_what_is_specialized_makes_another_plan() -> None:
    """Sizes, directions, rounding, carriers and shared draws have a launch each, and graphs their
    own; keys and places have none."""
    made = [
        _quantize_launch(
            rows, 64, get_quantizer(name).fields, packed, reads, along, across, in_memory, False,
            shared, of_y,
        )
        for rows in (64, 96)
        for name in ("mxfp4", "mxfp4-sr", "mxfp4-ceil")
        for packed, reads, of_y in (
            (0, "", torch.int32), (32, "", torch.int32), (0, "swiglu", torch.int32),
            (0, "swiglu gradient", torch.int32), (0, "swiglu gradient", torch.int16),
        )
        for in_memory in (False, True)
        for shared in (False, True)
        for along, across in (
            (True, False), (False, True), (torch.float8_e5m2, True), (torch.float8_e4m3fn, True),
        )
    ]  # fmt: skip
    assert len(set(map(id, made))) == len(made) == 480
    assert made[0] is _quantize_launch(
        64, 64, get_quantizer("mxfp4").fields, 0, "", True, False, False, False, False, torch.int32
    )


def test_kernels_are_interpreted_where_that_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter gets tensors, in the dtypes of the types, and the named tuples."""
    monkeypatch.setattr(launch, "INTERPRETED", True)
    kernel, x = Kernel(NAMES), torch.zeros(64, dtype=torch.uint8)
    start = Launch(kernel, (2, 3), TYPES, {"TILE": 8, "FORM": "ceil"})
    for _ in range(2):
        start(x.device, x, None, 5, 3, 64)
    assert not kernel.compiled and len(kernel.launched) == 2
    words, out, step, rows = kernel.launched[0]
    assert words.dtype == torch.int32 and words.data_ptr() == x.data_ptr()
    assert type(out) is Pair and out == Pair(None, 5) and (step, rows) == (3, 64)
    for beyond in (2**31, -(2**31) - 1):  # which a GPU's launcher refuses too
        with pytest.raises(OverflowError, match="beyond int32"):
            start(x.device, x, None, 5, beyond, 64)
    start(x.device, x, None, 5, 2**31 - 1, 64)


def test_triton_s_launcher_calls_its_c_function_as_said() -> None:
    """Of Triton 3.6, whose launcher Launch leaves out."""
    if launch.VERSION != (3, 6):
        pytest.skip("another Triton")
    launcher = CudaLauncher.__new__(CudaLauncher)
    seen: list[tuple[Any, ...]] = []
    launcher.launch = lambda *given: seen.append(given)
    launcher.global_scratch_size = launcher.profile_scratch_size = 0
    launcher.global_scratch_align = launcher.profile_scratch_align = launcher.num_ctas = 1
    launcher.launch_cooperative_grid, launcher.launch_pdl = "cooperative", "pdl"
    launcher(2, 3, 1, 7, "function", (4, 1, 0), None, None, None, "x", 5)
    flags = "cooperative", "pdl", None, None
    assert seen == [(2, 3, 1, 7, "function", *flags, (4, 1, 0), None, None, None, "x", 5)]
