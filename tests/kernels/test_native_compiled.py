"""The native GEMM compiles to FP4 tensor cores' instructions, on a machine without them."""

import re
from typing import Any

import pytest

from megatron_fp4.kernels import native
from megatron_fp4.kernels.native import product_kernel
from testing.kernels.compiling import compiled

# PTX has two names for it, of which Triton 3.9 takes the second for tcgen05.
SCALE_FOR_32 = re.compile(r"kind::mxf4\S*\.block_scale\.(scale_vec::2X|block32)")
INSTRUCTIONS = {100: "tcgen05.mma", 103: "tcgen05.mma", 120: "mma.sync"}


def assembly(capability: int, out: str, adds: bool) -> str:
    constants: dict[str, Any] = {"ADDS": adds, "BAND": native.BAND}
    constants |= {name: getattr(native, name) for name in ("TILE_M", "TILE_N", "TILE_K")}
    types = {name: "*u8" for name in product_kernel.arg_names if name.endswith("_ptr")}
    types |= {"out_ptr": out, "alpha": "fp32"}
    # As at a launch: PyTorch's memory and the sizes of real matrices are multiples of 16.
    aligned = [name for name in product_kernel.arg_names if name != "alpha"]
    options = {"num_warps": native.WARPS, "num_stages": native.STAGES}
    return compiled(product_kernel, types, capability, constants, aligned, **options)["ptx"]


@pytest.mark.parametrize(("out", "adds"), [("*bf16", False), ("*fp32", False), ("*fp32", True)])
@pytest.mark.parametrize("capability", INSTRUCTIONS)
def test_blackwell_multiplies_codes_with_block_scales(
    capability: int, out: str, adds: bool
) -> None:
    lines = assembly(capability, out, adds).splitlines()
    products = [line for line in lines if INSTRUCTIONS[capability] in line]
    assert products and all("kind::mxf4" in line for line in products)
    assert all(SCALE_FOR_32.search(line) for line in products)
    # tcgen05's kind mxf4 has E8M0 scales alone; mxf4nvf4 names them.
    assert capability != 120 or all(".e2m1.e2m1.f32.ue8m0" in line for line in products)


def test_hopper_decodes_first() -> None:
    """The control: no FP4 instruction there."""
    ptx = assembly(90, "*bf16", False)
    assert "mxf4" not in ptx and "wgmma" in ptx
