"""Known mistakes in the kernels for float32 scales and for block scales in small floats."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import triton.language as tl

from megatron_fp4.kernels import (
    block_values,
    blocks,
    encode,
    float_blocks,
    float_scales,
    four_over_six,
    fp8_scales,
    gain,
    philox,
    quotients,
    rows,
    scale_rules,
    tile_hadamard,
)
from testing.kernels.mistakes.injection import Mistake, argument, result
from testing.kernels.mistakes.rounding import halves_down, halves_up


def _subnormal_cut_off(right: Any, v: Any, MANTISSA: Any, BIAS: Any) -> Any:
    subnormal = tl.abs(v) < 2.0 ** (1 - BIAS)
    return right(tl.where(subnormal, v * 0.99, v), MANTISSA, BIAS)


def _all_finite(right: Any, largest: Any, LIMIT: Any) -> Any:
    gamma, _ = right(largest, LIMIT)
    return gamma, largest >= 0


def _folded_along_1_alone(right: Any, *given: Any) -> Any:
    *others, AXIS, HAS_FOLD = given
    return right(*others, AXIS, HAS_FOLD and AXIS == 1)


def _halves_are_normal(right: Any, code: Any, MANTISSA: Any) -> Any:
    return right(code, MANTISSA) + tl.where((code & 7) == 1, 1 << (MANTISSA - 1), 0)


ROW_SCALES = {
    "a half is a normal number": Mistake("", rows.carrier_bytes, _halves_are_normal),
    "a line that is NaN is not counted": Mistake(
        "", rows._store_scales, argument("finite", lambda finite: finite | (finite == 0))
    ),
    "halves go down": Mistake("", encode.nearest_even, halves_down),
    "subnormal numbers are cut off": Mistake("", rows.fp8_code, _subnormal_cut_off),
    "a NaN is a number": Mistake("", rows._gamma, _all_finite),
    "nothing is folded": Mistake("", rows._folded, _folded_along_1_alone),
    "the other half first": Mistake("", encode.pack, lambda right, low, high: right(high, low)),
}


def _subnormal_scales_down(right: Any, wanted: Any, BIAS: Any, *given: Any) -> Any:
    step = 2.0 ** (-BIAS - 2)
    subnormal = wanted < 2.0 ** (1 - BIAS)
    return right(tl.where(subnormal, tl.floor(wanted / step) * step, wanted), BIAS, *given)


def _subnormal_as_normal(right: Any, code: Any, BIAS: Any) -> Any:
    return tl.where(code < 8, right(code + 8, BIAS) * 0.5, right(code, BIAS))


def _least_of_rows(right: Any, v: Any, ACROSS: Any, ALONG: Any) -> Any:
    by_row = right(v, 1, ALONG)
    lines, count = by_row.shape
    return tl.min(tl.reshape(by_row, (lines // ACROSS, ACROSS, count)), 1)


def _always_six(right: Any, v: Any, maxima: Any, six: Any, *given: Any) -> Any:
    return six


def _gain_as_it_is(right: Any, v: Any, scaled: Any, code: Any, *given: Any) -> Any:
    return code


def _of_the_last(right: Any, of_elements: Any, ALONG: Any) -> Any:
    rows, columns = of_elements.shape
    is_last = tl.arange(0, ALONG)[None, None, :] == ALONG - 1
    in_blocks = tl.reshape(of_elements, (rows, columns // ALONG, ALONG))
    return tl.sum(tl.where(is_last, in_blocks, 0), 2)


def _all_live(right: Any, v: Any, scaled: Any, scale: Any, live: Any, *given: Any) -> Any:
    return right(v, scaled, scale, live * 0 + 1, *given)


def _scale_to_nearest(right: Any, wanted: Any, random: Any, BIAS: Any, MAX: Any) -> Any:
    return float_scales.code_of(wanted, BIAS, MAX, False)


def _in_scales(right: Any, v: Any, code: Any, tensor_scale: Any, BIAS: Any, ALONG: Any) -> Any:
    scale = tl.maximum(float_scales.scale_of(code, BIAS), 1e-9)
    return right(v, code, tensor_scale, BIAS, ALONG) / scale


def _cut_to_bf16(v: Any) -> Any:
    return (v.to(tl.int32, bitcast=True) & -0x10000).to(tl.float32, bitcast=True)


BLOCK_SCALES = {
    "up is nearest": Mistake("ue5m3-up", float_scales.code_of, argument("UP", lambda _: False)),
    "subnormal scales go down": Mistake("e4m3-up-sr", float_scales.code_of, _subnormal_scales_down),
    "a subnormal scale is a normal one": Mistake(
        "e4m3", float_scales.scale_of, _subnormal_as_normal
    ),
    "an overflow spoils the rest": Mistake(
        "nvfp4", blocks._finite_or_0, lambda right, maxima: maxima
    ),
    "beyond 6": Mistake("e4m3", blocks._saturated, lambda right, magnitude: magnitude),
    "not inflated": Mistake(
        "nvfp4-17-16-sr",
        blocks._cast_launch,
        argument("quantizer", lambda quantizer: replace(quantizer, inflate=1.0)),
    ),
    "not prescaled": Mistake(
        "prescaled",
        blocks._cast_launch,
        argument("quantizer", lambda quantizer: replace(quantizer, prescale=1.0)),
    ),
    "a vanished scale": Mistake(
        "nvfp4",
        float_scales.divisor_of,
        result(lambda divisor: tl.where(divisor < float("inf"), divisor, 1.0)),
    ),
    "another element's bits": Mistake("prescaled", blocks._rest, argument("AXIS", lambda _: 1)),
    "no NaN": Mistake("ue5m3", blocks._scale_byte, argument("NAN", lambda _: 0)),
    "signs after the transform": Mistake(
        "transformed", tile_hadamard._matrix, result(lambda h: tl.trans(h))
    ),
    "float32 is read as BF16": Mistake("float32 e8m0-ceil-sr", blocks.loaded, result(_cut_to_bf16)),
    "one and a half is too large": Mistake(
        "float32 e8m0-ceil.", scale_rules.power_code, argument("maxima", lambda m: m * 1.0000002)
    ),
    "nothing is nearer below": Mistake(
        "float32 e8m0-nearest.", scale_rules.power_code, argument("RULE", lambda _: "floor")
    ),
    "the smallest power is zero": Mistake(
        "float32 e8m0-floor-sr", float_blocks.e8m0_scale, argument("byte", lambda b: b + (b == 0))
    ),
    "restored without signs": Mistake(
        "restored e8m0 32",
        block_values._restore_launch,
        argument("turn", lambda turn: turn._replace(SIGNED=False)),
    ),
    "a restored zero has no sign": Mistake(
        "restored e8m0 32", tile_hadamard.restored, result(lambda found: found + 0.0)
    ),
    "magnitudes alone": Mistake(
        "e4m3", block_values.bf16_of, argument("code", lambda code: code & 7)
    ),
    "one row's block": Mistake("2d", blocks._maxima, _least_of_rows),
    "the next scale is the first": Mistake(
        "in-fp8-16", fp8_scales._first, argument("wanted", lambda wanted: wanted * 1.2)
    ),
    "errors are not clipped": Mistake(
        "in-fp8-16", fp8_scales._off, argument("scaled", lambda scaled: tl.minimum(scaled, 6.0))
    ),
    "errors are not rounded": Mistake(
        "in-fp8-16", fp8_scales._off, lambda right, scaled: right(scaled * 1.001)
    ),
    "always six": Mistake("four-over-six", four_over_six.smaller_error, _always_six),
    "errors in units of the scale": Mistake("four-over-six", four_over_six._error, _in_scales),
    "estimates under larger scales": Mistake(
        "four-over-six-32", four_over_six._estimate, argument("divisor", lambda given: given * 1.1)
    ),
    "signs of another draw": Mistake(
        "transformed", philox.sign_words, argument("draw", lambda draw: draw + 1)
    ),
    "the gain as it is": Mistake("gain", gain.of_unit_gain, _gain_as_it_is),
    "the gain of blocks with a NaN": Mistake("gain", gain.correction, _all_live),
    "the bits of the last element": Mistake("gain-drawn", gain._firsts, _of_the_last),
    "a corrected scale to nearest": Mistake(
        "gain-drawn", float_scales.stochastic_code, _scale_to_nearest
    ),
    "ties of scales go up": Mistake("e4m3", encode.nearest_even, halves_up),
    "ties go up": Mistake(
        "e4m3", encode.nearest, argument("magnitudes", lambda given: given * 1.0000002)
    ),
}


def _rounded_twice(right: Any, a: Any, b: Any, c: Any, INTERPRETED: Any) -> Any:
    product = a * b
    return tl.where(tl.abs(product) < 1e-6, product + c, right(a, b, c, INTERPRETED))


QUOTIENTS = {
    # The error of the quotient, which is small, times the reciprocal.
    "a product is rounded before it is added": Mistake("some", quotients._fused, _rounded_twice),
}
