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


def _nothing_of_equals(right: Any, bits: Any, clamped: Any) -> Any:
    same = outliers._number(bits) == outliers._number(clamped)
    return tl.where(same, 0.0, right(bits, clamped))


# Of most, the narrowest matrix that has them.
_CASES = "33 features, 0.9"
OUTLIER_CLAMP = {
    "a rank too low": Mistake(_CASES, outliers.ranks, _low_rank_before),
    "a rank too high": Mistake(_CASES, outliers.ranks, _high_rank_after),
    "no neighbour": Mistake(_CASES, outliers._next, argument("rank", lambda rank: rank - 1)),
    "negative numbers the other way": Mistake(
        _CASES,
        outliers._key,
        result(lambda key: tl.where(key < 0x8000, 0x7FFF - key, key)),
    ),
    "a negative NaN is the lowest": Mistake(
        _CASES,
        outliers._key,
        lambda right, bits: tl.where(bits > 0xFF80, 0xFFFF - bits, right(bits)),
    ),
    "padding is zeros": Mistake(
        _CASES,
        outliers._keys,
        lambda right, bits, there: tl.where(there, right(bits, there), 0x8000),
    ),
    "a bound in float32": Mistake(
        "fine", outliers._number_of, result(lambda number: number.to(tl.float32))
    ),
    "a weight in float32": Mistake(
        "fine",
        outliers._bits,
        argument("x", lambda x: torch.tensor(x, dtype=torch.float32).item()),
    ),
    "a zero takes its bound's sign": Mistake(
        _CASES, outliers._own_zeros, lambda right, clamped, bits: clamped
    ),
    "a NaN bound clamps nothing": Mistake(
        _CASES, outliers._clamped, argument("invalid", lambda invalid: invalid & (invalid == 0))
    ),
    "Inf minus Inf is nothing": Mistake(_CASES, outliers._taken_off, _nothing_of_equals),
    "slots from 1": Mistake(_CASES, outliers._slots, result(lambda slot: slot + 1)),
    "slots that are left write over one": Mistake(
        "2 features, 0.9", outliers._first, result(lambda first: first * 0)
    ),
    "halves go down": Mistake("130 features", encode.nearest_even, halves_down),
}
