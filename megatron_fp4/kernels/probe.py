"""A small kernel that is never launched: it shows how Triton lays out the arguments of kernels."""

from __future__ import annotations

import torch
import triton.language as tl

from megatron_fp4.kernels.launch import NUMBER, Launch, kernel, planned


@kernel(fp_fusion=True)
def probe_kernel(out_ptr, pair, one, size):
    """Has an argument of each kind that `Launch.types` names. pair: a pointer and a number."""
    tl.store(out_ptr, tl.load(pair[0]) + pair[1] + one + size)


@planned
def probe() -> Launch:
    return Launch(probe_kernel, (1,), (torch.int32, (torch.int32, NUMBER), 1, 16), {})
