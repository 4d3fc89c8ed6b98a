"""Quotients and histograms of sums."""

from __future__ import annotations

import math
from collections.abc import Sequence


def ratio(part: float, whole: float) -> float | None:
    """part / whole; None if the whole is zero or the result is no finite number."""
    quotient = part / whole if whole else math.nan
    return quotient if math.isfinite(quotient) else None


def decibels(signal: float, noise: float) -> float | None:
    """10 log10(signal / noise); None if either is zero."""
    quotient = ratio(signal, noise)
    return 10 * math.log10(quotient) if quotient else None


def histogram(counts: Sequence[float], first: int) -> dict[str, object]:
    """{"first": the first value with a count, "counts": from there to the last one that has one}.

    first: the value that counts[0] belongs to.
    """
    used = [i for i, count in enumerate(counts) if round(count)]
    if not used:
        return {"first": 0, "counts": []}
    return {
        "first": first + used[0],
        "counts": [round(count) for count in counts[used[0] : used[-1] + 1]],
    }
