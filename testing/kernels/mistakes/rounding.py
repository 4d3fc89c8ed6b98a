"""Wrong roundings, for the mistakes of several comparisons."""

from __future__ import annotations

from typing import Any

import triton.language as tl


def halves_down(right: Any, bits: Any, CUT: Any) -> Any:
    """`encode.nearest_even` with ties down."""
    return (bits + ((1 << (CUT - 1)) - 1)) >> CUT


def halves_up(right: Any, bits: Any, CUT: Any) -> Any:
    """`encode.nearest_even` with ties up."""
    return (bits + (1 << (CUT - 1))) >> CUT


def left_in_float32(right: Any, low: Any, high: Any, *given: Any) -> Any:
    """A computed matrix is quantized in float32, without the rounding to BF16 that comes first.

    The kernel takes words of BF16, so the numbers are rounded to odd: toward zero, with the last
    bit set if anything was lost. Such a number is on the same side of every limit between two codes
    or scales as the float32 number, since these limits have even bits in BF16.
    """
    return _to_odd(low) | (_to_odd(high) << 16)


def _to_odd(number: Any) -> Any:
    bits = number.to(tl.int32, bitcast=True)
    return ((bits >> 16) & 0xFFFF) | ((bits & 0xFFFF) != 0).to(tl.int32)
