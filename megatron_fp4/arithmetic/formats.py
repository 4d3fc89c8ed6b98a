"""Element and scale formats: encode, decode, pack, unpack.

E2M1 (OCP Microscaling Formats v1.0, section 5.3.3): code bit 3 is the sign, bits 0-2 index the
magnitudes 0, .5, 1, 1.5, 2, 3, 4, 6. All arithmetic here is exact: divisions are by powers of
two, and every rounding is stated. Float64 input is computed in float64, all else in float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor

from megatron_fp4.recording import lasting

NUMERICS_VERSION = 3  # of docs/numerics.md; a change of any rule there increases it

E2M1_MAX = 6.0
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

_VALUES = E2M1_MAGNITUDES + tuple(-m for m in E2M1_MAGNITUDES)
_PAIRS = tuple(v for byte in range(256) for v in (_VALUES[byte & 15], _VALUES[byte >> 4]))

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


# --- E2M1 ---------------------------------------------------------------------------------------


def encode_e2m1(v: Tensor, bits: Tensor | None = None, average: Tensor | None = None) -> Tensor:
    """E2M1 codes of `v`, one code in each byte.

    v: float32 or float64, any shape, already divided by its scale. Magnitudes above 6 saturate.
    bits: None rounds to nearest, ties to the even code. Otherwise uniform integers in [0, 65536)
        of v's shape, for stochastic rounding: the magnitude is rounded up where its fraction of the
        interval between two grid points exceeds (bits + 1/2) / 65536.
    average: a moving average of v, divided by the same scale, of v's shape and dtype; bits is then
        not read. v becomes that of its two neighbours on the grid which is nearer to the average
        (Q-EMA, arXiv 2502.20853). If the average is midway between them, v is rounded to nearest.
        A v on the grid is not changed; a zero v needs an average of 0.
    Returns uint8 of v's shape. The sign is kept on zero (-0.1 becomes code 8). The result for NaN
    is undefined: callers replace it.
    """
    # Integer arithmetic on the bits is several times faster on a CPU than comparisons and
    # selections.
    integers, mantissa_bits, bias = _LAYOUT[v.dtype]
    magnitude = v.abs().clamp_(max=E2M1_MAX)
    # Binade 0 holds [0, 2) in steps of .5, binade 1 [2, 4) in steps of 1, binade 2 [4, 6] in
    # steps of 2. The code is the magnitude in units of the step, plus 2 for each binade.
    binade = (magnitude.view(integers) >> mantissa_bits).sub_(bias).clamp_(min=0)
    per_step = (bias + 1 - binade).bitwise_left_shift_(mantissa_bits).view(v.dtype)  # 2, 1, 1/2
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
    return integer.to(integers).add_(binade, alpha=2).bitwise_or_(sign).to(torch.uint8)


def decode_e2m1(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of unpacked E2M1 codes (uint8), in `dtype`; exact in BF16, FP16 and wider dtypes."""
    return table(_VALUES, dtype, codes.device)[codes.int()]


def pack(codes: Tensor) -> Tensor:
    """Packs two 4-bit codes into a byte along the last axis, element 2i in the low nibble.

    codes: uint8 [..., K] with K even. Returns uint8 [..., K / 2].
    """
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """The inverse of `pack`: uint8 [..., K / 2] to uint8 codes [..., K]."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def decode_packed_e2m1(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """`decode_e2m1(unpack(packed))`, faster: each table look-up decodes a pair of elements."""
    wide = {2: torch.int32, 4: torch.int64, 8: torch.complex128}[dtype.itemsize]
    pairs = table(_PAIRS, dtype, packed.device).view(wide)
    values = pairs.index_select(0, packed.flatten().int()).view(dtype)
    return values.view(*packed.shape[:-1], 2 * packed.shape[-1])


# --- E8M0 ---------------------------------------------------------------------------------------


def block_exponent(amax: Tensor) -> tuple[Tensor, Tensor]:
    """(m, e) with amax = m * 2^e and 1 <= m < 2, exact for subnormals too.

    amax: must be positive and finite where the result is used; zero gives (0, -1).
    """
    mantissa, exponent = torch.frexp(amax)
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
            ulps = below + ((ulps - below) * 65536 > bits + 0.5)
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


# --- FP8 elements -------------------------------------------------------------------------------

FP8_ELEMENTS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def element_max(element: str) -> float:
    """The largest magnitude of an element format: e2m1, e4m3 or e5m2."""
    return E2M1_MAX if element == "e2m1" else torch.finfo(FP8_ELEMENTS[element]).max


def encode_fp8(v: Tensor, element: str) -> Tensor:
    """FP8 codes (uint8) of `v`, rounded to nearest even, saturated at the format's maximum.

    element: "e4m3" or "e5m2". Without the clamp torch's cast would give NaN or Inf beyond the
    maximum. Torch casts float64 to float32 first, so a float64 input is rounded twice.
    """
    limit = element_max(element)
    return v.clamp(-limit, limit).to(FP8_ELEMENTS[element]).view(torch.uint8)


def decode_fp8(codes: Tensor, element: str, dtype: torch.dtype) -> Tensor:
    """Values in `dtype` of FP8 codes (uint8). element: "e4m3" or "e5m2"."""
    return codes.view(FP8_ELEMENTS[element]).to(dtype)
