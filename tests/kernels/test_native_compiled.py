"""The native GEMM compiles to FP4 tensor cores' instructions, on a machine without them."""

import re

import pytest
import torch

from megatron_fp4.kernels import native
from testing.kernels.compiling import compiled_launch

BF16, FP32 = torch.bfloat16, torch.float32
# PTX has two names for it, of which Triton 3.9 takes the second for tcgen05.
SCALE_FOR_32 = re.compile(r"kind::mxf4\S*\.block_scale\.(scale_vec::2X|block32)")
TENSOR_CORES = re.compile(r"\b(?:wgmma\.mma_async|tcgen05\.mma|w?mma\.(?:sync|sp))\S*")
INSTRUCTIONS = {
    100: "tcgen05.mma.cta_group::1.kind::mxf4.",
    103: "tcgen05.mma.cta_group::1.kind::mxf4.",
    120: "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.",
}
# The elements M N K of one instruction: of one thread for tcgen05, of each warp for mma.sync.
SIZES = {100: 128 * 128 * 64, 103: 128 * 128 * 64, 120: native.WARPS * 16 * 8 * 64}


def assembly(capability: int, out: torch.dtype, adds: bool) -> str:
    launch = native._launch(512, 256, 1024, 0.5 if adds else 1.0, out, adds)
    return str(compiled_launch(launch, capability)["ptx"])


@pytest.mark.parametrize(("out", "adds"), [(BF16, False), (FP32, False), (FP32, True)])
@pytest.mark.parametrize("capability", INSTRUCTIONS)
def test_blackwell_multiplies_codes_with_block_scales(
    capability: int, out: torch.dtype, adds: bool
) -> None:
    """With as many instructions as a tile has products, and no product in BF16 or FP16 beside."""
    found = TENSOR_CORES.findall(assembly(capability, out, adds))
    assert all(name.startswith(INSTRUCTIONS[capability]) for name in found)
    assert all(SCALE_FOR_32.search(name) for name in found)
    # tcgen05's kind mxf4 has E8M0 scales alone; mxf4nvf4 names them.
    assert capability != 120 or all(".e2m1.e2m1.f32.ue8m0" in name for name in found)
    tile = native.TILE_M * native.TILE_N * native.TILE_K
    assert len(found) * SIZES[capability] == tile


@pytest.mark.parametrize(("capability", "instruction"), [(80, "mma.sync"), (90, "wgmma")])
def test_other_gpus_decode_first(capability: int, instruction: str) -> None:
    """The control: no FP4 instruction there, and products in BF16, which are seen."""
    ptx = assembly(capability, BF16, False)
    found = TENSOR_CORES.findall(ptx)
    assert "mxf4" not in ptx and found
    assert all(name.startswith(instruction) and ".bf16.bf16" in name for name in found)
