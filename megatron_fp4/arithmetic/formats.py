"""The number formats of elements and of scales, and how values become codes and codes values.

Elements are 4-bit floats (`Fp4`: E2M1, E1M2) or FP8 (`Fp8`). Scales are powers of two (E8M0) or
small unsigned floats (`ScaleFloat`: E4M3, UE5M3). Float64 input is computed in float64, all else in
float32. Nothing is rounded but where a docstring says how: other steps, such as a division by a
power of two, are exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, cached_property
from typing import ClassVar

import torch
from torch import Tensor

from megatron_fp4.recording import lasting

NUMERICS_VERSION = 3  # of docs/numerics.md; a change of any rule there increases it

E8M0_BIAS = 127
E8M0_NAN = 0xFF


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a model of `dtype` quantizes and accumulates: float64 for float64, else
    float32."""
    return torch.promote_types(dtype, torch.float32)


def widen(x: Tensor) -> Tensor:
    """`x` in the dtype in which quantization computes; see `wide`."""
    return x.to(wide(x.dtype))


def table(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A constant tensor on a device. It is cached, since a copy from the host waits for the GPU."""
    return lasting(_table, values, dtype, device)


@cache
def _table(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


# Of a float: the integer type of its bits, the width of its mantissa, its exponent's bias.
_LAYOUT = {torch.float32: (torch.int32, 23, 127), torch.float64: (torch.int64, 52, 1023)}


# --- 4-bit elements -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fp4:
    """A 4-bit element format: a float with a sign, an exponent bias of 1, and no code for Inf or
    NaN.

    name: of the format. mantissa_bits: 1 or 2; the exponent has the other bits.
    Code bit 3 is the sign, and bits 0-2 index the magnitudes. Two codes share a byte.
    """

    name: str
    mantissa_bits: int
    packed: ClassVar[bool] = True

    @cached_property
    def magnitudes(self) -> tuple[float, ...]:
        """The magnitudes by code. Those of the exponent fields 0 and 1 have the same steps."""
        ones = 1 << self.mantissa_bits
        fields = (divmod(code, ones) for code in range(8))
        return tuple(
            math.ldexp(fraction + ones * (field > 0), max(field - 1, 0) - self.mantissa_bits)
            for field, fraction in fields
        )

    @cached_property
    def max(self) -> float:
        return self.magnitudes[-1]

    @cached_property
    def smallest(self) -> float:
        """The smallest magnitude above 0."""
        return self.magnitudes[1]

    def encode(
        self, v: Tensor, bits: Tensor | None = None, average: Tensor | None = None
    ) -> Tensor:
        """Codes of `v`, one code in each byte.

        v: float32 or float64, any shape, already divided by its scale. Magnitudes above `max`
            saturate.
        bits: None rounds to nearest, ties to the even code. Otherwise uniform integers in
            [0, 65536) of v's shape, for stochastic rounding: the magnitude is rounded up where its
            fraction of the interval between two grid points exceeds (bits + 1/2) / 65536.
        average: a moving average of v, divided by the same scale, of v's shape and dtype; bits is
            then not read. v becomes that of its two neighbours on the grid which is nearer to the
            average (Q-EMA, arXiv 2502.20853). If the average is midway between them, v is rounded
            to nearest. A v on the grid is not changed; a zero v needs an average of 0.
        Returns uint8 of v's shape. The sign is kept on zero (-0.1 becomes code 8 in E2M1). The
        result for NaN is undefined: callers replace it.
        """
        # Integer arithmetic on the bits is several times faster on a CPU than comparisons and
        # selections.
        integers, mantissa_bits, bias = _LAYOUT[v.dtype]
        magnitude = v.abs().clamp_(max=self.max)
        # Binade 0 holds [0, 2), and binade b above it [2^b, 2^(b + 1)), in steps that are twice as
        # long in each. The code is the magnitude in units of the step, plus for each binade the
        # number of steps in [0, 1).
        binade = (magnitude.view(integers) >> mantissa_bits).sub_(bias).clamp_(min=0)
        per_step = (bias + self.mantissa_bits - binade).bitwise_left_shift_(mantissa_bits)
        per_step = per_step.view(v.dtype)  # in E2M1 2, 1, 1/2
        steps = magnitude.mul_(per_step)
        if average is not None:
            integer = steps.floor()
            middle = (integer + 0.5) / per_step
            toward = torch.where(v.signbit(), -average, average)
            up = torch.where(toward == middle, steps.round() > integer, toward > middle)
            integer += up & ((steps > integer) | (integer == 0))
        elif bits is None:
            integer = steps.round()  # half to even, and even integers are even codes
        else:
            integer = steps.floor()
            # Both differences are exact wherever they are near zero, so their sign is correct.
            excess = steps.sub_(integer).mul_(65536).sub_(bits).sub_(0.5)
            integer += excess.ceil_().clamp_(0, 1)
        sign = (v.view(integers) >> (8 * v.element_size() - 4)) & 8
        code = integer.to(integers).add_(binade, alpha=1 << self.mantissa_bits)
        return code.bitwise_or_(sign).to(torch.uint8)

    def decode(self, codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Values of unpacked codes (uint8), in `dtype`; exact in BF16, FP16 and wider dtypes."""
        return table(self._values, dtype, codes.device)[codes.int()]

    def stored(self, codes: Tensor) -> Tensor:
        """Codes as `QuantizedTensor` has them."""
        return pack(codes)

    def decode_stored(self, packed: Tensor, dtype: torch.dtype) -> Tensor:
        """`decode(unpack(packed))`, faster: each table look-up decodes a pair of elements."""
        wide = {2: torch.int32, 4: torch.int64, 8: torch.complex128}[dtype.itemsize]
        pairs = table(self._pairs, dtype, packed.device).view(wide)
        values = pairs.index_select(0, packed.flatten().int()).view(dtype)
        return values.view(*packed.shape[:-1], 2 * packed.shape[-1])

    @cached_property
    def _values(self) -> tuple[float, ...]:
        return self.magnitudes + tuple(-magnitude for magnitude in self.magnitudes)

    @cached_property
    def _pairs(self) -> tuple[float, ...]:
        values = self._values
        return tuple(v for byte in range(256) for v in (values[byte & 15], values[byte >> 4]))


E2M1 = Fp4("e2m1", mantissa_bits=1)  # OCP Microscaling Formats v1.0, section 5.3.3
E1M2 = Fp4("e1m2", mantissa_bits=2)  # its grid is uniform


def pack(codes: Tensor) -> Tensor:
    """Packs two 4-bit codes into a byte along the last axis, element 2i in the low nibble.

    codes: uint8 [..., K] with K even. Returns uint8 [..., K / 2].
    """
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """The inverse of `pack`: uint8 [..., K / 2] to uint8 codes [..., K]."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


# --- E8M0 ---------------------------------------------------------------------------------------


def block_exponent(maximum: Tensor) -> tuple[Tensor, Tensor]:
    """Splits the maximum of each block into a mantissa m and an exponent e.

    Returns (m, e) with maximum = m * 2^e and 1 <= m < 2. Both are exact for subnormal numbers too.
    The results for a maximum that is not positive and finite must not be used; zero gives (0, -1).
    """
    mantissa, exponent = torch.frexp(maximum)
    return mantissa * 2, exponent - 1


def encode_e8m0(exponent: Tensor) -> Tensor:
    """E8M0 bytes (uint8) s + 127 of integer exponents s, which are clamped to [-127, 127]."""
    return (exponent.clamp(-E8M0_BIAS, E8M0_BIAS) + E8M0_BIAS).to(torch.uint8)


def decode_e8m0(byte: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """2^(byte - 127); 0xFF is NaN. Byte 0 is 2^-127, a float32 subnormal.

    Read from a table, because exp2 and ldexp of a vectorised math library need not be exact.
    """
    return table(_E8M0_VALUES, dtype, byte.device)[byte.int()]


_E8M0_VALUES = (*(math.ldexp(1.0, byte - E8M0_BIAS) for byte in range(255)), math.nan)


# --- small floats as scales ---------------------------------------------------------------------


@dataclass(frozen=True)
class ScaleFloat:
    """An unsigned 8-bit float used as a block scale.

    mantissa_bits, bias: of the format; a code is (exponent field << mantissa_bits) | mantissa.
    max: the largest finite value, at which scales saturate. nan: the code of NaN.
    """

    name: str
    mantissa_bits: int
    bias: int
    max: float
    nan: int

    def encode(self, x: Tensor, *, up: bool = False, bits: Tensor | None = None) -> Tensor:
        """Codes (uint8) of x >= 0, rounded to nearest even, or up (`up`).

        bits: uniform integers in [0, 65536) of x's shape, for stochastic rounding: x is rounded up
        where its fraction of the interval between two numbers exceeds (bits + 1/2) / 65536. None
        draws nothing. Values above `max` saturate, and NaN becomes the code of NaN.
        """
        width, lowest = self.mantissa_bits, 1 - self.bias
        finite = torch.nan_to_num(x, nan=0.0, posinf=self.max).clamp(max=self.max)
        exponent = (torch.frexp(finite)[1] - 1).clamp(min=lowest)  # subnormals share the lowest
        exponent = torch.where(finite > 0, exponent, lowest)  # frexp gives a zero the exponent 0
        ulps = finite * decode_e8m0(width - exponent + E8M0_BIAS, finite.dtype)
        if bits is None:
            ulps = torch.ceil(ulps) if up else torch.round(ulps)
        else:
            below = ulps.floor()
            ulps = below + ((ulps - below) * 65536 > bits.to(ulps.dtype) + 0.5)
        # Where a mantissa is rounded up to the next binade, the addition carries into the exponent
        # field.
        code = ((exponent - lowest) << width) + ulps.to(exponent.dtype)
        return torch.where(x.isnan(), self.nan, code).to(torch.uint8)

    def decode(self, code: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Values of codes (uint8), in `dtype`."""
        return table(self._values, dtype, code.device)[code.int()]

    @cached_property
    def _values(self) -> tuple[float, ...]:
        bits, ones = self.mantissa_bits, 1 << self.mantissa_bits
        values = []
        for code in range(256):
            field, fraction = code >> bits, code & (ones - 1)
            significand = fraction if field == 0 else fraction + ones
            value = math.ldexp(significand, max(field, 1) - self.bias - bits)
            values.append(value if value <= self.max else math.nan)
        return tuple(values)


E4M3 = ScaleFloat("e4m3", mantissa_bits=3, bias=7, max=448.0, nan=0x7F)
# Five exponent bits and no sign; the top exponent is reserved, as in IEEE formats.
UE5M3 = ScaleFloat("ue5m3", mantissa_bits=3, bias=15, max=61440.0, nan=0xFF)
SCALE_FLOATS = {"e4m3": E4M3, "ue5m3": UE5M3}


@cache
def scale_grid(scale: str) -> tuple[float, ...]:
    """The finite numbers of a format of block scales (e8m0, e4m3 or ue5m3), ascending."""
    values = _E8M0_VALUES if scale == "e8m0" else SCALE_FLOATS[scale]._values
    return tuple(value for value in values if not math.isnan(value))


# --- FP8 elements -------------------------------------------------------------------------------

FP8_ELEMENTS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@dataclass(frozen=True)
class Fp8:
    """An 8-bit element format. name: of the format. dtype: torch's dtype of it."""

    name: str
    dtype: torch.dtype
    packed: ClassVar[bool] = False

    @cached_property
    def max(self) -> float:
        return torch.finfo(self.dtype).max

    @cached_property
    def smallest(self) -> float:
        """The smallest magnitude above 0, which is subnormal."""
        return torch.finfo(self.dtype).smallest_normal * torch.finfo(self.dtype).eps

    def encode(self, v: Tensor) -> Tensor:
        """Codes (uint8) of `v`, rounded to nearest even, saturated at the format's maximum.

        Without the clamp torch's cast would give NaN or Inf beyond the maximum. Torch casts float64
        to float32 first, so a float64 input is rounded twice.
        """
        return v.clamp(-self.max, self.max).to(self.dtype).view(torch.uint8)

    def decode(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        """Values in `dtype` of codes (uint8)."""
        return codes.view(self.dtype).to(dtype)

    def stored(self, codes: Tensor) -> Tensor:
        """Codes as `QuantizedTensor` has them."""
        return codes

    def decode_stored(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        """The same as `decode`."""
        return self.decode(codes, dtype)


# The element formats by name.
ELEMENTS: dict[str, Fp4 | Fp8] = {
    "e2m1": E2M1,
    "e1m2": E1M2,
    **{name: Fp8(name, dtype) for name, dtype in FP8_ELEMENTS.items()},
}
