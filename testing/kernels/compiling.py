"""Compiles kernels on a machine without a GPU, as they are launched."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_fp4.arithmetic.quantizer import Quantizer
from megatron_fp4.kernels import carrier
from megatron_fp4.kernels.launch import NUMBERS, Launch, _like
from megatron_fp4.kernels.quantize import _quantize_launch

NAMES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.uint8: "u8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
}
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SIZES = 72, 96  # which no tile fills


def quantize_launch(
    rounding: str = "nearest",
    along_rows: torch.dtype | bool = True,
    along_columns: torch.dtype | bool = True,
    *,
    sizes: tuple[int, int] = SIZES,
    packed: int = 0,
    reads: str = "",
    in_memory: bool = False,
    shared: bool = False,
    of_y: torch.dtype = torch.int32,
    **fields: Any,
) -> Launch:
    """The Launch of the quantize kernel for a matrix whose placement lists its groups.

    along_rows, along_columns: whether an operand with blocks along this axis is made, or the dtype
    of its carriers. sizes: rows and columns. packed: the block size of the codes that are read; 0:
    BF16 is read. reads: what is computed of it as it is read; see kernels/source.py. in_memory:
    whether the step is read from memory. shared: whether both copies draw the same bits. of_y: see
    `kernels.swiglu.words_of`. fields: of the quantizer.
    """
    quantizer = Quantizer(rounding=rounding, **fields)  # type: ignore[arg-type]
    return _quantize_launch(
        *sizes, quantizer.fields, packed, reads, along_rows, along_columns, in_memory, True, shared,
        of_y,
    )  # fmt: skip


VARIANTS: dict[str, Launch] = {
    "nearest": quantize_launch(),
    "stochastic": quantize_launch("stochastic", prescale=0.75),
    "one draw": quantize_launch("stochastic", E5M2, E5M2, rule="ceil", shared=True),
    "along rows": quantize_launch(along_columns=False),
    "along columns": quantize_launch("stochastic", False, rule="ceil"),
    "carried": quantize_launch("stochastic", E5M2, E4M3, rule="ceil"),
    "carried along rows": quantize_launch("nearest", E4M3, False),
    "of a graph": quantize_launch("stochastic", in_memory=True),
    "mse": quantize_launch("nearest", E4M3, E4M3, rule="mse"),
    "nearest scales": quantize_launch("stochastic", E5M2, E4M3, rule="nearest"),
    "averaged": quantize_launch("ema", E4M3, rule="ceil"),
    "packed": quantize_launch("stochastic", False, packed=32, prescale=0.75),
    "blocks of 16": quantize_launch("stochastic", E5M2, E4M3, block=(1, 16)),
    "of a swiglu": quantize_launch("nearest", E4M3, False, rule="ceil", reads="swiglu"),
    "of a swiglu, both": quantize_launch(reads="swiglu", sizes=(72, 128)),
    "of a swiglu's gradient": quantize_launch(
        "stochastic", E5M2, E5M2, rule="ceil", sizes=(72, 256), reads="swiglu gradient", shared=True
    ),
    "of a norm": quantize_launch("nearest", E4M3, False, rule="ceil", reads="normed"),
    "of a norm, both": quantize_launch("stochastic", True, E4M3, reads="normed, zero-centered"),
    "of a swiglu's gradient, y in E4M3": quantize_launch(
        "stochastic",
        E5M2,
        E5M2,
        rule="ceil",
        sizes=(72, 256),
        reads="swiglu gradient",
        shared=True,
        of_y=torch.int16,
    ),  # fmt: skip
    "packed blocks of 16": quantize_launch(along_rows=False, packed=16, block=(1, 16)),
}


def carry_launch(*kinds: tuple[Any, ...]) -> Launch:
    """A launch of the carry kernel. kinds: `carrier.Kind` of each operand, perhaps without the
    format of its scales, which is then E8M0."""
    return carrier._launch(*((*kind, "e8m0")[:6] for kind in kinds))


def compiled_launch(
    start: Launch, capability: int, constants: dict[str, Any] | None = None, **options: Any
) -> Any:
    """What Triton compiles a launch's kernel to: "ptx", "ttgir" and "cubin", by these names.

    capability: of the GPU, as 90 for 9.0. constants, options: replace those of the launch.
    """
    names = start.kernel.arg_names
    values = start.constants | (constants or {})
    signature = {name: _type_of(kind) for name, kind in zip(names, start.types, strict=False)}
    signature |= dict.fromkeys(values, "constexpr")
    found: dict[Any, Any] = dict(values)
    attributes = {}
    for i, kind in enumerate(start.types):
        leaves = enumerate(kind) if isinstance(kind, tuple) else [(None, kind)]
        for j, leaf in leaves:
            path = (i,) if j is None else (i, j)
            if leaf == 1:
                found[path] = 1
            elif isinstance(leaf, torch.dtype) or leaf not in NUMBERS and leaf % 16 == 0:
                attributes[path] = [["tt.divisibility", 16]]
    source = ASTSource(start.kernel, signature, found, attributes)
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options=start.options | options).asm


def _type_of(kind: Any) -> Any:
    """Triton's name of an argument's type; see `Launch`."""
    if isinstance(kind, torch.dtype):
        return "*" + NAMES[kind]
    if isinstance(kind, tuple):
        return _like(kind, [_type_of(each) for each in kind])
    return "constexpr" if kind == 1 else "i32"  # Triton makes a constant of an argument that is 1


def sass(cubin: bytes) -> str:
    """The instructions of a cubin as text."""
    return _told("nvdisasm", cubin, "-c")


def registers(cubin: bytes) -> int:
    """The registers that a thread of a cubin's kernel takes."""
    found = re.search(r"REG:(\d+)", _told("cuobjdump", cubin, "-res-usage"))
    assert found is not None
    return int(found[1])


def _told(tool: str, cubin: bytes, option: str) -> str:
    """What a tool that comes with Triton prints of a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        path = Path(nvidia.__file__).parent / "bin" / tool
        return subprocess.run([path, option, file.name], capture_output=True, text=True).stdout
