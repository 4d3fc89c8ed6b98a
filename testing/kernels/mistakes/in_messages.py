"""Known mistakes in the kernels of gradients on their way between data-parallel ranks."""

from __future__ import annotations

from typing import Any

import triton.language as tl

from megatron_fp4.kernels import float_blocks, messages, philox
from testing.kernels.mistakes.injection import Mistake, argument, result

_E4M3, _RUNS = "aligned e4m3 float32", "unaligned e5m2 float32"


def _whole(right: Any, segment: Any, rows: Any, columns: Any) -> Any:
    """As if each segment were the first of its message."""
    elements, there, blocks = right(segment, rows, columns)
    return elements, there, blocks * 0


def _no_rank(right: Any, segment: Any, rank: Any, *others: Any) -> Any:
    return right(segment, rank * 0, *others)


def _with_others(right: Any, segment: Any, *others: Any) -> Any:
    """As if sums of elements that are not there were sums too; only their encoding shows it."""
    _, there, _ = messages._elements(segment, *others[-2:])
    return tl.where(there, right(segment, *others), 1e30)


def _at_threshold(
    right: Any, steps: Any, integer: Any, rest: Any, random: Any, *others: Any
) -> Any:
    return rest * 65536 >= random


MESSAGES = {
    "bits without the rank": Mistake(_E4M3, messages._random, _no_rank),
    "a place in the rank's parameter": Mistake(
        _RUNS, messages._indices, lambda right, segment, *others: right(segment, *others) % 1024
    ),
    "a half of another element": Mistake(
        _RUNS, philox.random16, argument("index", lambda index: index + 1)
    ),
    "sums of what is not there": Mistake(_E4M3, messages._sums, _with_others),
    "all scales in one place": Mistake(_E4M3, messages._elements, _whole),
    "a scale too small": Mistake(_E4M3, float_blocks.scale_byte, result(lambda byte: byte - 1)),
    "up where the fraction is the threshold": Mistake(_E4M3, float_blocks._is_up, _at_threshold),
    "NaN unseen": Mistake(
        _E4M3, float_blocks.encoded, result(lambda found: (found[0], found[1] & 127))
    ),
    "signs are lost": Mistake(
        _E4M3, float_blocks.decoded, argument("codes", lambda codes: codes & 127)
    ),
    "BF16 rounded by half the bits": Mistake(
        "aligned bf16 float32",
        float_blocks._in_bf16,
        argument("random", lambda random: random >> 1),
    ),
}
