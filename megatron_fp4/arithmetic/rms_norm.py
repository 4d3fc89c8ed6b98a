"""RMSNorm (arXiv 1910.07467), y = x / sqrt(mean(x^2) + eps) * gain for each row, and its gradients.

All functions compute in float32 and round each result once; the kernels (kernels/rms_norm.py) do
the same.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_fp4.arithmetic.formats import widen


class RmsNorm(NamedTuple):
    """One RMSNorm.

    weight: [n]. eps: is added to the mean of the squares. zero_centered: whether the gain is
    1 + weight, and not the weight itself.
    """

    weight: Tensor
    eps: float
    zero_centered: bool = False

    @property
    def gain(self) -> Tensor:
        """float32 or wider [n]."""
        return widen(self.weight) + 1 if self.zero_centered else widen(self.weight)


def factors(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps) of each row of x [rows, n]: float32 or wider [rows, 1]."""
    return 1 / torch.sqrt(widen(x).square().mean(-1, keepdim=True) + eps)


def normed(x: Tensor, factor: Tensor, gain: Tensor) -> Tensor:
    """x [rows, n] times its factors [rows, 1] and then the gain [n], in x's dtype."""
    return (widen(x) * factor * gain).to(x.dtype)


def gradients(
    dy: Tensor, x: Tensor, norm: RmsNorm, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The gradients of x and of the weight, each in its dtype.

    dy: of y [rows, n]. residual: another gradient of x, which is added before that of x is rounded.

    With r for the factor of a row, g = dy * gain and n columns, that of x is
    r * (g - x * r^2 * sum(g * x) / n).
    """
    wide_x, g = widen(x), widen(dy) * norm.gain
    r = factors(x, norm.eps)
    dx = r * (g - wide_x * (r * r * (g * wide_x).mean(-1, keepdim=True)))
    if residual is not None:
        dx = dx + widen(residual)
    dweight = (widen(dy) * (wide_x * r)).sum(0)
    return dx.to(x.dtype), dweight.to(norm.weight.dtype)
