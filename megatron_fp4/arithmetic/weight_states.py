"""State that a recipe keeps beside a weight, such as a moving average.

A state is a float32 tensor of the weight's shape. The rank that owns a part of the FP32 main weight
owns the same part of the state, and updates it once in each optimizer step. An element depends only
on the weight's element at the same place, so results do not depend on how the weight is divided.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megatron_fp4.errors import ConfigError


def key_of(name: str) -> str:
    """The key of the state called `name` in torch's optimizers and in checkpoints."""
    return f"fp4_{name}"


class WeightState(Protocol):
    """One state: how it starts, and how an optimizer step changes it."""

    def start(self, weight: Tensor) -> Tensor:
        """The state before the first update: float32, of the shape of `weight`.

        weight: a part of the FP32 main weight.
        """
        ...

    def update(self, state: Tensor, weight: Tensor) -> None:
        """Update the state in place after an optimizer step.

        state: from `start`, float32. weight: the same part of the FP32 main weight, after the step.
        """
        ...


@dataclass(frozen=True)
class WeightAverage:
    """The exponential moving average of the main weights, towards which rounding `ema` rounds W.

    Source: Q-EMA in "Oscillation-Reduced MXFP4 Training for Vision Transformers", arXiv 2502.20853,
    section 4.2.

    beta: in [0, 1); an update sets average = beta * average + (1 - beta) * W. Raises ConfigError
    for a beta outside of this range.
    """

    beta: float = 0.998

    def __post_init__(self) -> None:
        if not 0.0 <= self.beta < 1.0:
            raise ConfigError(f"beta is in [0, 1), not {self.beta}")

    def start(self, weight: Tensor) -> Tensor:
        return weight.detach().float().clone()

    def update(self, state: Tensor, weight: Tensor) -> None:
        # Three operations, each rounded once. A fused multiply-add would be used for some elements
        # of a part and not for others (the remainder after the vector instructions), so that bits
        # would depend on where a part begins.
        state.mul_(self.beta).add_(weight.detach().float() * (1.0 - self.beta))
