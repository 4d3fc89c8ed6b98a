"""Wrong roundings, for the mistakes of several comparisons."""

from __future__ import annotations

from typing import Any


def halves_down(right: Any, bits: Any, CUT: Any) -> Any:
    """`encode.nearest_even` with ties down."""
    return (bits + ((1 << (CUT - 1)) - 1)) >> CUT


def halves_up(right: Any, bits: Any, CUT: Any) -> Any:
    """`encode.nearest_even` with ties up."""
    return (bits + (1 << (CUT - 1))) >> CUT
