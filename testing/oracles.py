"""Expected results by exact rational arithmetic and scalar code.

They are written from the definitions of the formats, and share no code with the package.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

GRID = [Fraction(n, 2) for n in (0, 1, 2, 3, 4, 6, 8, 12)]  # of E2M1
UNIFORM = [Fraction(n, 4) for n in range(8)]  # of E1M2
MASK = 0xFFFFFFFF


# --- Philox, one counter at a time ----------------------------------------------------------------


def philox_scalar(
    counter: tuple[int, int, int, int], key: tuple[int, int], rounds: int
) -> tuple[int, int, int, int]:
    """Philox-4x32 in Python integers, from the paper's figure."""
    l0, r0, l1, r1 = counter
    for i in range(rounds):
        k0, k1 = key[0] + i * 0x9E3779B9 & MASK, key[1] + i * 0xBB67AE85 & MASK
        high0, low0 = divmod(0xD2511F53 * l0, 1 << 32)
        high1, low1 = divmod(0xCD9E8D57 * l1, 1 << 32)
        l0, r0, l1, r1 = high1 ^ r0 ^ k0, low1, high0 ^ r1 ^ k1, low0
    return l0, r0, l1, r1


def element_bits(seed: int, step: int, stream: int, group: int, j: int) -> int:
    """The 16 random bits of element j of a group of eight."""
    counter = (group & MASK, group >> 32, step, stream)
    word = philox_scalar(counter, (seed & MASK, seed >> 32), 7)[j // 2]
    return word >> 16 if j % 2 else word & 0xFFFF


def matrix_bits(rows: int, columns: int, seed: int, step: int, stream: int) -> Tensor:
    """The 16 random bits of each element of a matrix: int64 [rows, columns]."""
    groups = -(-columns // 8)
    return torch.tensor(
        [
            [element_bits(seed, step, stream, r * groups + c // 8, c % 8) for c in range(columns)]
            for r in range(rows)
        ]
    )


def fnv1a(text: str) -> int:
    """FNV-1a, 32 bits, as its authors define it."""
    value = 2166136261
    for byte in text.encode():
        value = (value ^ byte) * 16777619 % (1 << 32)
    return value


# --- 4-bit elements -------------------------------------------------------------------------------


def fp4_code(v: float, bits: int | None = None, grid: list[Fraction] = GRID) -> int:
    """The code of one finite value: nearest with ties to even, or stochastic with 16 bits."""
    sign = 8 if math.copysign(1.0, v) < 0 else 0
    a = min(abs(Fraction(v)), grid[-1])
    low = max(i for i, g in enumerate(grid) if g <= a)
    if low == 7:
        return sign + 7
    fraction = (a - grid[low]) / (grid[low + 1] - grid[low])
    if bits is None:
        up = fraction > Fraction(1, 2) or (fraction == Fraction(1, 2) and low % 2 == 1)
    else:
        up = fraction > (bits + Fraction(1, 2)) / 65536
    return sign + low + up


# --- scales ---------------------------------------------------------------------------------------


def exponent_of(m: Fraction) -> int:
    """e with 2^e <= m < 2^(e + 1), by comparison alone."""
    e = 0
    while Fraction(2) ** e > m:
        e -= 1
    while Fraction(2) ** (e + 1) <= m:
        e += 1
    return e


def e8m0_byte(maximum: float, rule: str, limit: Fraction = GRID[-1]) -> int:
    """The scale byte of a block: OCP's floor rule, the smallest power of two that clips nothing
    (ceil), or the one nearest to maximum / limit, of two the larger one.

    limit: the largest element. OCP's emax is its exponent.
    """
    if math.isnan(maximum) or math.isinf(maximum):
        return 0xFF
    if maximum == 0:
        return 0
    m = Fraction(maximum)
    if rule == "floor":
        s = exponent_of(m) - exponent_of(limit)
    elif rule == "nearest":
        s = exponent_of(m / limit)
        below, above = m / limit - Fraction(2) ** s, Fraction(2) ** (s + 1) - m / limit
        s += above <= below
    else:  # the least s with m <= limit * 2^s
        s = exponent_of(m / limit)
        s += m > limit * Fraction(2) ** s
    return max(-127, min(127, s)) + 127


def mx_block(
    block: list[float],
    rule: str,
    prescale: Fraction = Fraction(1),
    grid: list[Fraction] = GRID,
) -> tuple[int, list]:
    """Quantizes the values of one block to 4-bit elements, rounded to nearest.

    Returns the byte of the block's E8M0 scale, and the elements' codes. rule: how the scale follows
    from the largest magnitude, "floor", "ceil" or "nearest".
    """
    maximum = max((abs(v) if not math.isnan(v) else math.inf) for v in block)
    byte = e8m0_byte(maximum, rule, grid[-1])
    if byte == 0xFF:
        return byte, [0] * len(block)
    scale = Fraction(2) ** (127 - byte)

    def code(v: float) -> int:
        exact = Fraction(v) * scale * prescale
        magnitude = fp4_code(float(min(abs(exact), grid[-1])), grid=grid)
        return magnitude + (8 if math.copysign(1.0, v) < 0 else 0)

    return byte, [code(v) for v in block]


def mse_block(block: list[float], grid: list[Fraction] = GRID) -> tuple[int, list]:
    """(E8M0 byte, codes) of the values of one block by rule mse, rounded to nearest.

    Both scales are tried. An element's squared error is rounded to float32 and counted in units of
    2^-18 of floor's squared scale.
    """
    floor = mx_block(block, "floor", grid=grid)
    byte, codes = floor
    if byte >= 254:  # NaN, or no larger scale
        return floor
    unit = Fraction(2) ** (byte - 127)
    double = [
        fp4_code(float(min(abs(Fraction(v)) / unit / 2, grid[-1])), grid=grid)
        + (8 if math.copysign(1.0, v) < 0 else 0)
        for v in block
    ]

    def error(found: list[int], scale: int) -> int:
        total = 0
        for code, v in zip(found, block, strict=True):
            off = grid[code & 7] * scale - abs(Fraction(v)) / unit
            narrow = np.float32(float(off))
            assert Fraction(float(narrow)) == off or abs(off) < Fraction(1, 2**20)
            total += round(Fraction(float(narrow * narrow)) * 2**18)
        return total

    return (byte + 1, double) if error(double, 2) < error(codes, 1) else floor


def ue5m3_value(code: int) -> Fraction | None:
    """The value of a UE5M3 code; None for a NaN, which is any code with the top exponent."""
    field, fraction = divmod(code, 8)
    if field == 31:
        return None
    if field == 0:
        return Fraction(fraction, 8) * Fraction(2) ** -14
    return (1 + Fraction(fraction, 8)) * Fraction(2) ** (field - 15)


def nearest_code(x: Fraction, values: list[Fraction], up: bool = False) -> int:
    """The index in ascending `values` that x rounds to: nearest with ties to an even index, or
    up; saturated."""
    if x >= values[-1]:
        return len(values) - 1
    low = max(i for i, v in enumerate(values) if v <= x)
    below, above = x - values[low], values[low + 1] - x
    if up:
        return low + (below > 0)
    return low + (below > above or (below == above and low % 2 == 1))


# --- statistics -----------------------------------------------------------------------------------


def normal(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Gaussian values from numpy, the same on every version of torch."""
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).to(dtype)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """The relative Frobenius error, in float64."""
    return float((actual.double() - expected).norm() / expected.norm())
