"""The mean of X over tokens, which is multiplied apart from the rest of X.

docs/numerics.md, Mean subtraction, defines the bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_fp4.arithmetic.formats import wide


def token_sums(x: Tensor) -> Tensor:
    """The sum of x [tokens, features] over its tokens, float64 [features].

    In float64 the order of the sum changes the last of 53 bits at most, so that the mean has the
    same bits however ranks share the tokens.
    """
    return x.sum(0, dtype=torch.float64)


def mean_of(sums: Tensor, tokens: int, dtype: torch.dtype) -> Tensor:
    """The mean of `tokens` tokens with these `token_sums`, [features] in dtype; zeros for none."""
    return (sums / max(tokens, 1)).to(wide(dtype)).to(dtype)


def centered(x: Tensor, mean: Tensor) -> Tensor:
    """x [tokens, features] minus its mean [features], rounded once to the dtype of both."""
    return x - mean  # torch subtracts narrow dtypes in float32
