"""Known mistakes in the MXFP4 quantize kernels, and in the carriers that they write."""

from __future__ import annotations

from typing import Any

import triton.language as tl

from megatron_fp4.kernels import (
    carrier,
    decode,
    encode,
    exponents,
    fp8,
    hadamard,
    philox,
    quantize,
    tile_mxfp4,
)
from testing.kernels.mistakes.injection import Mistake, argument, result

# Words that choose cases; one case is enough for most mistakes.
NEAREST, EMA = "floor nearest 1.0 axes (1, 0).", "ceil ema 1.0 axes (1, 0)."
MSE = "mse nearest 1.0 axes (1, 0)."
NEAREST_SCALES = "nearest nearest 1.0 axes (1, 0)."
STOCHASTIC = "floor stochastic 1.0 axes (1, 0) shard"
SIGNS = "axes (1, 0) group 64 shard signs"
CARRIED = "ceil nearest 1.0 axes (1, 0) torch.float8_e4m3fn ."

# --- codes, scales and signs ----------------------------------------------------------------------


def _half_is_whole(right: Any, magnitudes: Any, signed: Any, whole: Any, *given: Any) -> Any:
    _, *others = given  # the first is 2^(-s - 1)
    return right(magnitudes, signed, whole, whole, *others)


def _what_is_not_finite_too(right: Any, magnitudes: Any, signed: Any, *given: Any) -> Any:
    return right(signed & 0x7FFF7FFF, signed, *given)


def _no_signs_of_zeros(pairs: Any) -> Any:
    pairs = tl.where((pairs & 0x7FFF) == 0, pairs & ~0x8000, pairs)
    return tl.where((pairs & 0x7FFF0000) == 0, pairs & 0x7FFFFFFF, pairs)


CODES = {
    "ties go up": Mistake(
        NEAREST, encode.nearest_pairs, argument("magnitudes", lambda pairs: pairs + 0x10001)
    ),
    "from 4 on steps of 1": Mistake(NEAREST, encode.nearest_pairs, _half_is_whole),
    "beyond 6": Mistake(NEAREST, encode.nearest_pairs, argument("CLIPS", lambda _: False)),
    "6 is 4": Mistake(
        NEAREST,
        encode.nearest_pairs,
        result(lambda codes: codes - tl.where(((codes >> 16) & 7) == 7, 0x10000, 0)),
    ),
    "Inf in the next column": Mistake("huge", encode.nearest_pairs, _what_is_not_finite_too),
    "1.5 is clipped": Mistake(
        "ceil nearest 1.0 axes (1, 0).",
        exponents.of_maxima,
        argument("maxima", lambda maxima: maxima + 0x10001),
    ),
    "floor in place of nearest": Mistake(
        NEAREST_SCALES,
        exponents.of_maxima,
        argument("ROUNDING", lambda rounding: rounding._replace(RULE="floor")),
    ),
    "ceil in place of nearest": Mistake(
        NEAREST_SCALES,
        exponents.of_maxima,
        argument("ROUNDING", lambda rounding: rounding._replace(RULE="ceil")),
    ),
    "1.125 takes the scale before": Mistake(
        NEAREST_SCALES,
        exponents.of_maxima,
        argument("maxima", lambda maxima: tl.maximum(maxima, 0x10001) - 0x10001),
    ),
    "errors beyond 6 are not counted": Mistake(MSE, exponents._wider, result(lambda e: e * 0)),
    "errors are not squared": Mistake(MSE, exponents._wider, result(lambda e: e * 0.25)),
    "errors below 2 are not counted": Mistake(MSE, exponents._finer, result(lambda e: e * 0)),
    "a tie takes twice the scale": Mistake(
        MSE, exponents.more_errors, result(lambda more: tl.where(more == 0, -1, more))
    ),
    "NaN is hidden": Mistake(NEAREST, encode.live, argument("maxima", lambda maxima: maxima * 0)),
    "no sign of odd columns": Mistake(
        NEAREST, encode.nearest_pairs, argument("signed", lambda pairs: pairs & 0xFFFF)
    ),
    "no sign of odd elements": Mistake(
        STOCHASTIC, encode.signs, argument("odd", lambda signs: signs * 0)
    ),
    "no sign of zeros": Mistake(
        STOCHASTIC, encode.sign_bytes, argument("pairs", _no_signs_of_zeros)
    ),
    "1/2 is decoded as 3/4": Mistake(
        "packed",
        decode._bf16_of_codes,
        result(lambda bits: bits + tl.where((bits & 0x7FFF) == 0x3F00, 0x40, 0)),
    ),
}

