"""Known mistakes in the kernels of dge-occ: DGE's factor, and the clamp of outliers."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl

from megatron_fp4.kernels import encode, estimator, outliers
from testing.kernels.mistakes.injection import Mistake, argument, result
from testing.kernels.mistakes.rounding import halves_down

DGE_FACTOR = {
    "of 3 the step of 4": Mistake(
        "",
        estimator._per_unit,
        argument("x", lambda x: tl.where(x < 3.0, x, tl.maximum(x, 4.0))),
    ),
    "the place in half a step": Mistake(
        "", estimator._place, result(lambda place: (place - 1.0) * 0.5)
    ),
    "a code is one too small": Mistake(
        "", estimator._inverse, argument("code", lambda code: tl.maximum(code - 1, 0))
    ),
    "no NaN": Mistake(
        "",
        estimator._factor,
        result(lambda factor: tl.where(factor == factor, factor, 0.0)),
    ),
}


def _low_rank_before(right: Any, q: float, features: int) -> tuple[int, int, float]:
    below, above, weight = right(q, features)
    return below - (q < 0.5), above, weight


def _high_rank_after(right: Any, q: float, features: int) -> tuple[int, int, float]:
    below, above, weight = right(q, features)
    return below + (q > 0.5), above, weight


def _nothing_of_equals(right: Any, a: Any, b: Any, NATIVE: Any) -> Any:
    low = tl.where(((a ^ b) & 0xFFFF) == 0, 0, 0xFFFF)
    high = tl.where((a ^ b) >> 16 == 0, 0, -0x10000)
    return right(a, b, NATIVE) & (low | high)


def _nan_below(right: Any, x: Any, bound: Any, OP: Any) -> Any:
    return (right(x, bound, OP) | (x != x)) if OP == "lt" else right(x, bound, OP)


def _equals_to_the_bound(right: Any, words: Any, low: Any, high: Any, NATIVE: Any) -> Any:
    mask = outliers._mask(words, low, "le", NATIVE)
    return right((words & ~mask) | ((low | (low << 16)) & mask), low, high, NATIVE)


# Of most, the narrowest matrix that has them.
_CASES = "34 features, 0.9"
OUTLIER_CLAMP = {
    "a rank too low": Mistake(_CASES, outliers.ranks, _low_rank_before),
    "a rank too high": Mistake(_CASES, outliers.ranks, _high_rank_after),
    "no neighbour": Mistake(_CASES, outliers._next, argument("rank", lambda rank: rank - 1)),
    "negative numbers the other way": Mistake(
        _CASES,
        outliers._bits_of,
        lambda right, key: tl.where(key < 0x8000, key + 0x8000, right(key)),
    ),
    "a NaN is the lowest": Mistake(_CASES, outliers._holds, _nan_below),
    "padding is zeros": Mistake(
        _CASES, outliers._padded, lambda right, words, there: tl.where(there, words, 0)
    ),
    "a bound in float32": Mistake("fine", outliers._wide, lambda right, x: x),
    "a weight in float32": Mistake(
        "fine",
        outliers._bits,
        argument("x", lambda x: torch.tensor(x, dtype=torch.float32).item()),
    ),
    "a zero takes its bound's sign": Mistake(_CASES, outliers._clamped, _equals_to_the_bound),
    "a NaN bound clamps nothing": Mistake(
        _CASES, outliers._either_nan, result(lambda invalid: invalid & (invalid == 0))
    ),
    "Inf minus Inf is nothing": Mistake(_CASES, outliers._minus, _nothing_of_equals),
    "slots from 1": Mistake(_CASES, outliers._slots, result(lambda slot: slot + 1)),
    "slots that are left write over one": Mistake(
        "2 features, 0.9", outliers._first, result(lambda first: first * 0)
    ),
    "halves go down": Mistake(_CASES, encode.nearest_even, halves_down),
}
