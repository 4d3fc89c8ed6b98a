"""Reductions of the kernels for block scales are of layouts that Triton compiles rightly."""

from dataclasses import replace

import pytest
import torch
import triton.language as tl

from megatron_fp4.kernels import blocks
from megatron_fp4.kernels.launch import Launch, kernel
from megatron_fp4.kernels.tile_hadamard import GROUPS, NO_TURN, Turn
from testing.kernels.compare_block_scales import POWERS, QUANTIZERS
from testing.kernels.compiling import compiled_launch
from testing.kernels.reductions import scattered_reductions

# Blocks of 16 and of 32 in tiles of four and of eight warps.
NAMES = "nvfp4", "ue5m3", "four-over-six", "four-over-six-32", "in-fp8-32", "gain"
# As "gain", whose groups are of 32 elements.
GAINS = {f"gain-{size}": replace(QUANTIZERS["gain"], unit_gain=size) for size in (16, 64, 128)}
TURNS = [pytest.param(Turn(size, 1.0, True), marks=pytest.mark.outside) for size in GROUPS]
OTHERS = [pytest.param(name, marks=pytest.mark.outside) for name in QUANTIZERS if name not in NAMES]


@pytest.mark.parametrize("axis", [0, pytest.param(1, marks=pytest.mark.outside)])
@pytest.mark.parametrize("turn", [NO_TURN, *TURNS], ids=str)
@pytest.mark.parametrize("name", [*NAMES, *OTHERS, *GAINS])
def test_warps_along_a_reduced_axis_have_neighbouring_bits(
    name: str, turn: Turn, axis: int
) -> None:
    quantizer = (QUANTIZERS | GAINS)[name]
    starts = [blocks._cast_launch(96, 160, quantizer, axis, False, False, turn, torch.bfloat16)]
    if quantizer.tensor_max:
        starts.append(blocks._find_launch(96, 160, quantizer, axis, turn, torch.bfloat16))
    for start in starts:
        assert scattered_reductions(compiled_launch(start, 90)["ttgir"]) == []


@pytest.mark.parametrize("axis", [0, pytest.param(1, marks=pytest.mark.outside)])
@pytest.mark.parametrize("block", [16, 32])
def test_so_they_have_in_float32_matrices(block: int, axis: int) -> None:
    quantizer = replace(POWERS["e8m0-ceil-sr"], block=(1, block))
    start = blocks._cast_launch(96, 160, quantizer, axis, False, False, NO_TURN, torch.float32)
    assert scattered_reductions(compiled_launch(start, 90)["ttgir"]) == []


@kernel(fp_fusion=False)
def maxima_kernel(x_ptr, out_ptr):
    """The largest of blocks of 32 along the columns of a tile of 64 x 64, of which a thread reads
    16 neighbours of a column."""
    rows = 16 * tl.arange(0, 4)[:, None, None] + tl.arange(0, 16)[None, :, None]
    columns = tl.multiple_of(tl.arange(0, 64)[None, None, :], [1, 1, 2])
    places = tl.max_contiguous(x_ptr + rows * 64 + columns, [2, 1, 4])
    tile = tl.trans(tl.reshape(tl.load(places), (64, 64))).to(tl.int32)
    maxima = tl.max(tl.reshape(tile, (64, 2, 32)), 2)
    tl.store(out_ptr + tl.arange(0, 64)[:, None] * 2 + tl.arange(0, 2)[None, :], maxima)


def test_other_bits_between_them_are_noticed() -> None:
    """Negative control. On an H200 a kernel with this layout took the largest of other blocks."""

    def found(warps: int) -> list[str]:
        start = Launch(maxima_kernel, (1, 1), (torch.int16, torch.int32), {}, num_warps=warps)
        return scattered_reductions(compiled_launch(start, 90)["ttgir"])

    assert found(8) != [] == found(4)
