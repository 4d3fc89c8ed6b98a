"""Hadamard transforms along the contracted axis of a GEMM.

Both operands of a GEMM are multiplied by the same orthogonal S = diag(signs) H_g / sqrt(g), in
groups of g along the contracted axis. Since S S^T = I the product does not change, and needs no
inverse transform ("Training LLMs with MXFP4", arXiv 2502.20586, section 3.2). docs/numerics.md,
Hadamard transforms, defines the bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from megatron_fp4.arithmetic.formats import widen
from megatron_fp4.arithmetic.philox import Key, random_signs, signed, stream_id
from megatron_fp4.errors import ConfigError, check_choices
from megatron_fp4.recording import lasting


@dataclass(frozen=True)
class Hadamard:
    """The Hadamard transform of a GEMM's operands.

    group: the size g of the transform, a power of two, 2 or more.
    signs: "random" draws new signs for each GEMM and step (in wgrad for each microbatch too);
        "fixed" takes the same signs for every GEMM, step, seed and layer (NVIDIA's NVFP4 recipe,
        arXiv 2509.25149); "none" uses no signs. With the last two the transform draws nothing.
    Raises ConfigError for others.
    """

    group: int = 64
    signs: Literal["random", "fixed", "none"] = "random"

    def __post_init__(self) -> None:
        check_choices(self)
        if self.group < 2 or self.group & (self.group - 1):
            raise ConfigError(f"hadamard group {self.group} is not a power of two, 2 or more")


class FixedSigns:
    """The signs of transforms with signs "fixed", which depend on nothing but their number."""

    def vector(self, count: int, device: torch.device | str = "cpu") -> Tensor:
        """The first `count` signs: float32 [count], +1 or -1."""
        return lasting(_fixed_signs, count, torch.device(device))

    def words(self) -> tuple[int, int, int, int]:
        """The first 128 signs as the bits of four int32 words, a 1 for -1, as kernels take them."""
        bits = (self.vector(128) < 0).view(4, 32).long() << torch.arange(32, device="cpu")
        w0, w1, w2, w3 = map(signed, bits.sum(1).tolist())
        return w0, w1, w2, w3


FIXED_SIGNS = FixedSigns()


@cache
def _fixed_signs(count: int, device: torch.device) -> Tensor:
    return random_signs(count, Key(0), stream_id("hadamard"), device=device)


def hadamard_matrix(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The Hadamard matrix [size, size] in natural (Sylvester) order, with entries +1 and -1.

    size: a power of two.
    """
    return lasting(_hadamard_matrix, size, dtype, device)


@cache
def _hadamard_matrix(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    h = torch.ones(1, 1, dtype=dtype, device=device)
    while h.shape[0] < size:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
    return h


def transform(x: Tensor, group: int, signs: Tensor | None = None) -> Tensor:
    """x @ S along the last axis, in groups of `group`.

    x: [..., K]. signs: [group], +1 or -1, applied before H; None: no signs. Computed and returned
    in float32 (float64 for float64 input). Raises ConfigError if K is not a multiple of `group`.
    """
    if x.shape[-1] % group:
        raise ConfigError(f"an axis of {x.shape[-1]} is not a multiple of hadamard group {group}")
    wide = widen(x)
    grouped = wide.reshape(-1, group)
    if signs is not None:
        grouped = grouped * signs.to(wide.dtype)
    product = grouped @ hadamard_matrix(group, wide.dtype, x.device)
    return (product * (1 / math.sqrt(group))).view(wide.shape)


def inverse(x: Tensor, group: int, signs: Tensor | None = None) -> Tensor:
    """x @ S^T along the last axis: the inverse of `transform` with the same group and signs.

    H is symmetric, so S^T is H followed by the signs.
    """
    back = transform(x, group)
    return back if signs is None else (back.view(-1, group) * signs.to(back.dtype)).view(x.shape)