# --- rounding towards an average ------------------------------------------------------------------


def _magnitude_of_average(right: Any, half: Any, pairs: Any, inverse: Any, average: Any) -> Any:
    signed = encode.unpacked(pairs).to(tl.int32, bitcast=True)
    average = tl.abs(average)
    return right(half, pairs, inverse, tl.where(signed < 0, -average, average))


AVERAGES = {
    "midway goes down": Mistake(
        EMA, encode.nearer, argument("average", lambda average: average * (1 - 2.0**-23))
    ),
    "an average's magnitude": Mistake(EMA, encode.nearer, _magnitude_of_average),
    "the grid's points move": Mistake(
        EMA, encode._is_between, lambda right, rest, *given: right(rest, *given) | (rest == 0)
    ),
    "zeros move": Mistake(
        EMA,
        encode._is_between,
        lambda right, rest, code, bits: right(rest, code, bits) | (code == 0),
    ),
    "small numbers stay": Mistake(
        EMA, encode._is_between, lambda right, rest, code, bits: rest > 0
    ),
    "an average that is no number": Mistake(
        EMA, tile_mxfp4._live, argument("average", lambda average: tl.zeros_like(average))
    ),
}

# --- random bits and transforms -------------------------------------------------------------------


def _without_step(key: Any) -> Any:
    step, *seed = key
    return (step * 0, *seed)


def _low_halves_twice(rest: Any) -> Any:
    shape = tuple(rest.shape)
    low, _ = tl.split(tl.reshape(rest, (*shape[:-1], shape[-1] // 2, 2)))
    return tl.reshape(tl.join(low, low), shape)


DRAWN = {
    "a whole's bits": Mistake(  # as if this shard's groups were all of a row
        STOCHASTIC, philox.group_indices, argument("place", lambda place: (*place[:4], place[3]))
    ),
    "words in another order": Mistake(
        STOCHASTIC, philox.philox, result(lambda words: [words[i] for i in (0, 2, 1, 3)])
    ),
    "half a draw twice": Mistake(STOCHASTIC, philox.rest16, result(_low_halves_twice)),
    "one draw for two streams": Mistake(
        STOCHASTIC, quantize._quantize_launch, argument("shared", lambda _: True)
    ),
    "no step in memory": Mistake("memory", philox.rest_of_tile, argument("key", _without_step)),
    "no draw in memory": Mistake(
        "memory", philox.sign_words, argument("draw", lambda draw: draw * 0)
    ),
    "the draw's place": Mistake(SIGNS, philox._signs_index, lambda right, draw: draw.to(tl.int64)),
    "signs of no step": Mistake(SIGNS, philox.sign_words, argument("key", _without_step)),
    "signs of another half": Mistake(
        "axes (1, 0) group 64 shard",
        hadamard._entries,
        argument("signs", lambda words: [words[i] for i in (1, 0, 2, 3)]),
    ),
    "sums for differences": Mistake(
        "0.75 axes (1,) group 64.",
        hadamard._sum_and_difference,
        lambda right, first, second: tl.join(first + second, first + second),
    ),
    "the next group's rows": Mistake(
        "(0,) group 32", hadamard._row_along_columns, argument("GROUP", lambda _: 64)
    ),
}

# --- carriers -------------------------------------------------------------------------------------

WRITTEN_CARRIERS = {
    "carriers of another power": Mistake(CARRIED, fp8.quick_table, argument("k", lambda k: k + 1)),
    "what is not finite is a sample": Mistake(
        "Inf in columns", fp8._finite_or_0, lambda right, magnitude: magnitude
    ),
    "all blocks fit": Mistake(CARRIED, carrier._fits, lambda right, scales, *_: scales >= 0),
    "a subnormal byte": Mistake(
        "nearest 1.0 axes (1, 0) packed torch",
        carrier._fits,
        argument("LOWEST", lambda lowest: lowest - 1),
    ),
    "NaN fits": Mistake(
        "huge", carrier._fits, argument("scales", lambda scales: tl.minimum(scales, 254))
    ),
    "zeros do not fit": Mistake(
        "zeros in rows",
        carrier._of_scale_0,
        lambda right, scales, there: there & (scales < 0),
    ),
    "the lowest block is of zeros": Mistake(
        "subnormal rows", carrier._holds_codes, result(lambda holds: holds * 0)
    ),
    "the rule's exponent for all": Mistake(
        CARRIED, carrier._final_exponent, lambda right, wanted, exponent, guess: exponent
    ),
}

MXFP4 = CODES | AVERAGES | DRAWN | WRITTEN_CARRIERS
