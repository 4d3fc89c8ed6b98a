"""State that a recipe keeps beside a weight, such as a moving average.

A state is a float32 tensor of the weight's shape. The rank that owns a part of the FP32 main weight
owns the same part of the state, and updates it once in each optimizer step. An element depends only
on the weight's element at the same place, so results do not depend on how the weight is divided.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megatron_fp4.errors import ConfigError


def key_of(name: str) -> str:
    """The key of the state called `name` in torch's optimizers and in checkpoints."""
    return f"fp4_{name}"


@dataclass(frozen=True)
class OptimizerStep:
    """An optimizer step, after which states are updated.

    number: of the step, from 1. total: the number of steps of the training. rate: the step's
        learning rate as a share of the schedule's largest.
    """

    number: int
    total: int
    rate: float = 1.0


Blend = Callable[[Tensor, Tensor, float], None]


def blend(average: Tensor, weight: Tensor, beta: float) -> None:
    """average = beta * average + (1 - beta) * weight, in place.

    average: float32. weight: of the same shape. Both products and the sum are rounded to float32.
    """
    # A fused multiply-add would be used for some elements of a part and not for others (the
    # remainder after the vector instructions), so that bits would depend on where a part begins.
    average.mul_(beta).add_(weight.detach().float() * (1.0 - beta))


class WeightState(Protocol):
    """One state: how it starts, and how an optimizer step changes it."""

    def start(self, weight: Tensor) -> Tensor:
        """The state before the first update: float32, of the shape of `weight`.

        weight: a part of the FP32 main weight.
        """
        ...

    def update(
        self, state: Tensor, weight: Tensor, step: OptimizerStep, blend: Blend = blend
    ) -> None:
        """Update the state in place after an optimizer step.

        state: from `start`, float32. weight: the same part of the FP32 main weight, after the step.
        blend: the function `blend`, or a kernel with the same bits.
        """
        ...


@dataclass(frozen=True)
class WeightAverage:
    """The exponential moving average of the main weights, towards which rounding `ema` rounds W.

    Source: Q-EMA in "Oscillation-Reduced MXFP4 Training for Vision Transformers", arXiv 2502.20853,
    section 4.2. `half_life`, `follows_lr` and `warmup` are this package's own.

    beta: in [0, 1); an update sets average = beta * average + (1 - beta) * W. The weights of the
        last 1 / (1 - beta) steps, the *window*, make up most of the average.
    half_life: the share of training after which a weight's part of the average has halved, above 0.
        It replaces `beta`.
    follows_lr: the window is longer in proportion as the learning rate is lower than its largest
        value, so that the average stays about as far behind the weight.
    warmup: the number of steps over which the window grows from 1 to its full length.
    delay: the number of first steps after which the average is the weight itself.
    Raises ConfigError for a value outside of its range.
    """

    beta: float = 0.998
    half_life: float | None = None
    follows_lr: bool = False
    warmup: int = 0
    delay: int = 0

    def __post_init__(self) -> None:
        if self.half_life is not None and self.beta != WeightAverage.beta:
            raise ConfigError("half_life replaces beta: give one of the two")
        if not 0.0 <= self.beta < 1.0:
            raise ConfigError(f"beta is in [0, 1), not {self.beta}")
        if self.half_life is not None and not 0.0 < self.half_life < math.inf:
            raise ConfigError(f"half_life is a share of training above 0, not {self.half_life}")
        for name in ("warmup", "delay"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is a number of steps, not {getattr(self, name)}")

    def start(self, weight: Tensor) -> Tensor:
        return weight.detach().float().clone()

    def update(
        self, state: Tensor, weight: Tensor, step: OptimizerStep, blend: Blend = blend
    ) -> None:
        blend(state, weight, self.beta_at(step))

    def beta_at(self, step: OptimizerStep) -> float:
        """The beta of the update after a step."""
        number = step.number - self.delay
        if number <= 0:
            return 0.0
        beta = self.beta
        if self.half_life is not None:
            beta = 0.5 ** (1 / max(self.half_life * step.total, _SHORTEST))
        window = 1 / (1 - beta)
        if self.follows_lr:
            window /= max(step.rate, _LOWEST_RATE)
        if number < self.warmup:
            window = 1 + (window - 1) * number / self.warmup
        changes = self.follows_lr or number < self.warmup
        return 1 - 1 / window if changes else beta

    def __str__(self) -> str:
        """What is averaged, in a few words."""
        words = f"beta {self.beta:g}"
        if self.half_life is not None:
            words = f"half-life {self.half_life:g} of training"
        words += ", window in inverse proportion to the learning rate" if self.follows_lr else ""
        words += f", growing over {self.warmup} steps" if self.warmup else ""
        return words + (f", from step {self.delay + 1} on" if self.delay else "")


_SHORTEST = 1e-3  # steps of a half-life, so that beta is a number
# A learning rate of 0 would stop the average for good.
_LOWEST_RATE = 0.01
