"""Checks which fields of a Quantizer go together."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from megatron_fp4.arithmetic.formats import E8M0_BIAS, SCALE_FLOATS
from megatron_fp4.arithmetic.fp8_scales import LONGEST, scales_in_fp8
from megatron_fp4.errors import ConfigError, check_choices

if TYPE_CHECKING:
    from megatron_fp4.arithmetic.quantizer import Quantizer

Rule = Literal["floor", "ceil", "mse", "nearest", "up", "four-over-six", "mse-fp8", "absmax"]
_RULES = {"e8m0": ("floor", "ceil", "nearest", "mse"), "fp32": ("absmax",)}
_FLOAT_RULES = ("nearest", "up", "four-over-six", "mse-fp8")  # of e4m3 and ue5m3


def check_fields(quantizer: Quantizer) -> None:
    """Raises ConfigError for fields that are out of range or contradict each other."""
    check_choices(quantizer)
    _check_numbers(quantizer)
    _check_block(quantizer)
    _check_scales(quantizer)
    _check_rounding(quantizer)
    _check_gain(quantizer)


def _check_numbers(q: Quantizer) -> None:
    for name in ("prescale", "inflate", "tensor_max", "row_max"):
        if not isinstance(value := getattr(q, name), int | float) or not math.isfinite(value):
            raise ConfigError(f"{name} is a finite number, not {value!r}")


def _check_block(q: Quantizer) -> None:
    if not isinstance(q.block, tuple) or len(q.block) != 2:
        raise ConfigError(
            f"block is two numbers, across and along, such as (1, 32), not {q.block!r}"
        )
    sizes = [b for b in q.block if isinstance(b, int) and b >= 0]
    if sizes != list(q.block) or (not q.spans_axis and 0 in sizes):
        raise ConfigError(f"block is [across, along], [1, 0] or [0, 0], not {q.block}")
    if q.spans_axis and q.block[0] > 1:
        raise ConfigError(f"a block along a whole axis is [1, 0] or [0, 0], not {q.block}")


def _check_scales(q: Quantizer) -> None:
    if min(q.prescale, q.inflate) <= 0 or min(q.tensor_max, q.row_max) < 0:
        raise ConfigError("prescale and inflate are above 0, tensor_max and row_max 0 or more")
    if q.scale in ("e8m0", "fp32") and (q.tensor_max or q.inflate != 1.0):
        raise ConfigError(f"scale {q.scale} takes neither tensor_max nor inflate")
    if q.row_max and (q.scale == "fp32" or q.tensor_max or q.spans_axis or q.block[0] != 1):
        raise ConfigError(
            "row_max takes e8m0, e4m3 or ue5m3 scales for blocks within a row, and no tensor_max"
        )
    if q.row_max and q.scale == "e8m0" and math.frexp(q.row_max)[0] != 0.5:
        raise ConfigError(f"row_max of e8m0 scales is a power of two, not {q.row_max:g}")
    rules = _RULES.get(q.scale, _FLOAT_RULES)
    if q.rule not in rules:
        raise ConfigError(f"scale {q.scale} takes rule {' or '.join(rules)}, not {q.rule!r}")
    largest = _largest_scale(q)
    for name, value in (("tensor_max", q.tensor_max), ("row_max", q.row_max)):
        if value > largest:
            raise ConfigError(
                f"{q.rule} takes no {name} of {value:g}: its largest scale is {largest:g}"
            )


def _largest_scale(q: Quantizer) -> float:
    """The largest block scale that the quantizer's rule gives. 2^127 for E8M0 and FP32 scales."""
    if q.rule == "mse-fp8":
        return scales_in_fp8(q.scale)[-1][0]
    return SCALE_FLOATS[q.scale].max if q.scale in SCALE_FLOATS else 2.0**E8M0_BIAS


def _check_rounding(q: Quantizer) -> None:
    if not q.format.packed and (q.scale != "fp32" or q.stochastic or not q.spans_axis):
        raise ConfigError(
            f"{q.element} elements take fp32 scales of a whole row or tensor, and nearest rounding"
        )
    form = q.element, q.scale, q.prescale, q.row_max
    if q.rounding == "ema" and form != ("e2m1", "e8m0", 1.0, 0.0):
        raise ConfigError(
            "rounding ema takes e2m1 elements, e8m0 scales, no row_max and no prescale"
        )
    if q.rule == "mse" and (q.rounding != "nearest" or q.prescale != 1.0):
        raise ConfigError("rule mse takes nearest rounding and no prescale")
    fits = (q.element, q.block[0], q.rounding) == ("e2m1", 1, "nearest")
    if q.rule in ("four-over-six", "mse-fp8") and not fits:
        raise ConfigError(f"{q.rule} takes blocks of one row, nearest rounding and e2m1 elements")
    if q.rule == "mse-fp8":
        _check_scales_in_fp8(q)


def _check_scales_in_fp8(q: Quantizer) -> None:
    if (q.inflate, q.prescale, q.unit_gain) != (1.0, 1.0, 0):
        raise ConfigError("mse-fp8 takes neither inflate nor prescale nor unit_gain")
    if not 0 < q.block[1] <= LONGEST:
        raise ConfigError(f"mse-fp8 takes blocks of at most {LONGEST} elements, not {q.block}")


def _check_gain(q: Quantizer) -> None:
    group, length = q.unit_gain, q.block[1]
    if not isinstance(group, int) or group < 0:
        raise ConfigError(f"unit_gain is a number of elements, 0 or more, not {group!r}")
    if q.scale_rounding != "nearest" and not group:
        raise ConfigError("scale_rounding rounds the scales that unit_gain changes: give both")
    form = q.element == "e2m1" and q.scale in ("e4m3", "ue5m3")
    if group and (not form or q.block[0] != 1 or q.spans_axis):
        raise ConfigError(
            "unit_gain takes e2m1 elements, and e4m3 or ue5m3 scales for blocks within a row"
        )
    if group and (group % length or q.rounding != "nearest" or q.prescale != 1.0):
        raise ConfigError(
            f"unit_gain takes a multiple of the block of {length}, nearest rounding and no prescale"
        )
