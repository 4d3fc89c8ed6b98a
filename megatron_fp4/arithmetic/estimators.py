"""The gradient estimator DGE, for the gradient through the quantizer of W.

Recipes without an estimator use the straight-through estimator, which needs no code.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_fp4.arithmetic.formats import E2M1_MAGNITUDES, table, widen
from megatron_fp4.errors import ConfigError


@dataclass(frozen=True)
class DGE:
    """The differentiable gradient estimator of "Optimizing LLM Training Using FP4 Quantization"
    (arXiv 2501.17116, section 3.1).

    Between two grid points lo and lo + d the rounding step is modelled by
    f(x) = lo + d/2 (1 + sign(u) |u|^(1/k)), u = 2 (x - lo)/d - 1. The weight's gradient is
    multiplied by f'(x) = min((1/k) |u|^(1/k - 1), clip), where x is the weight divided by its
    block scale.

    k: the steepness of the model, 1 or more. clip: the upper bound of f', above 0. Raises
    ConfigError for other values.
    """

    k: float = 5.0
    clip: float = 3.0

    def __post_init__(self) -> None:
        if not (self.k >= 1 and self.clip > 0):
            raise ConfigError(f"DGE takes k of 1 or more and a clip above 0: {self.k}, {self.clip}")

    def factor(self, scaled: Tensor) -> Tensor:
        """f' of each scaled weight.

        scaled: weights divided by their block scales, within [-6, 6] up to rounding; any shape.
        Computed and returned in float32 (float64 for float64 input).
        """
        x = widen(scaled).abs()  # f' is even
        grid = table(E2M1_MAGNITUDES, x.dtype, x.device)
        low = (torch.bucketize(x, grid, right=True) - 1).clamp(max=len(E2M1_MAGNITUDES) - 2)
        u = 2 * (x - grid[low]) / (grid[low + 1] - grid[low]) - 1
        return u.abs().pow(1 / self.k - 1).div(self.k).clamp(max=self.clip)
