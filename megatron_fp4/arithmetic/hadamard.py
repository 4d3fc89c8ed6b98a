"""Hadamard transforms along the contracted axis of a GEMM.

Both operands of a GEMM are multiplied by the same orthogonal S = diag(signs) H_g / sqrt(g), in
groups of g along the contracted axis; S S^T = I, so the product is unchanged and nothing is
inverted ("Training LLMs with MXFP4", arXiv 2502.20586, section 3.2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from megatron_fp4.arithmetic.formats import widen
from megatron_fp4.errors import ConfigError, check_choices


@dataclass(frozen=True)
class Hadamard:
    """group: the transform's size, a power of two. signs: random draws them anew for each GEMM
    and step (wgrad: each microbatch too); none leaves them out (a deterministic transform)."""

    group: int = 64
    signs: Literal["random", "none"] = "random"

    def __post_init__(self) -> None:
        check_choices(self)
        if self.group < 2 or self.group & (self.group - 1):
            raise ConfigError(f"hadamard group {self.group} is not a power of two, 2 or more")


@cache
def hadamard_matrix(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """H of `size` (a power of two) in natural (Sylvester) order: entries +1 and -1."""
    h = torch.ones(1, 1, dtype=dtype, device=device)
    while h.shape[0] < size:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
    return h


def transform(x: Tensor, group: int, signs: Tensor | None = None) -> Tensor:
    """x @ S along the last axis, in groups of `group`.

    x: [..., K] with K a multiple of `group`. signs: [group], applied BEFORE H; None: no signs.
    Computed and returned in float32 (float64 for float64 input). Raises ConfigError where the
    groups do not tile the axis.
    """
    if x.shape[-1] % group:
        raise ConfigError(f"an axis of {x.shape[-1]} is not a multiple of hadamard group {group}")
    wide = widen(x)
    grouped = wide.reshape(-1, group)
    if signs is not None:
        grouped = grouped * signs.to(wide.dtype)
    product = grouped @ hadamard_matrix(group, wide.dtype, x.device)
    return product.mul_(1 / math.sqrt(group)).view(wide.shape)


def inverse(x: Tensor, group: int, signs: Tensor | None = None) -> Tensor:
    """x @ S^T: undoes `transform` (H is symmetric, so the signs come last)."""
    back = transform(x, group)
    return back if signs is None else (back.view(-1, group) * signs.to(back.dtype)).view(x.shape)
