"""Known mistakes in the SwiGLU that kernels compute, and in its gradient."""

from __future__ import annotations

from typing import Any

from megatron_fp4.kernels import encode, source, swiglu
from testing.kernels.mistakes.injection import Mistake, argument
from testing.kernels.mistakes.rounding import left_in_float32

QUANTIZED = "result 96 x 256 ceil nearest axes (1,)"
IN_E4M3 = "gradient 96 x 256 y in E4M3"
GRADIENT = "gradient 32 x 128 ceil nearest axes (1, 0)"


def _without_the_slope(right: Any, gradient: Any, gate: Any, up: Any, *given: Any) -> Any:
    """As if silu were gate times a constant."""
    sigmoid = swiglu._sigmoid(gate, *given)
    return gradient * up * sigmoid, gradient * (gate * sigmoid)


def _halves_exchanged(right: Any, *given: Any) -> Any:
    left, other = right(*given)
    return other, left


def _of_the_left_half(
    right: Any, x: Any, rows: Any, column0: Any, n_rows: Any, n_columns: Any, *given: Any
) -> Any:
    return right(x, rows, column0 % (n_columns // 2), n_rows, n_columns, *given)


def _nan_is_480(right: Any, byte: Any) -> Any:
    """As if E4M3 had no NaN."""
    return swiglu.tl.where((byte & 0x7F) == 0x7F, 480.0, right(byte))


def _subnormal_is_0(right: Any, byte: Any) -> Any:
    return swiglu.tl.where((byte & 0x7F) < 8, 0.0, right(byte))


SWIGLU = {
    "the gate is the right half": Mistake(
        QUANTIZED, swiglu._activated, lambda right, gate, up, *given: right(up, gate, *given)
    ),
    "not rounded to nearest": Mistake(
        QUANTIZED,
        encode.rounded_pairs,
        lambda right, low, high, *given: right(low - low * 2.0**-8, high, *given),
    ),
    "left in float32": Mistake(QUANTIZED, encode.rounded_pairs, left_in_float32),
    "a gradient left in float32": Mistake(GRADIENT, encode.rounded_pairs, left_in_float32),
    "a gate without a slope": Mistake(GRADIENT, swiglu._gradients, _without_the_slope),
    "gradients in each other's half": Mistake(GRADIENT, swiglu.gradient_words, _halves_exchanged),
    "a NaN of E4M3 is a number": Mistake(IN_E4M3, swiglu._of_e4m3, _nan_is_480),
    "subnormal numbers of E4M3 are 0": Mistake(IN_E4M3, swiglu._of_e4m3, _subnormal_is_0),
    "one half twice": Mistake(GRADIENT, source.read_tile, _of_the_left_half),
    "a row of the other width": Mistake(
        "result 14 x 2058", swiglu._flat, argument("words", lambda words: words - 1)
    ),
}
