"""Known mistakes in the RMSNorm that kernels compute, and in its gradients."""

from __future__ import annotations

from typing import Any

from megatron_fp4.kernels import encode, rms_norm
from testing.kernels.mistakes.injection import Mistake, argument
from testing.kernels.mistakes.rounding import left_in_float32

QUANTIZED = "quantized 96 x 256 ceil nearest axes (1,)"
GRADIENTS = "gradients 70 x 130 residual"
NORM = "norm 96 x 256"


def _without_offset(right: Any, word: Any, ZERO_CENTERED: Any) -> Any:
    return right(word, False)


RMS_NORM = {
    "a norm that is left out": Mistake(
        QUANTIZED, rms_norm.normed_words, lambda right, word, *given: word
    ),
    "a gain that is left out": Mistake(
        QUANTIZED, rms_norm.gains, lambda right, word, *given: (1.0, 1.0)
    ),
    "a mean of words": Mistake(NORM, rms_norm._factor, argument("words", lambda words: words * 2)),
    "eps is 0": Mistake(NORM, rms_norm._factor, argument("eps", lambda eps: eps * 0.0)),
    "not rounded to nearest": Mistake(
        QUANTIZED,
        encode.rounded_pairs,
        lambda right, low, high, *given: right(low - low * 2.0**-8, high, *given),
    ),
    "left in float32": Mistake(QUANTIZED, encode.rounded_pairs, left_in_float32),
    "a row twice": Mistake(GRADIENTS, rms_norm._row_of, argument("row", lambda row: row & -2)),
    "a gain that is not centered": Mistake(
        f"{NORM} zero-centered", rms_norm.gains, _without_offset
    ),
}
