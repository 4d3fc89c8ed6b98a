"""Checks that a matrix consists of whole blocks of a quantizer."""

from __future__ import annotations

from megatron_fp4.arithmetic.quantizer import Quantizer
from megatron_fp4.errors import ConfigError


def check_divides(quantizer: Quantizer, rows: int, k: int, axis: int | str) -> None:
    """Raises ConfigError unless a [rows, k] matrix consists of whole blocks of a quantizer, and of
    whole groups of its `unit_gain`.

    The blocked axis is the last one. axis: its name in the message.
    """
    across, along = quantizer.block
    if along and k % along:
        raise ConfigError(
            f"axis {axis} has {k} elements, not a multiple of the block of {along}: nothing is "
            "padded silently; pad it or choose another block"
        )
    if quantizer.unit_gain and k % quantizer.unit_gain:
        raise ConfigError(
            f"axis {axis} has {k} elements, not a multiple of unit_gain {quantizer.unit_gain}"
        )
    if across and rows % across:
        raise ConfigError(
            f"{rows} rows are not a multiple of the {across} x {along} block across axis {axis}"
        )
    if quantizer.format.packed and k % 2:
        raise ConfigError(f"axis {axis} has {k} elements; packing two a byte needs an even number")
