"""Q-Ramping: elements of a weight whose codes oscillate are updated less often, by more at once.

Source: "Oscillation-Reduced MXFP4 Training for Vision Transformers", arXiv 2502.20853, section 4.3.
Each element has a *period* N, the number of steps between two of its updates. A calibration, some
AdamW steps that are undone afterwards, measures from what the periods follow. Every function here
works element by element: an element's result depends on that element alone, so a part of a weight
has the bits that it has in the whole.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_fp4.arithmetic.offload import copy_of
from megatron_fp4.errors import ConfigError

# Counts and periods are int16. A count is below twice the longest period: it goes on when a shorter
# period takes the place of a longer one.
LONGEST = 16383
_LEAST_MOVEMENT = 1e-8  # added to the divisor of a ratio
# What an optimizer keeps beside a weight with periods; see `Ramped`.
STATES = {
    "ramping_sum": torch.float32,
    "ramping_count": torch.int16,
    "ramping_period": torch.int16,
}
FIRST = {"ramping_sum": 0, "ramping_count": 0, "ramping_period": 1}  # before the first step
STATE_BYTES = sum(dtype.itemsize for dtype in STATES.values())  # of an element
# Of an element during a calibration: copies of any weight and of Adam's two moments, and what
# `Movement` has of one with periods, in float32.
SNAPSHOT_BYTES, MOVEMENT_BYTES = 3 * 4, 4 * 4


@dataclass(frozen=True)
class Ramping:
    """What Q-Ramping does to the weights of a recipe.

    k1, k2: an element with the ratio R (see `Movement`) has the period k2 * floor(R / k1) + 1, or
        the longest period if that is shorter. k1 is above 0, k2 an integer, at least 1.
    interval: the steps from one calibration to the next, more than `calibration`.
    interval_share: the same as a share of training, in (0, 1]. It replaces `interval`.
    calibration: the number of AdamW steps of a calibration, at least 1.
    most: the longest period, in [1, 16383]; None is `interval`, or 16383 if that is smaller.
    Raises ConfigError for a value outside of its range.
    """

    k1: float = 16.0
    k2: int = 5
    interval: int = 1251  # an epoch of ImageNet in batches of 1,024, as in the paper
    interval_share: float | None = None
    calibration: int = 30
    most: int | None = None

    def __post_init__(self) -> None:
        if not 0.0 < self.k1 < math.inf:
            raise ConfigError(f"k1 is a ratio above 0, not {self.k1}")
        if self.k2 < 1 or self.k2 != int(self.k2):
            raise ConfigError(f"k2 is a number of steps, at least 1, not {self.k2}")
        if self.calibration < 1:
            raise ConfigError(f"calibration is at least 1 step, not {self.calibration}")
        if self.interval_share is not None and not 0.0 < self.interval_share <= 1.0:
            raise ConfigError(
                f"interval_share is a share of training in (0, 1], not {self.interval_share}"
            )
        if self.interval_share is None and self.interval <= self.calibration:
            raise ConfigError(
                f"interval is {self.interval} steps, no more than the {self.calibration} of a "
                "calibration; choose a longer interval"
            )
        if self.most is not None and not 1 <= self.most <= LONGEST:
            raise ConfigError(f"most is a number of steps in [1, {LONGEST}], not {self.most}")

    def __str__(self) -> str:
        """How weights are updated, in a few words."""
        every = f"{self.interval} steps"
        if self.interval_share is not None:
            every = f"{self.interval_share:g} of training"
        most = "the interval" if self.most is None else str(self.most)
        return (
            f"every {self.k2:g} * floor(R / {self.k1:g}) + 1 steps, at most {most}; R is measured "
            f"over {self.calibration} steps every {every}"
        )

    def interval_in(self, total: int) -> int:
        """The steps from one calibration to the next, in a training of `total` steps.

        Raises ConfigError if `interval_share` of them is no longer than a calibration.
        """
        if self.interval_share is None:
            return self.interval
        steps = round(self.interval_share * total)
        if steps <= self.calibration:
            raise ConfigError(
                f"ramping_interval_share {self.interval_share:g} of {total} steps is {steps}, no "
                f"more than the {self.calibration} of a calibration; choose a larger share, or "
                "train longer"
            )
        return steps

    def calibrates_before(self, step: int, total: int) -> bool:
        """Whether a calibration precedes step `step`, from 0, of a training of `total` steps.

        It does if the step is a multiple of the interval and not 0, and if no fewer steps are left
        than a calibration takes, since the data may end. Raises ConfigError as `interval_in`.
        """
        return step > 0 and step % self.interval_in(total) == 0 and step + self.calibration <= total

    def calibrations_in(self, total: int) -> int:
        """The number of calibrations in a training of `total` steps."""
        return max((total - self.calibration) // self.interval_in(total), 0)

    def periods(self, ratio: Tensor, total: int) -> Tensor:
        """The period of each element: int16, of the shape of `ratio`.

        ratio: float32, from `Movement.ratio`. A NaN in it has the period 1, as without Q-Ramping.
        total: the number of steps of the training.
        """
        most = self.most or min(self.interval_in(total), LONGEST)
        periods = self.k2 * torch.floor(ratio.nan_to_num(nan=0.0) / self.k1) + 1
        return periods.clamp(max=most).to(torch.int16)


@dataclass(eq=False)
class Movement:
    """How far a weight and its quantized values have moved, step by step, element by element.

    weight, quantized: after the last step, in a dtype of their own.
    of_weight, of_quantized: the sums of the distances of all steps so far.
    All have one shape, the weight's or that of a part of it. They may be in pinned memory of the
    host (`copy_of`); the arithmetic is done where the weight is.
    """

    weight: Tensor
    quantized: Tensor
    of_weight: Tensor
    of_quantized: Tensor

    @classmethod
    def start(cls, weight: Tensor, quantized: Tensor, offload: bool = False) -> Movement:
        """weight, quantized: before the first step, float32; copied. offload: as in `copy_of`."""
        sums = torch.zeros_like(weight), torch.zeros_like(quantized)
        return cls(*(copy_of(each, offload) for each in (weight, quantized, *sums)))

    @torch.no_grad()
    def add(self, weight: Tensor, quantized: Tensor) -> None:
        """Adds a step. weight, quantized: after it."""
        _add_distance(self.of_weight, self.weight, weight)
        _add_distance(self.of_quantized, self.quantized, quantized)

    def ratio(self, device: torch.device | None = None) -> Tensor:
        """R: the distance of the quantized values for each unit of the weight's.

        device: where R is computed; None: where the sums are.
        """
        device = device or self.of_weight.device
        divisor = self.of_weight.to(device, non_blocking=True) + _LEAST_MOVEMENT
        return self.of_quantized.to(device, non_blocking=True) / divisor


def _add_distance(total: Tensor, old: Tensor, new: Tensor) -> None:
    """Adds |new - old| to `total` and sets `old` to `new`, computing on the device of `new`."""
    moved = (new - old.to(new.device, non_blocking=True)).abs_()
    total.copy_(moved.add_(total.to(new.device, non_blocking=True)), non_blocking=True)
    old.copy_(new, non_blocking=True)


@dataclass(eq=False)
class Ramped:
    """A weight with its state in the optimizer; all of one shape.

    weight, first, second: the weight and Adam's two moments, float32 (or float64, for tests).
    sum: the sum of the gradients since an element's last update, in the weight's dtype.
    count: the number of those gradients, int16.
    period: the steps between two updates of an element, int16, at least 1.
    """

    weight: Tensor
    first: Tensor
    second: Tensor
    sum: Tensor
    count: Tensor
    period: Tensor


class Adam(NamedTuple):
    """The scalars of an AdamW step.

    step: the number of the step, from 1, the same for all elements: bias is corrected by it, and
        not by an element's own number of updates.
    """

    step: int
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float


@torch.no_grad()
def update(of: Ramped, gradient: Tensor, adam: Adam) -> None:
    """One step, in place: each element is decayed, and those whose count is due are updated.

    An element is due where its count is a multiple of its period. It is updated by the mean of its
    gradients, at the learning rate times their number. Where all periods are 1, the step is that of
    torch.optim.AdamW(foreach=False), bit for bit.

    gradient: of the weight's shape and dtype.
    """
    # AdamW's own operations, since lerp and addcmul may be fused multiply-adds. For each of them
    # torch fuses all elements or none, so no bit depends on where a part of a weight begins.
    beta1, beta2 = adam.betas
    rate = adam.lr / (1 - beta1**adam.step)
    root = (1 - beta2**adam.step) ** 0.5
    of.weight.mul_(1 - adam.lr * adam.weight_decay)
    of.sum.add_(gradient)
    of.count.add_(1)
    due = of.count % of.period == 0
    count = of.count.to(of.weight.dtype)
    mean = of.sum / count
    first = of.first.lerp(mean, 1 - beta1)
    second = (of.second * beta2).addcmul_(mean, mean, value=1 - beta2)
    divisor = (second.sqrt() / root).add_(adam.eps)
    weight = of.weight + count.mul_(-rate).mul_(first).div_(divisor)
    for old, new in ((of.weight, weight), (of.first, first), (of.second, second)):
        old.copy_(torch.where(due, new, old))
    of.sum.masked_fill_(due, 0)
    of.count.masked_fill_(due, 0)
