"""The kernel that updates the average of a weight: one read of both, one write."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_fp4.kernels.launch import NUMBER, Launch, bits_of, kernel, planned, tiles

_BLOCK = 2048
_WEIGHTS = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit
def _blended(old, new, beta, rest):
    return old * beta + new * rest


@kernel(fp_fusion=False, do_not_specialize=("beta", "rest", "size"))
def blend_kernel(average, weight, beta, rest, size, BLOCK: tl.constexpr):
    """average = beta * average + rest * weight, over `size` elements.

    average: float32. weight: float32, BF16 or FP16. beta, rest: the bits of float32 numbers.
    """
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    old = tl.load(average + place, inside)
    new = tl.load(weight + place, inside).to(tl.float32)
    share, others = beta.to(tl.float32, bitcast=True), rest.to(tl.float32, bitcast=True)
    tl.store(average + place, _blended(old, new, share, others), inside)


def blend(average: Tensor, weight: Tensor, beta: float) -> None:
    """`arithmetic.weight_states.blend` of contiguous tensors on a GPU, with the same bits."""
    size = average.numel()
    if size == 0:
        return
    if not (average.is_contiguous() and weight.is_contiguous()) or weight.dtype not in _WEIGHTS:
        raise ValueError("averages are of contiguous weights in float32, BF16 or FP16")
    start = _launch(tiles(size, _BLOCK), weight.dtype)
    start(average.device, average, weight.detach(), bits_of(beta), bits_of(1.0 - beta), size)


@planned
def _launch(programs: int, dtype: torch.dtype) -> Launch:
    types = torch.float32, dtype, NUMBER, NUMBER, NUMBER
    return Launch(blend_kernel, (programs,), types, dict(BLOCK=_BLOCK), num_warps=4)
