"""Copies in the host's memory of tensors on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor


def copy_of(tensor: Tensor, offload: bool) -> Tensor:
    """A copy of `tensor`, detached.

    offload: whether a copy of a tensor on a GPU is kept in the host's memory. The memory is pinned,
        so that the GPU copies to and from it by itself: kernels that use the copy later wait for
        it, and code of the host has to synchronize first. torch keeps pinned memory that is freed
        for the next copies of its size.
    """
    if not (offload and tensor.is_cuda):
        return tensor.detach().clone()
    host = torch.empty_like(tensor, device="cpu", pin_memory=True, requires_grad=False)
    return host.copy_(tensor.detach(), non_blocking=True)
