"""Quantizer: element format, scale format, block, scale rule and rounding; and the named ones.

docs/numerics.md says what each of them does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal
from zlib import crc32

from megatron_fp4.arithmetic import formats
from megatron_fp4.arithmetic.fp8_scales import LONGEST, scales_in_fp8
from megatron_fp4.errors import ConfigError, check_choices

WHOLE_AXIS = 0  # a block size that means the whole axis
Rule = Literal["floor", "ceil", "mse", "nearest", "up", "four-over-six", "mse-fp8", "absmax"]
_RULES = {"e8m0": ("floor", "ceil", "nearest", "mse"), "fp32": ("absmax",)}
_FLOAT_RULES = ("nearest", "up", "four-over-six", "mse-fp8")  # of e4m3 and ue5m3


@dataclass(frozen=True)
class Quantizer:
    """How a matrix is quantized to 4-bit (or FP8) codes and block scales.

    element: the format of the codes: e2m1, or e1m2 (a uniform grid); in FP8 e4m3 or e5m2.
    scale: the format of the block scales: e8m0, e4m3, ue5m3 or fp32.
    block: (across, along): the elements that share a scale: `across` rows (the block height) by
        `along` elements of the blocked axis (the block length). 0 is the whole axis: (1, 0) is a
        scale for each row, (0, 0) one for the tensor; no other block has a 0.
    rule: how a block's scale follows from its largest magnitude.
        e8m0: floor (OCP; may clip), ceil (never clips; TetraJet, arXiv 2502.20853, section 3.2),
        nearest (may clip), or mse (floor's scale or twice that, by the smaller squared error).
        e4m3, ue5m3: nearest, up, and of e2m1 four-over-six (the maximum is scaled to 6 or 4, by the
        smaller error; arXiv 2512.02010) or mse-fp8 (the best of those that FP8 takes). fp32: absmax
    rounding: nearest (ties to even), stochastic, or ema: to the neighbour on the grid that is
        nearer to a moving average of the tensor (e2m1 and e8m0; Q-EMA, arXiv 2502.20853).
    prescale: multiplies the scaled value before it is rounded (3/4 in "Training LLMs with MXFP4",
        arXiv 2502.20586). Decoded values contain it; the GEMM's `correction` undoes it.
    tensor_max: e4m3 and ue5m3 only. Adds a tensor scale, chosen so that the largest block scale is
        about `tensor_max` (NVFP4: 448); 0 adds none.
    inflate: multiplies e4m3 and ue5m3 block scales; with 17/16 a rounded scale never clips.
    row_max: e8m0, e4m3 and ue5m3. As tensor_max, but each row has a scale of its own, chosen so
        that its largest block scale is about `row_max`; under e8m0, where it is a power of two, so
        that its largest magnitude is row_max times the largest element. 0 adds none.
    unit_gain: e4m3 and ue5m3. Elements along the blocked axis in groups of which the block scales
        are multiplied by <x, x> / <x, q> after x was rounded to q, so that the gain
        <x, q> / <x, x> is 1 (MS-EDEN, arXiv 2601.22813). 0 multiplies nothing.
    scale_rounding: how such products are rounded to scales: nearest or stochastic.
    Raises ConfigError for fields that contradict each other.
    """

    element: Literal["e2m1", "e1m2", "e4m3", "e5m2"] = "e2m1"
    scale: Literal["e8m0", "e4m3", "ue5m3", "fp32"] = "e8m0"
    block: tuple[int, int] = (1, 32)
    rule: Rule = "floor"
    rounding: Literal["nearest", "stochastic", "ema"] = "nearest"
    prescale: float = 1.0
    tensor_max: float = 0.0
    inflate: float = 1.0
    row_max: float = 0.0
    unit_gain: int = 0
    scale_rounding: Literal["nearest", "stochastic"] = "nearest"

    def __post_init__(self) -> None:
        _check_fields(self)

    def __hash__(self) -> int:  # cheap, since every call of a linear hashes it to find its plan
        return self._hash

    @cached_property
    def _hash(self) -> int:
        words = self.element, self.scale, self.block, self.rule, self.rounding
        return crc32(repr(words).encode())  # equal in every process, since pickling stores it

    @cached_property
    def fields(self) -> tuple[Any, ...]:
        """The arguments of the constructor. Their hash takes no Python code."""
        return tuple(getattr(self, field.name) for field in fields(self))

    @cached_property
    def format(self) -> formats.Fp4 | formats.Fp8:
        return formats.ELEMENTS[self.element]

    @cached_property
    def stochastic(self) -> bool:
        return self.rounding == "stochastic"

    @cached_property
    def draws(self) -> bool:
        """Whether it draws random bits, for elements or for scales."""
        return self.stochastic or self.scale_rounding == "stochastic"

    @cached_property
    def mxfp4(self) -> bool:
        """Whether the format is OCP's MXFP4: E2M1 with an E8M0 scale for each block of 32."""
        form = self.element, self.scale, self.block, self.row_max
        return form == ("e2m1", "e8m0", (1, 32), 0.0)

    @cached_property
    def spans_axis(self) -> bool:
        """Whether a block spans the whole blocked axis: its scale can then multiply the product."""
        return self.block[1] == WHOLE_AXIS

    @cached_property
    def scales_product(self) -> bool:
        """Whether a scale of rows or of the tensor is left to multiply the product with."""
        return self.spans_axis or self.tensor_max > 0 or self.row_max > 0

    @cached_property
    def exact_in_bf16(self) -> bool:
        """Whether elements times block scales are BF16 numbers: no float32 scale lies within the
        blocked axis."""
        return self.spans_axis or self.scale != "fp32"

    def nbytes(self, rows: int, k: int) -> int:
        """The bytes of codes and scales of a [rows, k] matrix with the blocked axis last."""
        codes = rows * k // 2 if self.format.packed else rows * k
        across, along = self.block[0] or rows, self.block[1] or k
        scales = (rows // across) * (k // along) * (4 if self.scale == "fp32" else 1)
        return codes + scales + 4 * (rows if self.row_max else self.tensor_max > 0)

    def scale_spans(self, sharded: int | None, axis: int) -> bool:
        """Whether ranks share a scale of a matrix that is blocked along `axis` and sharded over
        ranks along the axis `sharded` (None: not sharded)."""
        if self.tensor_max or self.block == (WHOLE_AXIS, WHOLE_AXIS):
            return sharded is not None
        return (self.spans_axis or self.row_max > 0) and sharded == axis


# --- which fields go together --------------------------------------------------------------------


def _check_fields(quantizer: Quantizer) -> None:
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
    if q.scale in formats.SCALE_FLOATS:
        return formats.SCALE_FLOATS[q.scale].max
    return 2.0**formats.E8M0_BIAS


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


# --- names ---------------------------------------------------------------------------------------

NVFP4 = Quantizer(scale="e4m3", block=(1, 16), rule="nearest", tensor_max=448.0)

_NAMED = {
    "mxfp4": Quantizer(rule="floor"),
    "mxfp4-ceil": Quantizer(rule="ceil"),
    "nvfp4": NVFP4,
    "nvfp4-four-over-six": replace(NVFP4, rule="four-over-six", tensor_max=256.0),
    # A block scale that is rounded down makes values exceed 6. They are clipped, which biases
    # stochastic rounding. Scales larger by 17/16 prevent this. tensor_max 256 leaves room for
    # them below E4M3's maximum of 448.
    "nvfp4-17-16": replace(NVFP4, inflate=17 / 16, tensor_max=256.0),
    "vector": Quantizer(scale="fp32", block=(1, WHOLE_AXIS), rule="absmax"),
}


def list_quantizers() -> list[str]:
    """All names that `quantize` takes; "-sr" is the same quantizer with stochastic rounding."""
    twins = [f"{n}-sr" for n, q in _NAMED.items() if q.rule != "four-over-six"]
    return sorted([*_NAMED, *twins])


def get_quantizer(name: str) -> Quantizer:
    """The named Quantizer. Raises ConfigError, which lists the known names, for an unknown one."""
    if name not in list_quantizers():
        raise ConfigError(f"unknown quantizer {name!r}; known: {', '.join(list_quantizers())}")
    if name in _NAMED:
        return _NAMED[name]
    return replace(_NAMED[name.removesuffix("-sr")], rounding="stochastic")
