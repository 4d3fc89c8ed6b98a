"""Known mistakes in the kernel that writes FP8 carriers."""

from __future__ import annotations

import triton.language as tl

from megatron_fp4.kernels import carrier, encode
from testing.kernels.mistakes.injection import Mistake, argument, result
from testing.kernels.mistakes.rounding import halves_down

CARRIERS = {
    "halves go down": Mistake("48 x", encode.nearest_even, halves_down),
    "a NaN is the largest": Mistake(
        "16 x 96",
        carrier._row_exponent,
        lambda right, scales, TOP: tl.maximum(tl.max(scales, 1) - TOP, 1),
    ),
    "scales are powers of two": Mistake(
        "mse-fp8", carrier._bits, result(lambda bits: bits & 0x7F800000)
    ),
    "zeros are counted": Mistake(
        "48 x", carrier._nonzero, argument("words", lambda words: words | 0x77777777)
    ),
    "the other half first": Mistake(
        "16 x 96", carrier.looked_up, result(lambda halves: halves[::-1])
    ),
    "the first operand's place": Mistake(
        "16 x 96", carrier._operand, argument("program", lambda _: tl.program_id(0))
    ),
    "the first tile for all": Mistake("9632", carrier._convert, argument("block0", lambda _: 0)),
}
