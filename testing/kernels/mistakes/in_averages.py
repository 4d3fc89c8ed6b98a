"""Known mistakes in the kernel that updates averages of weights."""

from __future__ import annotations

from typing import Any

from megatron_fp4.kernels import averages
from testing.kernels.mistakes.injection import Mistake


def _lerp(right: Any, old: Any, new: Any, beta: Any, rest: Any) -> Any:
    return old + (new - old) * rest


def _old_weight(right: Any, old: Any, new: Any, beta: Any, rest: Any) -> Any:
    return right(old, old, beta, rest)


AVERAGES = {
    "rounded in another order": Mistake("", averages._blended, _lerp),
    "the weight is not read": Mistake("", averages._blended, _old_weight),
}
