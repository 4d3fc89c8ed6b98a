"""State beside a weight: element-wise float32 tensors that a recipe asks for.

Whoever owns a part of the FP32 main weight owns the same part of its state, and updates it once an
optimizer step. Elements do not mix, so that it does not matter where a part begins or ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megatron_fp4.errors import ConfigError


class WeightState(Protocol):
    """One element-wise tensor beside each weight."""

    def start(self, weight: Tensor) -> Tensor:
        """The state before the first update, for a part of the FP32 main weight: float32, of its
        shape."""
        ...

    def update(self, state: Tensor, weight: Tensor) -> None:
        """Update the state in place after an optimizer step left the main weight as it is now."""
        ...


@dataclass(frozen=True)
class WeightAverage:
    """The exponential moving average of the main weights: what rounding ema rounds W towards
    (Q-EMA, "Oscillation-Reduced MXFP4 Training for Vision Transformers", arXiv 2502.20853,
    section 4.2).

    beta: the share of the average that an update leaves; average <- beta average + (1 - beta) W.
    """

    beta: float = 0.998

    def __post_init__(self) -> None:
        if not 0.0 <= self.beta < 1.0:
            raise ConfigError(f"beta is in [0, 1), not {self.beta}")

    def start(self, weight: Tensor) -> Tensor:
        return weight.detach().float().clone()

    def update(self, state: Tensor, weight: Tensor) -> None:
        # Three operations that round once each: a fused multiply-add would give the last elements
        # of a part, which vector instructions leave over, other bits than its first.
        state.mul_(self.beta).add_(weight.detach().float() * (1.0 - self.beta))
