"""Known mistakes in the kernels of gradients on their way between data-parallel ranks."""

from __future__ import annotations

from typing import Any

from megatron_fp4.kernels import float_blocks, messages
from testing.kernels.mistakes.injection import Mistake, argument, result

_E4M3, _RUNS = "aligned e4m3 float32", "unaligned e5m2 float32"


def _whole(right: Any, segment: Any, rows: Any, columns: Any) -> Any:
    """As if each segment were the first of its message."""
    elements, there, blocks = right(segment, rows, columns)
    return elements, there, blocks * 0


def _no_rank(right: Any, segment: Any, rank: Any, *others: Any) -> Any:
    return right(segment, rank * 0, *others)


MESSAGES = {
    "bits without the rank": Mistake(_E4M3, messages._random, _no_rank),
    "a place in the rank's parameter": Mistake(
        _RUNS, messages._indices, lambda right, segment, *others: right(segment, *others) % 1024
    ),
    "a half of another element": Mistake(
        _RUNS, messages._half, argument("index", lambda index: index + 1)
    ),
    "all scales in one place": Mistake(_E4M3, messages._elements, _whole),
    "NaN unseen": Mistake(
        _E4M3,
        float_blocks.scale_bytes,
        argument("largest", lambda largest: largest - (largest >= 0x7F800000) * 0x1000000),
    ),
    "a scale too small": Mistake(_E4M3, float_blocks.scale_bytes, result(lambda byte: byte - 1)),
    "up where the fraction is the threshold": Mistake(
        _E4M3,
        float_blocks._is_up,
        lambda right, fraction, random: fraction * 65536 >= random,
    ),
    "signs are lost": Mistake(
        _E4M3, float_blocks.decoded_codes, argument("code", lambda code: code & 127)
    ),
    "BF16 rounded by half the bits": Mistake(
        "aligned bf16 float32",
        messages._stochastic_bf16,
        argument("random", lambda random: random >> 1),
    ),
}
