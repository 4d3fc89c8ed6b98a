"""Compiles a kernel on a machine without a GPU, with the options that it is started with; and
constants to compile the quantize kernel for."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import triton
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_fp4.kernels.launch import options_of

BOTH = {"ALONG": True, "ACROSS": True}
CARRIER_TYPES = {
    f"{side}_{name}_ptr": of
    for side in "ab"
    for name, of in {
        "codes": "*i32", "scales": "*u8", "out": "*i32", "fold": "*fp32", "tally": "*i32"
    }.items()
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "nearest": BOTH | {"STOCHASTIC": False},
    "stochastic": BOTH | {"STOCHASTIC": True},
    "along": BOTH | {"STOCHASTIC": False, "ACROSS": False},
    "across": BOTH | {"STOCHASTIC": True, "ALONG": False},
    "carried": BOTH | {"STOCHASTIC": True, "ALONG_CARRIED": 2, "ACROSS_CARRIED": 3},
    "carried along": BOTH | {"STOCHASTIC": False, "ALONG_CARRIED": 3, "ACROSS": False},
    "of a graph": BOTH | {"STOCHASTIC": True, "IN_MEMORY": True},
    "averaged": BOTH | {"STOCHASTIC": False, "AVERAGED": True, "ALONG_CARRIED": 3},
    "packed": BOTH | {"STOCHASTIC": True, "ALONG": False, "PACKED": True},
}
SHARED = {"CEIL": True, "PRESCALE": 0.75, "INTERPRETED": False, "HAS_GROUPS": True}
PLAIN = SHARED | {
    "AVERAGED": False,
    "ALONG_CARRIED": 0,
    "ACROSS_CARRIED": 0,
    "PACKED": False,
    "EVEN": False,
    "TILE_ROWS": 64,
    "TILE_COLUMNS": 64,
    "DOWN": True,
    "IN_MEMORY": False,
}


def compiled(
    kernel: Any,
    types: dict[str, str],
    capability: int,
    constants: dict[str, Any],
    aligned: Iterable[str] = (),
    **options: Any,
) -> Any:
    """What Triton makes of a kernel, by name ("ptx", "ttgir", "cubin").

    types: Triton's type of each argument that is not an int32; constants: what the kernel has no
    parameter for is left out; aligned: arguments that are multiples of 16; options: num_warps, ...,
    and those that are to replace the kernel's own.
    """
    names = kernel.arg_names
    constants = {name: value for name, value in constants.items() if name in names}
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    aligned = set(aligned) - set(constants)
    attributes = {
        (i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in aligned
    }
    source = ASTSource(kernel, signature, constants, attributes)
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options=options_of(kernel) | options).asm


def pointers(kernel: Any) -> list[str]:
    """Its pointers' names: PyTorch's memory is aligned."""
    return [name for name in kernel.arg_names if name.endswith("_ptr")]


def sass(cubin: bytes) -> str:
    """Its instructions, by the disassembler that comes with Triton."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = Path(nvidia.__file__).parent / "bin/nvdisasm"
        return subprocess.run([tool, "-c", file.name], capture_output=True, text=True).stdout
