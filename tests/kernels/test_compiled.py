"""The kernels compile for Ampere, Hopper and Blackwell, on a machine without a GPU."""

from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_fp4.kernels.carrier import FORMATS, carry_kernel
from megatron_fp4.kernels.mxfp4 import quantize_kernel

BOTH = {"ALONG": True, "ACROSS": True}
PLAIN = {"HADAMARD": 0, "SIGNED": False, "FACTOR": 1.0, "PACKED": False}
VARIANTS: dict[str, dict[str, Any]] = {
    "nearest": BOTH | PLAIN | {"STOCHASTIC": False},
    "stochastic": BOTH | PLAIN | {"STOCHASTIC": True},
    "along": BOTH | PLAIN | {"STOCHASTIC": False, "ACROSS": False},
    "across": BOTH | PLAIN | {"STOCHASTIC": True, "ALONG": False},
    "packed": BOTH | PLAIN | {"STOCHASTIC": True, "ALONG": False, "PACKED": True},
    "hadamard": BOTH | PLAIN | {"STOCHASTIC": True, "HADAMARD": 64, "SIGNED": True},
}
REST = {"CEIL": True, "PRESCALE": 0.75, "INTERPRETED": False, "HAS_ROWS": True}
REST |= {"HAS_GROUPS": True, "EVEN": False, "TILE_ROWS": 64, "TILE_COLUMNS": 64}


def assembly(capability: int, constants: dict[str, Any]) -> str:
    x = "*bf16" if constants["HADAMARD"] else "*i32"
    types = {"x_ptr": x, "h_ptr": "*bf16", "rows_ptr": "*i64", "groups_ptr": "*i64"}
    types |= {name: "*i32" for name in quantize_kernel.arg_names if name.endswith("codes_ptr")}
    types |= {name: "*u8" for name in quantize_kernel.arg_names if name.endswith("scales_ptr")}
    types |= {name: "*fp32" for name in quantize_kernel.arg_names if name.endswith("signs_ptr")}
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32")
        for name in quantize_kernel.arg_names
    }
    source = ASTSource(quantize_kernel, signature, constants)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["ptx"]


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_kernel_compiles(variant: str, capability: int) -> None:
    ptx = assembly(capability, VARIANTS[variant] | REST)
    multiplies = any(name in ptx for name in ("wgmma.mma", "mma.sync", "tcgen05.mma"))
    assert multiplies == bool(VARIANTS[variant]["HADAMARD"])  # transforms on tensor cores
    # Subnormal numbers are not flushed where the codes are made.
    assert ".ftz" not in ptx
    if not VARIANTS[variant]["HADAMARD"]:
        assert "prmt.b32" in ptx and "max.NaN.bf16x2" in ptx


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("element", FORMATS, ids=str)
def test_a_carrier_compiles(element: Any, capability: int) -> None:
    mantissa, bias, nan, bottom, top = FORMATS[element]
    constants = {"MANTISSA": mantissa, "BIAS": bias, "NAN": nan, "BOTTOM": bottom, "TOP": top}
    constants |= {"INTERPRETED": False, "ALL_BLOCKS": 512, "ROWS": 4, "BLOCKS": 64}
    types = {"codes_ptr": "*i32", "scales_ptr": "*u8", "out_ptr": "*i32", "fold_ptr": "*fp32"}
    types |= {"tally_ptr": "*i32"}
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32")
        for name in carry_kernel.arg_names
    }
    source = ASTSource(carry_kernel, signature, constants)
    ptx = triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["ptx"]
    assert "prmt.b32" in ptx and "mul.ftz" not in ptx
