"""Statistics of the gradient of one weight."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_fp4.metrics.ratios import ratio

WIDTH = 3


def gradient_sums(gradient: Tensor) -> Tensor:
    """float64 [WIDTH]: the sum of squares, the number of elements and of zeros among them."""
    square = torch.linalg.vector_norm(gradient, dtype=torch.float64).square()
    zeros = gradient.numel() - gradient.count_nonzero()
    return torch.stack((square, torch.full_like(square, gradient.numel()), zeros.double()))


def gradient_metrics(sums: Sequence[float], underflow: float | None = None) -> dict[str, Any]:
    """The metrics of a gradient from the sum of its `gradient_sums`.

    norm: the L2 norm of dW. zeros: the share of zeros among its elements, which have vanished in
    its dtype or before. underflow: that of the dY from which wgrad computes dW, where it quantizes
    dY (`operand_metrics`): the share of gradient elements that are below the range of the grid.
    """
    square, elements, zeros = sums
    norm = math.sqrt(square) if math.isfinite(square) else None
    return {"norm": norm, "zeros": ratio(zeros, elements), "underflow": underflow}
