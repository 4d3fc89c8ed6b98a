"""Known mistakes in the kernel that scales products."""

from __future__ import annotations

from typing import Any

import triton.language as tl

from megatron_fp4.kernels import encode, scaled_product
from testing.kernels.mistakes.injection import Mistake
from testing.kernels.mistakes.rounding import halves_up


def _truncated(right: Any, x: Any) -> Any:
    return right((x.to(tl.int32, bitcast=True) & -0x10000).to(tl.float32, bitcast=True))


SCALED_PRODUCT = {
    "the next row's factor": Mistake(
        "",
        scaled_product._factor,
        lambda right, ptr, lines, n_lines, of: right(ptr, (lines + 1) % n_lines, n_lines, of),
    ),
    "truncated": Mistake("", encode.bf16_bits, _truncated),
    "ties up": Mistake("", encode.nearest_even, halves_up),
}
