"""Known mistakes in the kernel of Q-Ramping's step."""

from __future__ import annotations

from typing import Any

from megatron_fp4.kernels import ramping
from testing.kernels.mistakes.injection import Mistake


def _rate_alone(right: Any, weight: Any, first: Any, second: Any, mean: Any, count: Any,
                *others: Any) -> Any:  # fmt: skip
    return right(weight, first, second, mean, count * 0 + 1, *others)


def _sum_for_mean(right: Any, weight: Any, first: Any, second: Any, mean: Any, count: Any,
                  *others: Any) -> Any:  # fmt: skip
    return right(weight, first, second, mean * count, count, *others)


def _in_each_step(right: Any, count: Any, period: Any) -> Any:
    return right(count, period * 0 + 1)


def _one_late(right: Any, count: Any, period: Any) -> Any:
    return right(count - 1, period)


RAMPING = {
    "the learning rate without the count": Mistake("", ramping.stepped, _rate_alone),
    "the sum of the gradients for their mean": Mistake("", ramping.stepped, _sum_for_mean),
    "all elements in each step": Mistake("", ramping._is_due, _in_each_step),
    "a step late": Mistake("", ramping._is_due, _one_late),
}
